"""Answers a planned request in one dialect, streamed or whole."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.requests import Request
from starlette.responses import Response

from shardcompute.api.context import ApiContext, package_version, request_id_of
from shardcompute.api.errors import RequestError
from shardcompute.api.generation.generations import Generations, Outcome
from shardcompute.api.generation.parameters import Plan
from shardcompute.api.generation.replies import PromptTokensDetails, ReplyBody, TimingsReply, Usage
from shardcompute.api.generation.schemas import GenerationBody
from shardcompute.api.generation.sse import Dialect, EventStream, Framing, until_disconnect
from shardcompute.core.generation import Timings


async def answer(
    request: Request,
    context: ApiContext,
    body: GenerationBody,
    plan: Plan,
    dialect: Dialect,
    framing: Framing | None = None,
) -> Response:
    generations = Generations(context.service, plan, context.metrics, clock=context.clock)
    if body.stream:
        return EventStream(
            generations,
            dialect,
            ping_interval_s=context.limits.ping_interval_s,
            request_id=request_id_of(request),
            framing=framing,
        )
    outcomes = await until_disconnect(request.receive, _finish(generations))
    return json_response(dialect.whole(outcomes))


def json_response(body: ReplyBody, status: int = 200) -> Response:
    return Response(body.to_json(), status_code=status, media_type="application/json")


def fingerprint() -> str:
    return f"shardcompute-{package_version()}"


def wants_usage(body: GenerationBody) -> bool:
    """Whether the stream ends with a chunk of usage; options for a stream that is not asked for are wrong."""
    if body.stream_options is None:
        return False
    if not body.stream:
        raise RequestError("stream_options is only allowed together with stream.", param="stream_options")
    return bool(body.stream_options.include_usage)


def usage_of(plan: Plan, outcomes: Sequence[Outcome]) -> Usage:
    """A prompt counts once, however many answers it gets."""
    generated = sum(len(outcome.tokens) for outcome in outcomes)
    prompt = plan.prompt_tokens
    first = [outcome.timings for outcome in outcomes[:: plan.choices_per_prompt]]
    cached = sum(timings.cached_tokens for timings in first if timings is not None)
    return Usage(
        prompt_tokens=prompt,
        completion_tokens=generated,
        total_tokens=prompt + generated,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=cached),
    )


def timings_of(outcomes: Sequence[Outcome]) -> TimingsReply | None:
    """The longest times and the sum of the tokens, as the choices ran side by side."""
    known = [outcome.timings for outcome in outcomes if outcome.timings is not None]
    if not known:
        return None
    total = Timings(
        queue_s=max(timings.queue_s for timings in known),
        prefill_s=max(timings.prefill_s for timings in known),
        decode_s=max(timings.decode_s for timings in known),
        prompt_tokens=sum(timings.prompt_tokens for timings in known),
        generated_tokens=sum(timings.generated_tokens for timings in known),
        cached_tokens=sum(timings.cached_tokens for timings in known),
        traversals=sum(timings.traversals for timings in known),
        drafted_tokens=sum(timings.drafted_tokens for timings in known),
        accepted_tokens=sum(timings.accepted_tokens for timings in known),
    )
    slowest = max(known, key=lambda timings: timings.traversal.ring_s).traversal
    return TimingsReply(
        queue_s=total.queue_s,
        prefill_s=total.prefill_s,
        decode_s=total.decode_s,
        prompt_tokens=total.prompt_tokens,
        generated_tokens=total.generated_tokens,
        prefill_tokens_per_s=total.prefill_tokens_per_s,
        decode_tokens_per_s=total.decode_tokens_per_s,
        cached_tokens=total.cached_tokens,
        traversals=total.traversals,
        drafted_tokens=total.drafted_tokens,
        accepted_tokens=total.accepted_tokens,
        wire_s=slowest.wire_s,
        stage_queue_s=slowest.stage_queue_s,
        codec_s=slowest.codec_s,
        compute_s=slowest.compute_s,
        draft_s=slowest.draft_s,
        codecs=list(slowest.codecs),
        bytes_per_token=slowest.received_bytes * total.traversals / max(total.generated_tokens, 1),
    )


async def _finish(generations: Generations) -> list[Outcome]:
    async with generations as running:
        return await running.finish()
