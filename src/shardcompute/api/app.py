"""The HTTP application over a `Service`: routes, keys, errors. `create_app` is all that others need."""

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

from shardcompute.api import endpoints
from shardcompute.api.anthropic.messages import MESSAGES_ENDPOINTS
from shardcompute.api.auth import OPEN_PATHS, ApiKeys, KeyGate, LocalGate, Verifier
from shardcompute.api.body import Limits
from shardcompute.api.cluster.routes import CLUSTER_ENDPOINTS
from shardcompute.api.context import ApiContext, package_version, request_id_of
from shardcompute.api.errors import error_response, status_of
from shardcompute.api.generation.chat import create_chat_completion
from shardcompute.api.generation.embeddings import EMBEDDINGS_ENDPOINTS
from shardcompute.api.generation.replies import (
    ChatChunk,
    ChatCompletion,
    Completion,
    DetokenizeReply,
    HealthReply,
    ModelList,
    ModelObject,
    TokenizeReply,
    VersionReply,
)
from shardcompute.api.generation.schemas import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from shardcompute.api.metrics.collector import GenerationMetrics
from shardcompute.api.middleware import RequestTrail
from shardcompute.api.ollama.chat import OLLAMA_ENDPOINTS
from shardcompute.api.ollama.embeddings import OLLAMA_EMBEDDING_ENDPOINTS
from shardcompute.api.ollama.models import OLLAMA_MODEL_ENDPOINTS
from shardcompute.api.openai.completions import create_completion
from shardcompute.api.openai.responses import RESPONSES_ENDPOINTS
from shardcompute.api.openai.tokenizer_info import TOKENIZER_ENDPOINTS
from shardcompute.api.openapi import ApiRoute, describe
from shardcompute.core.errors import ShardComputeError
from shardcompute.node.service import Service

if TYPE_CHECKING:
    from shardcompute.node.admin.admin import ClusterAdmin

_BODY_ERRORS = (400, 404, 408, 413, 415, 503)
_GENERATION_ERRORS = (*_BODY_ERRORS, 429, 500)
_log = logging.getLogger(__name__)

ENDPOINTS: tuple[ApiRoute, ...] = (
    ApiRoute("GET", "/v1/models", endpoints.list_models, "The models served here.", reply=ModelList),
    ApiRoute(
        "GET",
        "/v1/models/{model:path}",
        endpoints.get_model,
        "One model.",
        reply=ModelObject,
        statuses=(404, 503),
    ),
    ApiRoute(
        "POST",
        "/v1/chat/completions",
        create_chat_completion,
        "Answer a conversation.",
        body=ChatCompletionRequest,
        reply=ChatCompletion,
        chunk=ChatChunk,
        statuses=_GENERATION_ERRORS,
    ),
    ApiRoute(
        "POST",
        "/v1/completions",
        create_completion,
        "Continue a text.",
        body=CompletionRequest,
        reply=Completion,
        chunk=Completion,
        statuses=_GENERATION_ERRORS,
    ),
    ApiRoute(
        "POST",
        "/tokenize",
        endpoints.tokenize,
        "Text or messages to token ids.",
        body=TokenizeRequest,
        reply=TokenizeReply,
        statuses=_BODY_ERRORS,
    ),
    ApiRoute(
        "POST",
        "/detokenize",
        endpoints.detokenize,
        "Token ids to text.",
        body=DetokenizeRequest,
        reply=DetokenizeReply,
        statuses=_BODY_ERRORS,
    ),
    ApiRoute(
        "GET", "/health", endpoints.health, "200 once a model is loaded.", reply=HealthReply, statuses=(503,)
    ),
    ApiRoute("GET", "/version", endpoints.version, "The version of the server.", reply=VersionReply),
    ApiRoute("GET", "/metrics", endpoints.metrics, "Metrics in Prometheus' text form."),
    *TOKENIZER_ENDPOINTS,
    *EMBEDDINGS_ENDPOINTS,
    *RESPONSES_ENDPOINTS,
    *MESSAGES_ENDPOINTS,
    *OLLAMA_ENDPOINTS,
    *OLLAMA_EMBEDDING_ENDPOINTS,
    *OLLAMA_MODEL_ENDPOINTS,
)


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
    offered = ENDPOINTS if admin is None else (*ENDPOINTS, *CLUSTER_ENDPOINTS)

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
    stack = [Middleware(RequestTrail, metrics=counted, known_paths=paths)]
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
        stack.append(Middleware(KeyGate, verifiers=verifiers, open_paths=open_paths))
    else:
        stack.append(Middleware(LocalGate))
    return stack


async def _answer_error(request: Request, error: Exception) -> Response:
    request_id = request_id_of(request)
    if status_of(error) >= 500:
        _log.error("request %s failed: %s", request_id, error)
    return error_response(error, request_id=request_id, path=request.url.path)
