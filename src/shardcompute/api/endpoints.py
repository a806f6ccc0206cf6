"""The small endpoints: models, tokens, health, version, metrics."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from shardcompute.api.body import read_body
from shardcompute.api.context import context_of, package_version, run_codec
from shardcompute.api.errors import RETRY_AFTER_S, RequestError
from shardcompute.api.generation.answer import json_response
from shardcompute.api.generation.chat_prompt import encode_messages
from shardcompute.api.generation.parameters import check_ids, choose_model
from shardcompute.api.generation.replies import (
    DetokenizeReply,
    HealthReply,
    ModelList,
    ModelObject,
    TokenizeReply,
    VersionReply,
)
from shardcompute.api.generation.schemas import DetokenizeRequest, TokenizeRequest
from shardcompute.api.metrics.collector import CONTENT_TYPE
from shardcompute.node.service import ServedModel

if TYPE_CHECKING:
    from shardcompute.node.admin.admin import ClusterAdmin


async def list_models(request: Request) -> Response:
    served = context_of(request).service.models()
    return json_response(ModelList(object="list", data=[_card(model) for model in served]))


async def get_model(request: Request) -> Response:
    name = request.path_params["model"]
    if not name:
        raise HTTPException(404)
    return json_response(_card(choose_model(context_of(request).service, name)))


async def tokenize(request: Request) -> Response:
    context = context_of(request)
    body = await read_body(request, TokenizeRequest, context.limits)
    model = choose_model(context.service, body.model)
    codec = context.service.codec(model.name)
    prompt = body.prompt
    if (prompt is None) == (body.messages is None):
        raise RequestError("The request needs either prompt or messages.", param="prompt")
    if prompt is not None:
        ids = await run_codec(
            lambda: codec.encode(prompt, add_special=body.add_special_tokens), characters=len(prompt)
        )
    else:
        ids = await encode_messages(
            codec, body.messages or [], add_generation_prompt=body.add_generation_prompt
        )
    reply = TokenizeReply(count=len(ids), max_model_len=model.context_length, tokens=ids)
    if body.return_token_strs:
        names = [codec.token_bytes(token_id).decode("utf-8", "replace") for token_id in ids]
        reply = TokenizeReply(
            count=len(ids), max_model_len=model.context_length, tokens=ids, token_strs=names
        )
    return json_response(reply)


async def detokenize(request: Request) -> Response:
    context = context_of(request)
    body = await read_body(request, DetokenizeRequest, context.limits)
    codec = context.service.codec(choose_model(context.service, body.model).name)
    check_ids(codec, body.tokens, "tokens")
    return json_response(DetokenizeReply(prompt=codec.decode(body.tokens, skip_special=False)))


async def health(request: Request) -> Response:
    if context_of(request).service.is_ready():
        return json_response(HealthReply(status="ok"))
    response = json_response(HealthReply(status="loading", reason="The model is still loading."), 503)
    response.headers["retry-after"] = str(RETRY_AFTER_S)
    return response


async def version(request: Request) -> Response:
    return json_response(VersionReply(version=package_version()))


async def metrics(request: Request) -> Response:
    context = context_of(request)
    admin: ClusterAdmin | None = request.app.state.admin
    cluster = None if admin is None else await asyncio.to_thread(admin.health)
    return Response(context.metrics.render(context.service, cluster), headers={"content-type": CONTENT_TYPE})


def _card(model: ServedModel) -> ModelObject:
    return ModelObject(
        id=model.name,
        object="model",
        created=model.created_s,
        owned_by="shardcompute",
        max_model_len=model.context_length,
    )
