"""Teaching routes: what a machine that teaches a draft head asks of a cluster (`node.cluster.teaching`); for operators.

Text comes from ordinary sessions. States are those of a text that was given, computed as its prompt is: nothing is kept
of them here. A worker's states are believed as far as their size goes, and no further.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Annotated, TypeVar

import msgspec
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from shardcompute.api.access.requirement import Access
from shardcompute.api.body import ReplyBody, json_response, read_body, read_bytes
from shardcompute.api.cluster.schemas import ClusterRequest
from shardcompute.api.context import context_of, tell_audit
from shardcompute.api.errors import RequestError
from shardcompute.api.generation.generations import Outcome, open_generations
from shardcompute.api.generation.parameters import Plan
from shardcompute.api.openapi import GENERATION_ERRORS, ApiRoute
from shardcompute.backends.executor import refuse_final_rows
from shardcompute.core.errors import BackendError, CorruptModelError, UnknownModelError
from shardcompute.core.generation import MAX_STATES_BYTES, GenerationRequest, Sampling
from shardcompute.node.admin.views import DraftHeadView
from shardcompute.node.cluster.teaching import MOST_HEAD_BYTES
from shardcompute.weights.served import MOST_READ_BYTES

if TYPE_CHECKING:
    from shardcompute.node.cluster.teaching import DraftHeadTeaching

_STATE_BYTES = 2
_MOST_TOKENS = 1 << 16
_BYTES = "application/octet-stream"
_ERRORS = (400, 403, 404, 413, 415)
Result = TypeVar("Result")
Ids = Annotated[
    list[Annotated[int, Field(ge=0, lt=1 << 31)]],
    Field(fail_fast=True, min_length=1, max_length=_MOST_TOKENS),
]


class TensorRequest(ClusterRequest):
    """Bytes `[offset, offset + length)` of a stored tensor."""

    name: str = Field(max_length=1024)
    offset: int = Field(ge=0, lt=1 << 48)
    length: int = Field(ge=1, le=MOST_READ_BYTES)


class SpeechRequest(ClusterRequest):
    """How a model is to go on from these tokens."""

    prompt: Ids
    max_tokens: int = Field(ge=1, le=_MOST_TOKENS)
    stop_ids: list[int] = Field([], fail_fast=True, max_length=1024)
    temperature: float = Field(0.0, ge=0.0, le=2.0)
    top_p: float = Field(1.0, gt=0.0, le=1.0)
    seed: int = Field(0, ge=0, lt=1 << 63)


class SpeechReply(ReplyBody):
    """The tokens that followed, the one that it stopped at among them."""

    tokens: list[int]
    finish: str


class StatesRequest(ClusterRequest):
    """A text whose final states are wanted."""

    tokens: Ids


async def teaching_card(request: Request) -> Response:
    return _bytes(await _run(request, _teaching(request).read_card))


async def teaching_tensor(request: Request) -> Response:
    wanted = await read_body(request, TensorRequest, context_of(request).limits)
    read = _teaching(request).read_tensor
    return _bytes(await _run(request, lambda model: read(model, wanted.name, wanted.offset, wanted.length)))


async def teaching_speech(request: Request) -> Response:
    """Ordinary sessions: drafts change no token of them."""
    order = await read_body(request, SpeechRequest, context_of(request).limits)
    sampling = Sampling(temperature=order.temperature, top_p=order.top_p, seed=order.seed)
    outcome = await _generate(
        request,
        GenerationRequest(
            tuple(order.prompt), order.max_tokens, sampling, stop_ids=frozenset(order.stop_ids)
        ),
    )
    tokens = [choice.id for choice in outcome.tokens]
    return json_response(SpeechReply(tokens=tokens, finish=outcome.finish or "length"))


async def teaching_states(request: Request) -> Response:
    order = await read_body(request, StatesRequest, context_of(request).limits)
    card = await _run(request, _teaching(request).card_of)
    size = _STATE_BYTES * card.spec.hidden
    if size * len(order.tokens) > MAX_STATES_BYTES:
        raise RequestError(
            f"The states of {len(order.tokens)} tokens are more than {MAX_STATES_BYTES} bytes.",
            hint=f"send at most {MAX_STATES_BYTES // size} tokens",
            param="tokens",
            code="invalid_value",
            status=413,
        )
    wanted = GenerationRequest(
        tuple(order.tokens), max_tokens=1, prompt_logprobs=0, sampling=Sampling(wants_states=True)
    )
    return _bytes(_joined_states(await _generate(request, wanted), len(order.tokens), size))


async def take_draft_head(request: Request) -> Response:
    content = await read_bytes(request, context_of(request).limits, MOST_HEAD_BYTES)
    tell_audit(request, request.path_params["model"], bytes=len(content))
    take = _teaching(request).take
    try:
        taken = await _run(request, lambda model: take(model, content))
    except CorruptModelError as error:
        raise RequestError(error.message, hint=error.hint, code="invalid_value") from error
    view = DraftHeadView(path=taken.path, in_use=taken.in_use, problems=taken.problems)
    return Response(msgspec.json.encode(view), media_type="application/json")


def _joined_states(outcome: Outcome, count: int, size_bytes: int) -> bytes:
    """Of each token, in order: that of a prompt's token comes with the next one. They come from a machine that may be
    wrong."""
    states = [choice.hidden for choice in (*outcome.prompt[1:], *outcome.tokens[:1])]
    if not any(states):
        raise refuse_final_rows("what computes the last stage")
    if len(states) != count or any(len(state) != size_bytes for state in states):
        raise BackendError(
            f"The last stage gave {len(states)} states of {sorted({len(each) for each in states})} bytes where "
            f"{count} of {size_bytes} belong.",
            hint="run the same release on every machine of the cluster",
        )
    return b"".join(states)


async def _generate(request: Request, wanted: GenerationRequest) -> Outcome:
    name = request.path_params["model"]
    service = context_of(request).service
    model = next((each for each in service.models() if each.name == name), None)
    if model is None:
        raise UnknownModelError(f"the model {name!r} is not served here", hint="`status` tells their names")
    async with open_generations(request, Plan(model, service.codec(name), (wanted,), 1)) as running:
        [outcome] = await running.finish()
    return outcome


async def _run(request: Request, work: Callable[[str], Result]) -> Result:
    return await asyncio.to_thread(partial(work, request.path_params["model"]))


def _teaching(request: Request) -> DraftHeadTeaching:
    teaching: DraftHeadTeaching = request.app.state.admin.draft_heads
    return teaching


def _bytes(content: bytes) -> Response:
    return Response(content, media_type=_BYTES, headers={"cache-control": "no-store"})


TEACHING_ROUTES: tuple[ApiRoute, ...] = (
    ApiRoute(
        "GET",
        "/cluster/teaching/{model:path}/card",
        teaching_card,
        "What a served model consists of, for a machine that teaches a draft head.",
        needs=Access.OPERATE,
        has_bytes=True,
        statuses=(403, 404),
    ),
    ApiRoute(
        "POST",
        "/cluster/teaching/{model:path}/tensor",
        teaching_tensor,
        "Bytes of the model's embedding, head or last norm, or of its tokenizer or draft head.",
        needs=Access.OPERATE,
        body=TensorRequest,
        has_bytes=True,
        statuses=_ERRORS,
    ),
    ApiRoute(
        "POST",
        "/cluster/teaching/{model:path}/speech",
        teaching_speech,
        "How the model goes on from tokens, in tokens.",
        needs=Access.OPERATE,
        body=SpeechRequest,
        reply=SpeechReply,
        statuses=GENERATION_ERRORS,
    ),
    ApiRoute(
        "POST",
        "/cluster/teaching/{model:path}/states",
        teaching_states,
        "The final state of each token of a text, before the norm and of a mean square of 1, as little-endian float16.",
        needs=Access.OPERATE,
        body=StatesRequest,
        has_bytes=True,
        statuses=GENERATION_ERRORS,
    ),
    ApiRoute(
        "POST",
        "/cluster/teaching/{model:path}/draft-head",
        take_draft_head,
        "Keep a draft head, sent as application/octet-stream, and have the model's last stages draft with it.",
        needs=Access.OPERATE,
        takes_bytes=True,
        reply=DraftHeadView,
        statuses=(*_ERRORS, 408),
        audit="draft_head.take",
    ),
)
