"""OpenAI's embeddings: texts in, vectors out. `generation.embeddings` says what the vectors are."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from shardcompute.api.access.requirement import Access
from shardcompute.api.body import ReplyBody, RequestBody, json_response, read_body
from shardcompute.api.context import context_of
from shardcompute.api.errors import unsupported
from shardcompute.api.generation.embeddings import MAX_INPUTS, Vector, embed, encode_inputs
from shardcompute.api.generation.parameters import choose_model
from shardcompute.api.generation.schemas import TokenIds
from shardcompute.api.openapi import GENERATION_ERRORS, ApiRoute
from shardcompute.api.sse import until_disconnect


class EmbeddingsRequest(RequestBody):
    input: (
        str
        | Annotated[list[str], Field(fail_fast=True, min_length=1, max_length=MAX_INPUTS)]
        | TokenIds
        | Annotated[list[TokenIds], Field(fail_fast=True, min_length=1, max_length=MAX_INPUTS)]
    )
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = Field(None, ge=1, description="Refused: vectors have the model's own width.")
    user: str | None = Field(None, description="Accepted and not used.")


class Embedding(ReplyBody):
    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingsUsage(ReplyBody):
    prompt_tokens: int
    total_tokens: int


class EmbeddingsReply(ReplyBody):
    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: EmbeddingsUsage


async def create_embeddings(request: Request) -> Response:
    context = context_of(request)
    body = await read_body(request, EmbeddingsRequest, context.limits)
    if body.dimensions is not None:
        raise unsupported("dimensions", "Vectors have the model's own width and are not cut.")
    model = choose_model(context.service, body.model)
    codec = context.service.codec(model.name)
    prompts = await encode_inputs(codec, model, _inputs(body.input))
    vectors = await until_disconnect(request.receive, embed(request, model, prompts))
    count = sum(len(prompt) for prompt in prompts)
    is_packed = body.encoding_format == "base64"
    return json_response(
        EmbeddingsReply(
            object="list",
            data=[
                Embedding(
                    object="embedding",
                    index=index,
                    embedding=_packed(vector) if is_packed else vector.tolist(),
                )
                for index, vector in enumerate(vectors)
            ],
            model=model.name,
            usage=EmbeddingsUsage(prompt_tokens=count, total_tokens=count),
        )
    )


def _inputs(given: str | Sequence[str] | Sequence[int] | Sequence[Sequence[int]]) -> list[str | list[int]]:
    if isinstance(given, str):
        return [given]
    if isinstance(given[0], int):
        return [[item for item in given if isinstance(item, int)]]
    return [item if isinstance(item, str) else list(item) for item in given if not isinstance(item, int)]


def _packed(vector: Vector) -> str:
    return base64.b64encode(vector.astype("<f4").tobytes()).decode()


EMBEDDINGS_ROUTES: tuple[ApiRoute, ...] = (
    ApiRoute(
        "POST",
        "/v1/embeddings",
        create_embeddings,
        "Vectors of texts.",
        needs=Access.USE,
        body=EmbeddingsRequest,
        reply=EmbeddingsReply,
        statuses=GENERATION_ERRORS,
    ),
)
