"""Reply envelope of OpenAI's completions: id, model and fingerprint, and the usage and times of the answer inside."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import zip_longest
from typing import Any

from starlette.requests import Request

from shardcompute.api.context import context_of, package_version, request_id_of
from shardcompute.api.errors import RequestError
from shardcompute.api.generation.generations import Outcome
from shardcompute.api.generation.parameters import Plan
from shardcompute.api.generation.resumption import StreamResumption, given_origin, open_resumption
from shardcompute.api.generation.schemas import GenerationBody
from shardcompute.api.openai.replies import (
    CompletionTokensDetails,
    InterruptionReply,
    PromptTokensDetails,
    TimingsReply,
    Usage,
)
from shardcompute.core.generation import Interruption, Timings

_LONGEST = ("queue_s", "prefill_s", "decode_s", "interrupted_s")
_SUMMED = (
    "prompt_tokens",
    "generated_tokens",
    "cached_tokens",
    "traversals",
    "drafted_tokens",
    "accepted_tokens",
)
_SUMMED_BY_POSITION = ("drafted_by_position", "accepted_by_position")
_OF_TRAVERSAL = ("wire_s", "stage_queue_s", "codec_s", "compute_s", "draft_s")


@dataclass(frozen=True, slots=True)
class Envelope:
    """What every chunk of an answer and the whole one have in common."""

    reply_id: str
    created_s: int
    model: str

    def fields(
        self, outcomes: Sequence[Outcome] = (), interruptions: Sequence[Interruption] | None = None
    ) -> dict[str, Any]:
        """With the times of `outcomes`, where any are known, and these interruptions; None: all of theirs."""
        timings = timings_of(outcomes)
        if interruptions is None:
            interruptions = [each for outcome in outcomes for each in outcome.interruptions]
        told = [InterruptionReply(**asdict(each)) for each in interruptions]
        return {
            "id": self.reply_id,
            "created": self.created_s,
            "model": self.model,
            "system_fingerprint": f"shardcompute-{package_version()}",
            **({} if timings is None else {"timings": timings}),
            **({"interruptions": told} if told else {}),
        }


def open_envelope(request: Request, prefix: str, plan: Plan) -> Envelope:
    """A stream that is resumed has those of the one that broke off."""
    origin = given_origin(request)
    created_s = int(context_of(request).wall_clock()) if origin is None else origin.created_s
    request_id = request_id_of(request) if origin is None else origin.request_id
    return Envelope(f"{prefix}-{request_id}", created_s, plan.model.name)


def resumption_of(request: Request, plan: Plan, envelope: Envelope) -> StreamResumption | None:
    """How the stream of an answer is numbered, where its request asks for that."""
    request_id = envelope.reply_id.partition("-")[2]
    return open_resumption(request, plan, request_id, envelope.created_s)


def wants_usage(body: GenerationBody) -> bool:
    """Whether the stream ends with a chunk of usage; options for a stream that is not asked for are wrong."""
    if body.stream_options is None:
        return False
    if not body.stream:
        raise RequestError("stream_options is only allowed together with stream.", param="stream_options")
    return bool(body.stream_options.include_usage)


def usage_of(plan: Plan, outcomes: Sequence[Outcome], reasoning_tokens: int = 0) -> Usage:
    """A prompt counts once, however many answers it gets. Thinking is part of the completion."""
    generated = sum(len(outcome.tokens) for outcome in outcomes)
    prompt = plan.prompt_tokens
    first = [outcome.timings for outcome in outcomes[:: plan.choices_per_prompt]]
    cached = sum(timings.cached_tokens for timings in first if timings is not None)
    return Usage(
        prompt_tokens=prompt,
        completion_tokens=generated,
        total_tokens=prompt + generated,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=cached),
        **(
            {"completion_tokens_details": CompletionTokensDetails(reasoning_tokens=reasoning_tokens)}
            if reasoning_tokens
            else {}
        ),
    )


def timings_of(outcomes: Sequence[Outcome]) -> TimingsReply | None:
    """The longest times and the sum of the tokens, as the choices ran side by side."""
    known = [outcome.timings for outcome in outcomes if outcome.timings is not None]
    if not known:
        return None
    fields: dict[str, Any] = {name: max(getattr(timings, name) for timings in known) for name in _LONGEST}
    fields |= {name: sum(getattr(timings, name) for timings in known) for name in _SUMMED}
    for name in _SUMMED_BY_POSITION:
        counts = zip_longest(*(getattr(timings, name) for timings in known), fillvalue=0)
        fields[name] = tuple(map(sum, counts))
    total = Timings(**fields)
    slowest = max(known, key=lambda timings: timings.traversal.ring_s).traversal
    return TimingsReply(
        **fields,
        **{name: getattr(slowest, name) for name in _OF_TRAVERSAL},
        prefill_tokens_per_s=total.prefill_tokens_per_s,
        decode_tokens_per_s=total.decode_tokens_per_s,
        codecs=list(slowest.codecs),
        bytes_per_token=slowest.received_bytes * total.traversals / max(total.generated_tokens, 1),
    )
