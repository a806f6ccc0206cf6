"""Receipts of answers: asked for with a header of the request, named in one of the response.

x-shardcompute-receipt: yes                 in the request
x-shardcompute-receipt: rcpt-…[, rcpt-…]    in the response, one for each choice
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import Response

from shardcompute.api.access.requirement import Access
from shardcompute.api.body import ReplyBody
from shardcompute.api.context import caller_of
from shardcompute.api.errors import RequestError
from shardcompute.api.generation.parameters import Plan
from shardcompute.api.openapi import ApiRoute
from shardcompute.security.api_keys import KeyRole
from shardcompute.security.receipts.records import new_receipt_id

if TYPE_CHECKING:
    from shardcompute.node.driver.receipts.store import ReceiptStore

RECEIPT_HEADER = "x-shardcompute-receipt"
AUDIT_HEADER = "x-shardcompute-audit"
"""With a receipt: what audits of the answer have found, `passed`, `failed`, `withheld`, `disputed` or
`inconclusive`."""
_WAIT_S = 21.0
"""A little longer than stages may take to sign after the last token."""
_WORDS = {"": False, "no": False, "0": False, "false": False, "yes": True, "1": True, "true": True}


def with_receipts(request: Request, plan: Plan) -> Plan:
    """The plan with an id for each answer that is to have a receipt: where the request asks for it, or the server gives
    one with every answer."""
    said = request.headers.get(RECEIPT_HEADER, "").strip().lower()
    if said not in _WORDS:
        raise RequestError(
            f"The header {RECEIPT_HEADER} says neither yes nor no.", hint=f"send {RECEIPT_HEADER}: yes"
        )
    if not (_WORDS[said] or request.app.state.gives_receipts):
        return plan
    return replace(plan, requests=tuple(replace(each, receipt=new_receipt_id()) for each in plan.requests))


def name_receipts(response: Response, plan: Plan) -> None:
    """Tell the client under which ids its receipts will be (`GET /v1/receipts/ID`)."""
    ids = [each.receipt for each in plan.requests if each.receipt]
    if ids:
        response.headers[RECEIPT_HEADER] = ", ".join(ids)


class ReceiptRunReply(ReplyBody):
    """Rows that one shape of the chain computed."""

    session: int
    epoch: int
    opened_frame: int
    start: int
    stop: int
    picked_from: int
    nodes: list[str]


class ReceiptReply(ReplyBody):
    """A receipt, as `shardcompute receipt verify` reads it. What it means is in `docs/receipts.md`."""

    format: str
    id: str
    cluster: str
    issued_s: int
    model: str
    adapter: str
    tokens: list[int]
    prompt_tokens: int
    given_tokens: int
    reused_rows: int
    runs: list[ReceiptRunReply]
    transcripts: list[dict[str, Any]]
    """What each stage signed."""
    certificates: dict[str, str]
    authority: str
    driver: str
    signature: str


async def receipt(request: Request) -> Response:
    store: ReceiptStore | None = request.app.state.receipts
    caller = caller_of(request)
    asked_by = None if caller.role.includes(KeyRole.OPERATE) else caller.key_id
    receipt_id = request.path_params["receipt_id"]
    found = None if store is None else await asyncio.to_thread(store.find, receipt_id, asked_by, _WAIT_S)
    if found is None:
        raise RequestError(
            f"There is no receipt {receipt_id[:64]!r} that this key may see.",
            hint="ask with the key that the answer was asked for with, once it has ended; the latest are kept",
            code="receipt_not_found",
            status=404,
        )
    mark = "" if store is None else store.mark_of(receipt_id)
    headers = {AUDIT_HEADER: mark} if mark else {}
    return Response(found, media_type="application/json", headers=headers)


RECEIPT_ROUTES: tuple[ApiRoute, ...] = (
    ApiRoute(
        "GET",
        "/v1/receipts/{receipt_id}",
        receipt,
        "What the stages signed for of an answer that was asked for with a receipt.",
        needs=Access.USE,
        reply=ReceiptReply,
        statuses=(404,),
    ),
)
