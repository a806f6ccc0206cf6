"""OpenAI's embeddings: texts in, vectors out, and what Ollama's share with them.

A text's vector is the model's final hidden state (normed, before the head) at its last token, scaled to length 1:
the pooling that decoders trained for embeddings expect. It is computed as a generation of one token whose hidden
state is given along, so it runs on any chain and has the same bits however the model is cut.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Annotated, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from shardcompute.api.body import read_body
from shardcompute.api.context import context_of, run_codec
from shardcompute.api.errors import RequestError, unsupported
from shardcompute.api.generation.answer import json_response
from shardcompute.api.generation.generations import Generations, Outcome
from shardcompute.api.generation.parameters import Plan, check_ids, choose_model
from shardcompute.api.generation.replies import ReplyBody
from shardcompute.api.generation.schemas import RequestBody, TokenIds
from shardcompute.api.generation.sse import until_disconnect
from shardcompute.api.openapi import ApiRoute
from shardcompute.core.errors import BackendError, PromptTooLongError
from shardcompute.core.generation import GenerationRequest, Sampling
from shardcompute.node.service import ServedModel, TextCodec

MAX_INPUTS = 2048
_AT_ONCE = 16
Vector: TypeAlias = npt.NDArray[np.float32]


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
    prompts = [await encode_input(codec, model, text) for text in _inputs(body.input)]
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


async def encode_input(
    codec: TextCodec, model: ServedModel, given: str | list[int], *, cuts: bool = False
) -> tuple[int, ...]:
    """The tokens of an input; with `cuts`, as many as the context holds."""
    if isinstance(given, str):
        ids = await run_codec(lambda: codec.encode(given), characters=len(given))
    else:
        check_ids(codec, given, "input")
        ids = given
    longest = model.context_length - 1
    if not ids:
        raise RequestError("An input has no tokens.", hint="send at least one", param="input")
    if len(ids) > longest and not cuts:
        raise PromptTooLongError(
            f"An input has {len(ids)} tokens; at most {longest} fit.", hint="cut it into pieces"
        )
    return tuple(ids[:longest])


async def embed(request: Request, model: ServedModel, prompts: Sequence[tuple[int, ...]]) -> list[Vector]:
    """One vector of length 1 for each prompt, in order. So many at once that other requests get their turn."""
    context = context_of(request)
    codec = context.service.codec(model.name)
    vectors: list[Vector] = []
    for start in range(0, len(prompts), _AT_ONCE):
        requests = tuple(
            GenerationRequest(prompt, max_tokens=1, sampling=Sampling(wants_hidden=True))
            for prompt in prompts[start : start + _AT_ONCE]
        )
        plan = Plan(model, codec, requests, 1)
        async with Generations(context.service, plan, context.metrics, clock=context.clock) as running:
            vectors += [_vector(outcome) for outcome in await running.finish()]
    return vectors


def _inputs(given: str | Sequence[str] | Sequence[int] | Sequence[Sequence[int]]) -> list[str | list[int]]:
    if isinstance(given, str):
        return [given]
    if isinstance(given[0], int):
        return [[item for item in given if isinstance(item, int)]]
    return [item if isinstance(item, str) else list(item) for item in given if not isinstance(item, int)]


def _vector(outcome: Outcome) -> Vector:
    """The hidden state, scaled. It came from a machine that may be wrong."""
    packed = outcome.tokens[0].hidden if outcome.tokens else b""
    if not packed or len(packed) % 4:
        raise BackendError(
            "The model gave no hidden state for an embedding.",
            hint="run the same release on every machine of the cluster",
        )
    hidden = np.frombuffer(packed, dtype="<f4").astype(np.float64)
    length = float(np.linalg.norm(hidden))
    if not np.isfinite(length) or length == 0.0:
        raise BackendError("The model's hidden state has no direction.", hint="send another text")
    return (hidden / length).astype(np.float32)


def _packed(vector: Vector) -> str:
    return base64.b64encode(vector.astype("<f4").tobytes()).decode()


EMBEDDINGS_ENDPOINTS: tuple[ApiRoute, ...] = (
    ApiRoute(
        "POST",
        "/v1/embeddings",
        create_embeddings,
        "Vectors of texts.",
        body=EmbeddingsRequest,
        reply=EmbeddingsReply,
        statuses=(400, 404, 408, 413, 415, 429, 500, 503),
    ),
)
