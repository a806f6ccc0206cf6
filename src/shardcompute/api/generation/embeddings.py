"""Embeddings, whichever protocol asks for them: token ids in, vectors out.

A text's vector is the model's final hidden state (normed, before the head) at its last token, scaled to length 1:
the pooling that decoders trained for embeddings expect. It is computed as a generation of one token whose hidden
state is given along, so it runs on any chain and has the same bits however the model is cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
from starlette.requests import Request

from shardcompute.api.context import context_of
from shardcompute.api.errors import RequestError
from shardcompute.api.generation.generations import Outcome, open_generations
from shardcompute.api.generation.parameters import Plan, check_ids, context_exceeded, naming_prompt
from shardcompute.api.offload import run_sized
from shardcompute.core.errors import BackendError
from shardcompute.core.generation import GenerationRequest, Sampling
from shardcompute.node.service import ServedModel, TextCodec

MAX_INPUTS = 2048
_AT_ONCE = 16
_TOKEN_CHARS = 16
Vector: TypeAlias = npt.NDArray[np.float32]


async def encode_inputs(
    codec: TextCodec, model: ServedModel, inputs: Sequence[str | list[int]], *, cuts: bool = False
) -> list[tuple[int, ...]]:
    """The tokens of each input; with `cuts`, as many as the context holds."""
    with naming_prompt("input"):
        return await run_sized(
            lambda: [_encode_input(codec, model, each, cuts=cuts) for each in inputs],
            characters=sum(map(len, inputs)),
        )


def _encode_input(
    codec: TextCodec, model: ServedModel, given: str | list[int], *, cuts: bool
) -> tuple[int, ...]:
    longest = model.context_length - 1
    if not isinstance(given, str):
        ids = given
        if len(ids) <= longest:
            check_ids(codec, ids, "input")
    elif cuts:
        ids = _encode_start(codec, given, model.context_length)
    else:
        ids = codec.encode(given, context_length=model.context_length)
    if not ids:
        raise RequestError("An input has no tokens.", hint="send at least one", param="input")
    if len(ids) > longest and not cuts:
        what = f"an input is too long: it has {len(ids)} tokens, and at most {longest} fit"
        raise context_exceeded(model, what, "input", hint="cut it into pieces")
    return tuple(ids[:longest])


def _encode_start(codec: TextCodec, text: str, count: int) -> list[int]:
    """At least the first `count` tokens of a text, without a look at all that comes after them."""
    start = codec.encode(text[: _TOKEN_CHARS * count])
    # What is left of the cut is as it would be without it, but for the last few tokens.
    return start if len(start) > count + _TOKEN_CHARS else codec.encode(text)


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
        async with open_generations(request, plan) as running:
            vectors += [_vector(outcome) for outcome in await running.finish()]
    return vectors


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
