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
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from shardcompute.api import anthropic, cluster, ollama, openai
from shardcompute.api.auth import OPEN_PATHS, ApiKeyMiddleware, ApiKeys, LoopbackMiddleware, Verifier
from shardcompute.api.body import Limits
from shardcompute.api.context import ApiContext, package_version, request_id_of
from shardcompute.api.endpoints import OPERATIONAL_ROUTES
from shardcompute.api.errors import error_response, status_of
from shardcompute.api.metrics.collector import GenerationMetrics
from shardcompute.api.middleware import RequestIdMiddleware
from shardcompute.api.openapi import ApiRoute, describe
from shardcompute.core.errors import ShardComputeError
from shardcompute.node.service import Service

if TYPE_CHECKING:
    from shardcompute.node.admin.admin import ClusterAdmin

ROUTES: tuple[ApiRoute, ...] = (
    *openai.ROUTES,
    *OPERATIONAL_ROUTES,
    *anthropic.ROUTES,
    *ollama.ROUTES,
)
_log = logging.getLogger(__name__)


def create_app(
    service: Service,
    *,
    api_keys: Iterable[str] | None = None,
    verify_key: Verifier | None = None,
    admin: ClusterAdmin | None = None,
    limits: Limits | None = None,
    cors_origins: Sequence[str] = (),
    page: Sequence[Route] = (),
    clock: Callable[[], float] = time.monotonic,
    wall_clock: Callable[[], float] = time.time,
) -> Starlette:
    """The API over `service`; with an `admin`, the routes of its cluster too.

    Requests need a key of `api_keys`, or one that `verify_key` accepts; with neither the API is open, which is
    for loopback only. `cors_origins` are the web origins whose pages may call it; none by default. `page` are routes
    to public files, which anybody may read without a key.
    """
    counted = GenerationMetrics()
    verifiers: list[Verifier] = [] if api_keys is None else [ApiKeys(api_keys).accepts]
    if verify_key is not None:
        verifiers.append(verify_key)
    offered = ROUTES if admin is None else (*ROUTES, *cluster.ROUTES)

    @cache
    def document() -> dict[str, Any]:
        return describe(offered, version=package_version(), has_keys=bool(verifiers))

    async def openapi(request: Request) -> Response:
        return JSONResponse(document())

    routes = [Route(endpoint.path, endpoint.run, methods=[endpoint.method]) for endpoint in offered]
    routes.append(Route("/openapi.json", openapi, methods=["GET"]))
    open_paths = OPEN_PATHS | {route.path for route in page}
    routes += page
    app = Starlette(
        routes=routes,
        middleware=_middleware(
            counted, frozenset(route.path for route in routes), verifiers, open_paths, cors_origins
        ),
        exception_handlers={HTTPException: _answer_error, ShardComputeError: _answer_error},
    )
    app.router.redirect_slashes = False
    app.state.admin = admin
    app.state.context = ApiContext(
        service=service, limits=limits or Limits(), metrics=counted, clock=clock, wall_clock=wall_clock
    )
    return app


def _middleware(
    counted: GenerationMetrics,
    paths: frozenset[str],
    verifiers: Sequence[Verifier],
    open_paths: frozenset[str],
    cors_origins: Sequence[str],
) -> list[Middleware]:
    """Outermost first. Preflights carry no key, so CORS comes before the gate."""
    stack = [Middleware(RequestIdMiddleware, metrics=counted, known_paths=paths)]
    if cors_origins:
        stack.append(
            Middleware(
                CORSMiddleware,
                allow_origins=list(cors_origins),
                allow_methods=["GET", "POST", "DELETE"],
                allow_headers=["*"],
                expose_headers=["x-request-id"],
            )
        )
    if verifiers:
        stack.append(Middleware(ApiKeyMiddleware, verifiers=verifiers, open_paths=open_paths))
    else:
        stack.append(Middleware(LoopbackMiddleware))
    return stack


async def _answer_error(request: Request, error: Exception) -> Response:
    request_id = request_id_of(request)
    if status_of(error) >= 500:
        _log.error("request %s failed: %s", request_id, error, extra={"request": request_id})
    return error_response(error, request_id=request_id, path=request.url.path)
