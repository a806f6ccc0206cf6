"""Ollama's embeddings, `/api/embed` and the older `/api/embeddings`; the vectors are `generation.embeddings`'s."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from shardcompute.api.access.requirement import Access
from shardcompute.api.body import ReplyBody, RequestBody, json_response, read_body
from shardcompute.api.context import context_of
from shardcompute.api.errors import unsupported
from shardcompute.api.generation.embeddings import MAX_INPUTS, Vector, embed, encode_inputs
from shardcompute.api.generation.parameters import choose_model
from shardcompute.api.ollama.schemas import OllamaError
from shardcompute.api.openapi import GENERATION_ERRORS, ApiRoute
from shardcompute.api.sse import until_disconnect


class EmbedRequest(RequestBody):
    input: str | Annotated[list[str], Field(fail_fast=True, max_length=MAX_INPUTS)]
    truncate: bool | None = Field(None, description="Cut what is too long; true when left out.")
    dimensions: int | None = Field(None, ge=1, description="Refused: vectors have the model's own width.")
    options: dict[str, Any] | None = Field(None, description="Accepted and not used.")
    keep_alive: str | int | float | None = Field(None, description="Accepted and not used.")


class EmbeddingRequest(RequestBody):
    prompt: str
    options: dict[str, Any] | None = Field(None, description="Accepted and not used.")
    keep_alive: str | int | float | None = Field(None, description="Accepted and not used.")


class EmbedReply(ReplyBody):
    model: str
    embeddings: list[list[float]]
    total_duration: int
    load_duration: int
    prompt_eval_count: int


class EmbeddingReply(ReplyBody):
    embedding: list[float]


async def ollama_embed(request: Request) -> Response:
    context = context_of(request)
    body = await read_body(request, EmbedRequest, context.limits, needs_json_type=False)
    if body.dimensions is not None:
        raise unsupported("dimensions", "Vectors have the model's own width and are not cut.")
    started_s = context.clock()
    texts = [body.input] if isinstance(body.input, str) else body.input
    name, count, vectors = await _embed(request, body.model, texts, cuts=body.truncate is not False)
    return json_response(
        EmbedReply(
            model=name,
            embeddings=[vector.tolist() for vector in vectors],
            total_duration=round((context.clock() - started_s) * 1e9),
            load_duration=0,
            prompt_eval_count=count,
        )
    )


async def ollama_embeddings(request: Request) -> Response:
    body = await read_body(request, EmbeddingRequest, context_of(request).limits, needs_json_type=False)
    if not body.prompt:
        return json_response(EmbeddingReply(embedding=[]))
    _, _, vectors = await _embed(request, body.model, [body.prompt], cuts=True)
    return json_response(EmbeddingReply(embedding=vectors[0].tolist()))


async def _embed(
    request: Request, name: str | None, texts: list[str], *, cuts: bool
) -> tuple[str, int, list[Vector]]:
    """The model's name, the tokens of all texts, and their vectors."""
    service = context_of(request).service
    model = choose_model(service, name)
    codec = service.codec(model.name)
    prompts = await encode_inputs(codec, model, texts, cuts=cuts)
    vectors = await until_disconnect(request.receive, embed(request, model, prompts))
    return model.name, sum(len(prompt) for prompt in prompts), vectors


OLLAMA_EMBEDDING_ROUTES: tuple[ApiRoute, ...] = (
    ApiRoute(
        "POST",
        "/api/embed",
        ollama_embed,
        "Vectors of texts (Ollama's shape).",
        needs=Access.USE,
        body=EmbedRequest,
        reply=EmbedReply,
        error=OllamaError,
        statuses=GENERATION_ERRORS,
    ),
    ApiRoute(
        "POST",
        "/api/embeddings",
        ollama_embeddings,
        "The vector of a text (Ollama's older shape).",
        needs=Access.USE,
        body=EmbeddingRequest,
        reply=EmbeddingReply,
        error=OllamaError,
        statuses=GENERATION_ERRORS,
    ),
)
