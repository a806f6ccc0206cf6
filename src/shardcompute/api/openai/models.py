"""OpenAI's model list: the models served here."""

from __future__ import annotations

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from shardcompute.api.access.requirement import Access
from shardcompute.api.body import json_response
from shardcompute.api.context import context_of
from shardcompute.api.generation.parameters import choose_model
from shardcompute.api.openai.replies import ModelList, ModelObject
from shardcompute.api.openapi import ApiRoute
from shardcompute.node.service import ServedModel


async def list_models(request: Request) -> Response:
    served = context_of(request).service.models()
    return json_response(ModelList(object="list", data=[_card(model) for model in served]))


async def get_model(request: Request) -> Response:
    name = request.path_params["model"]
    if not name:
        raise HTTPException(404)
    return json_response(_card(choose_model(context_of(request).service, name)))


def _card(model: ServedModel) -> ModelObject:
    return ModelObject(
        id=model.name,
        object="model",
        created=model.created_s,
        owned_by="shardcompute",
        max_model_len=model.context_length,
        input_modalities=["text"] if model.vision is None else ["text", "image"],
    )


MODELS_ROUTES: tuple[ApiRoute, ...] = (
    ApiRoute("GET", "/v1/models", list_models, "The models served here.", needs=Access.USE, reply=ModelList),
    ApiRoute(
        "GET",
        "/v1/models/{model:path}",
        get_model,
        "One model.",
        needs=Access.USE,
        reply=ModelObject,
        statuses=(404, 503),
    ),
)
