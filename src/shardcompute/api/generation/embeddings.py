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

from shardcompute.api.context import context_of, run_codec
from shardcompute.api.errors import RequestError
from shardcompute.api.generation.generations import Outcome, open_generations
from shardcompute.api.generation.parameters import Plan, check_ids
from shardcompute.core.errors import BackendError, PromptTooLongError
from shardcompute.core.generation import GenerationRequest, Sampling
from shardcompute.node.service import ServedModel, TextCodec

MAX_INPUTS = 2048
_AT_ONCE = 16
Vector: TypeAlias = npt.NDArray[np.float32]


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
