"""Ledger routes: what the cluster's ledger comes to, and the whole of it as a file that anybody can check."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from shardcompute.api.access.requirement import Access
from shardcompute.api.errors import RequestError
from shardcompute.api.openapi import ApiRoute
from shardcompute.core.errors import UsageError
from shardcompute.node.cluster.ledger.views import LedgerView

if TYPE_CHECKING:
    from shardcompute.node.cluster.ledger.keeper import LedgerKeeper

_FRESH = {"cache-control": "no-store"}


async def cluster_ledger(request: Request) -> Response:
    view = await asyncio.to_thread(_ledger(request).newest_view)
    return Response(msgspec.json.encode(view), media_type="application/json", headers=_FRESH)


async def export_ledger(request: Request) -> Response:
    content = await asyncio.to_thread(_ledger(request).export)
    return Response(content, media_type="application/octet-stream", headers=_FRESH)


async def prove_receipt(request: Request) -> Response:
    try:
        content = await asyncio.to_thread(_ledger(request).prove_receipt, request.path_params["receipt_id"])
    except UsageError as error:
        raise RequestError(error.message, hint=error.hint, code="receipt_not_found", status=404) from error
    return Response(content, media_type="application/octet-stream", headers=_FRESH)


def _ledger(request: Request) -> LedgerKeeper:
    found: LedgerKeeper = request.app.state.admin.ledger
    return found


LEDGER_ROUTES: tuple[ApiRoute, ...] = (
    ApiRoute(
        "GET",
        "/cluster/ledger",
        cluster_ledger,
        "The ledger's head, and what its entries come to, machine by machine.",
        needs=Access.OBSERVE,
        reply=LedgerView,
        statuses=(403,),
    ),
    ApiRoute(
        "GET",
        "/cluster/ledger/export",
        export_ledger,
        "The whole ledger: lines of JSON, signed, as `shardcompute ledger verify` reads them.",
        needs=Access.OBSERVE,
        has_bytes=True,
        statuses=(403, 502),
    ),
    ApiRoute(
        "GET",
        "/cluster/ledger/receipts/{receipt_id}",
        prove_receipt,
        "The proof that a receipt is in the ledger, for who has no copy of it.",
        needs=Access.OBSERVE,
        has_bytes=True,
        statuses=(403, 404),
    ),
)
