"""ASGI application over a `Service`: routes, middleware, errors. `create_app` is all that others need."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from shardcompute.api import anthropic, cluster, ollama, openai
from shardcompute.api.access.cors import ModelCorsMiddleware
from shardcompute.api.access.hosts import LOOPBACK_ONLY, AllowedHosts, HostMiddleware
from shardcompute.api.access.metering import KeyMeter
from shardcompute.api.access.requirement import Access
from shardcompute.api.access.sign_in import PageSessions
from shardcompute.api.auth import ApiKeys, KeyMiddleware, Verifier, guarded, needs_of, secret_of
from shardcompute.api.body import Limits
from shardcompute.api.context import ApiContext, package_version, request_id_of
from shardcompute.api.endpoints import OPERATIONAL_ROUTES
from shardcompute.api.errors import error_response, status_of
from shardcompute.api.generation.receipts import RECEIPT_ROUTES
from shardcompute.api.images.fetching import FetchPolicy, ImageFetcher
from shardcompute.api.metrics.collector import GenerationMetrics
from shardcompute.api.middleware import RequestIdMiddleware
from shardcompute.api.openai.response_store import ResponseStore
from shardcompute.api.openapi import ApiRoute, describe
from shardcompute.core.errors import ShardComputeError
from shardcompute.node.service import Service
from shardcompute.node.telemetry.quota import QuotaLedger, QuotaSource
from shardcompute.security.api_keys import KeyRole, KeySummary

if TYPE_CHECKING:
    from shardcompute.node.admin.admin import ClusterAdmin
    from shardcompute.node.driver.receipts.store import ReceiptStore

ROUTES: tuple[ApiRoute, ...] = (
    *openai.ROUTES,
    *OPERATIONAL_ROUTES,
    *RECEIPT_ROUTES,
    *anthropic.ROUTES,
    *ollama.ROUTES,
)
LOCAL = KeySummary("local", "commands on the coordinator's machine", role=KeyRole.OPERATE)
_log = logging.getLogger(__name__)


def create_app(
    service: Service,
    *,
    api_keys: Iterable[str] | None = None,
    verify_key: Verifier | None = None,
    needs_key: bool | None = None,
    local_secret: str | None = None,
    sessions: PageSessions | None = None,
    hosts: AllowedHosts = LOOPBACK_ONLY,
    admin: ClusterAdmin | None = None,
    quota: QuotaSource | None = None,
    limits: Limits | None = None,
    cors_origins: Sequence[str] = (),
    image_urls: FetchPolicy = "off",
    page: Sequence[Route] = (),
    receipts: ReceiptStore | None = None,
    gives_receipts: bool = False,
    clock: Callable[[], float] = time.monotonic,
    wall_clock: Callable[[], float] = time.time,
) -> Starlette:
    """The API over `service`; with an `admin`, the routes of its cluster too.

    Requests need a key of `api_keys` (see `auth.ApiKeys`), one that `verify_key` knows, or the `local_secret`. Where
    `needs_key` is False (the default if there are neither keys nor a verifier), models may be used without. `hosts` are
    the names that the server goes by. `cors_origins` are the web origins whose pages may call it; none by default.
    `quota` is what keys with limits draw from: by default the cluster's ledger, or one of this process alone.
    `image_urls` says which images are fetched that requests name by URL.
    `receipts` are those of answers that were asked for with one; where it `gives_receipts`, every answer has one.
    `page` are routes to public files, which anybody may read without a key; `sessions` is how the page signs in.
    """
    counted = GenerationMetrics()
    sessions = sessions or PageSessions()
    verifiers = _verifiers(api_keys, verify_key, local_secret, None if admin is None else sessions)
    if needs_key is None:
        needs_key = api_keys is not None or verify_key is not None
    # Where nobody can have a key of another role, and there is no cluster to see, metrics need none.
    keyless = KeySummary("", role=KeyRole.USE if verifiers else KeyRole.OBSERVE)
    offered = ROUTES if admin is None else (*ROUTES, *cluster.ROUTES)

    @cache
    def document() -> dict[str, Any]:
        return describe(offered, version=package_version(), has_keys=needs_key)

    async def openapi(request: Request) -> Response:
        return JSONResponse(document())

    routes = [
        Route(each.path, guarded(each.needs, each.run, each.audit), methods=[each.method]) for each in offered
    ]
    routes.append(Route("/openapi.json", guarded(Access.USE, openapi), methods=["GET"]))
    routes += [Route(each.path, guarded(Access.OPEN, each.endpoint), methods=["GET"]) for each in page]
    gate = Middleware(
        KeyMiddleware,
        verifiers=verifiers,
        anonymous=None if needs_key else keyless,
        open_paths=frozenset(each.path for each in routes if needs_of(each) is Access.OPEN),
    )
    known_paths = frozenset(route.path for route in routes)
    app = Starlette(
        routes=routes,
        middleware=[
            Middleware(RequestIdMiddleware, metrics=counted, known_paths=known_paths),
            Middleware(HostMiddleware, allowed=hosts),
            *_cors(cors_origins),
            gate,
        ],
        exception_handlers={HTTPException: _answer_error, ShardComputeError: _answer_error},
    )
    app.router.redirect_slashes = False
    app.state.admin = admin
    app.state.sessions = sessions
    app.state.receipts = receipts
    app.state.gives_receipts = gives_receipts
    if quota is None:
        quota = QuotaLedger(clock=clock, wall_clock=wall_clock) if admin is None else admin.quota
    app.state.meter = KeyMeter(quota, clock=clock, wall_clock=wall_clock)
    app.state.responses = ResponseStore(clock=clock)
    app.state.context = ApiContext(
        service=service,
        limits=limits or Limits(),
        images=ImageFetcher(image_urls),
        metrics=counted,
        clock=clock,
        wall_clock=wall_clock,
    )
    return app


def _verifiers(
    api_keys: Iterable[str] | None,
    verify_key: Verifier | None,
    local_secret: str | None,
    sessions: PageSessions | None,
) -> list[Verifier]:
    """Who may say whose a key is."""
    found: list[Verifier] = [] if api_keys is None else [ApiKeys(api_keys).find]
    if local_secret is not None:
        found.append(secret_of(LOCAL, local_secret))
    if sessions is not None:
        found.append(sessions.find)
    if verify_key is not None:
        found.append(verify_key)
    return found


def _cors(origins: Sequence[str]) -> list[Middleware]:
    """Preflights carry no key, so this comes before the gate."""
    if not origins:
        return []
    return [Middleware(ModelCorsMiddleware, origins=origins)]


async def _answer_error(request: Request, error: Exception) -> Response:
    request_id = request_id_of(request)
    if status_of(error) >= 500:
        _log.error("request %s failed: %s", request_id, error, extra={"request": request_id})
    return error_response(error, request_id=request_id, path=request.url.path)
