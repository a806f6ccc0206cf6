"""Ollama's model routes: what its clients ask about models and the server. Loading and removing is refused."""

from __future__ import annotations

from datetime import UTC, datetime
from functools import partial
from typing import Any, Literal

from starlette.requests import Request
from starlette.responses import Response

from shardcompute.api.access.requirement import Access
from shardcompute.api.body import json_response, read_body
from shardcompute.api.context import context_of, package_version
from shardcompute.api.errors import RequestError
from shardcompute.api.generation.parameters import choose_model
from shardcompute.api.ollama.schemas import (
    ModelDetails,
    ModelName,
    OllamaError,
    OllamaModel,
    OllamaModelReply,
    OllamaModels,
    OllamaVersion,
    PullReply,
    RunningModel,
    RunningModels,
)
from shardcompute.api.openapi import BODY_ERRORS, ApiRoute
from shardcompute.node.service import ServedModel

_FAMILY = "shardcompute"
_FAR_FUTURE_S = 100 * 365 * 86_400
_DETAILS = ModelDetails(
    parent_model="", format="", family=_FAMILY, families=[_FAMILY], parameter_size="", quantization_level=""
)
"""Machines of a swarm may hold one model in several forms; what is not known is left empty."""


async def ollama_tags(request: Request) -> Response:
    served = context_of(request).service.models()
    return json_response(OllamaModels(models=[OllamaModel(**_listing(model)) for model in served]))


async def ollama_ps(request: Request) -> Response:
    context = context_of(request)
    # Models stay until they are unloaded.
    expires_at = written_time(context.wall_clock() + _FAR_FUTURE_S)
    running = [
        RunningModel(
            **_listing(model), expires_at=expires_at, size_vram=0, context_length=model.context_length
        )
        for model in context.service.models()
    ]
    return json_response(RunningModels(models=running))


async def ollama_show(request: Request) -> Response:
    context = context_of(request)
    body = await read_body(request, ModelName, context.limits, needs_json_type=False)
    model = choose_model(context.service, body.model or body.name)
    return json_response(
        OllamaModelReply(
            modelfile=f"FROM {model.name}\n",
            parameters="",
            template="",
            details=_DETAILS,
            model_info={
                "general.architecture": _FAMILY,
                "general.basename": model.name,
                f"{_FAMILY}.context_length": model.context_length,
            },
            capabilities=["completion", "tools", "embedding", *(["vision"] if model.vision else [])],
            modified_at=written_time(model.created_s),
            digest=model.digest,
            size=model.size_bytes,
        )
    )


async def ollama_version(request: Request) -> Response:
    return json_response(OllamaVersion(version=package_version()))


async def ollama_pull(request: Request) -> Response:
    """Clients pull what they are about to use: fine where it is served, and not a way to load another model."""
    context = context_of(request)
    body = await read_body(request, ModelName, context.limits, needs_json_type=False)
    choose_model(context.service, body.model or body.name)
    return json_response(PullReply(status="success"))


async def ollama_refusal(request: Request) -> Response:
    await read_body(request, ModelName, context_of(request).limits, needs_json_type=False)
    raise RequestError(
        "Models are not made, copied or removed through this API.",
        hint="use `shardcompute load`, `shardcompute unload` or `shardcompute rm`",
        code="unsupported",
    )


def written_time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")


def _listing(model: ServedModel) -> dict[str, Any]:
    return {
        "name": model.name,
        "model": model.name,
        "modified_at": written_time(model.created_s),
        "size": model.size_bytes,
        "digest": model.digest,
        "details": _DETAILS,
    }


def _refused(method: Literal["POST", "DELETE"], path: str) -> ApiRoute:
    return ApiRoute(
        method,
        path,
        partial(ollama_refusal),  # known by its path, as all operations need names of their own
        "Refused: models are loaded and removed elsewhere.",
        needs=Access.USE,
        body=ModelName,
        reply=PullReply,
        error=OllamaError,
        statuses=BODY_ERRORS,
    )


OLLAMA_MODEL_ROUTES: tuple[ApiRoute, ...] = (
    ApiRoute(
        "GET",
        "/api/tags",
        ollama_tags,
        "The models served here (Ollama's shape).",
        needs=Access.USE,
        reply=OllamaModels,
        error=OllamaError,
    ),
    ApiRoute(
        "GET",
        "/api/ps",
        ollama_ps,
        "The models in memory (Ollama's shape).",
        needs=Access.USE,
        reply=RunningModels,
        error=OllamaError,
    ),
    ApiRoute(
        "GET",
        "/api/version",
        ollama_version,
        "The version of the server (Ollama's shape).",
        needs=Access.USE,
        reply=OllamaVersion,
        error=OllamaError,
    ),
    ApiRoute(
        "POST",
        "/api/show",
        ollama_show,
        "One model (Ollama's shape).",
        needs=Access.USE,
        body=ModelName,
        reply=OllamaModelReply,
        error=OllamaError,
        statuses=BODY_ERRORS,
    ),
    ApiRoute(
        "POST",
        "/api/pull",
        ollama_pull,
        "Success for a model that is served; others cannot be fetched this way.",
        needs=Access.USE,
        body=ModelName,
        reply=PullReply,
        error=OllamaError,
        statuses=BODY_ERRORS,
    ),
    _refused("POST", "/api/create"),
    _refused("POST", "/api/copy"),
    _refused("POST", "/api/push"),
    _refused("DELETE", "/api/delete"),
)
