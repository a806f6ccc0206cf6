"""Generation: asks an open model and takes its answer, as text while it comes, or as one object at the end."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

from shardcompute.cli.chat.images import encode_images, has_images, with_images
from shardcompute.cli.chat.remote import find_server
from shardcompute.cli.format import format_rate
from shardcompute.cli.options.cluster import Drafting
from shardcompute.cli.options.generation import SamplingArguments, speculation_for
from shardcompute.core.errors import UsageError
from shardcompute.core.generation import (
    Delta,
    FinishReason,
    GenerationRequest,
    Interruption,
    Sampling,
    Speculation,
    Timings,
)
from shardcompute.core.pictures import Picture
from shardcompute.core.units import count_of

if TYPE_CHECKING:
    from shardcompute.node.local.service import LocalService

_SEED_BITS = 63


@dataclass(frozen=True, slots=True)
class AnswerOptions:
    """How to answer, whatever the prompt. `seed` None: another one for every drawn answer."""

    max_tokens: int
    sampling: Sampling
    seed: int | None
    stop: tuple[str, ...]
    system: str | None
    is_raw: bool
    speculation: Speculation | None = None
    """None: as whoever answers does by default."""
    adapter: str = ""
    """Of a model that this process opens; "": none."""

    def __post_init__(self) -> None:
        if self.is_raw and self.system is not None:
            raise UsageError(
                "--system needs the chat template, which --raw leaves out", hint="give one of the two"
            )
        if not all(self.stop):
            raise UsageError("--stop is empty", hint="give the text to stop at")


def answer_options_of(
    given: SamplingArguments, drafting: Drafting | None, *, is_raw: bool = False, is_conversation: bool
) -> AnswerOptions:
    """What a command's options ask for; UsageError for what contradicts itself."""
    return AnswerOptions(
        max_tokens=given.max_tokens,
        sampling=given.sampling_for(is_conversation=is_conversation),
        seed=given.seed,
        stop=tuple(given.stop or ()),
        system=given.system,
        is_raw=is_raw,
        speculation=speculation_for(drafting),
    )


@dataclass(frozen=True, slots=True)
class AnswerSummary:
    """An answer, whole or (`finish` is cancelled) as far as it came. Timings come with a whole one."""

    text: str
    token_ids: tuple[int, ...]
    finish: FinishReason
    timings: Timings | None
    interruptions: tuple[Interruption, ...] = ()


def check_chat_template(service: LocalService, options: AnswerOptions) -> None:
    if not options.is_raw and not service.tokenizer.has_chat_template:
        raise UsageError(
            f"{service.name} has no chat template",
            hint="add --raw to have it continue the prompt as it stands",
        )


def as_messages(options: AnswerOptions, prompt: str, images: Sequence[str] = ()) -> list[dict[str, Any]]:
    system = [] if options.system is None else [{"role": "system", "content": options.system}]
    return [*system, {"role": "user", "content": with_images(prompt, images)}]


def make_request(
    service: LocalService, options: AnswerOptions, messages: Sequence[Mapping[str, Any]]
) -> GenerationRequest:
    """The request for a conversation or, with `is_raw`, for the text of its last message. Without a prompt, it is for
    the messages themselves: a server makes the prompt where there are images."""
    tokenizer = service.tokenizer
    ids, pictures = list[int](), tuple[Picture, ...]()
    if options.is_raw:
        ids = tokenizer.encode(messages[-1]["content"])
    elif not has_images(messages):
        ids = tokenizer.encode_chat(messages)
    elif find_server(service) is None:
        ids, pictures = encode_images(service, messages)
    return GenerationRequest(
        prompt=tuple(ids),
        max_tokens=options.max_tokens,
        sampling=_with_seed(options),
        stop=options.stop,
        stop_ids=tokenizer.eos_ids,
        speculation=options.speculation,
        adapter=options.adapter,
        pictures=pictures,
    )


def take_answer(
    service: LocalService,
    request: GenerationRequest,
    write: Callable[[str], None],
    messages: Sequence[Mapping[str, Any]],
) -> AnswerSummary:
    """Give every piece of text to `write`. Ctrl-C ends the answer early."""
    server = None if request.prompt else find_server(service)
    stream = service.stream(request) if server is None else server.stream_chat(request, messages)
    pieces: list[str] = []
    token_ids: list[int] = []
    interruptions: list[Interruption] = []
    last = Delta(finish="cancelled")
    # Closing the iterator is what cancels the generation.
    with closing(cast("Generator[Delta]", stream)) as deltas:
        try:
            for delta in deltas:
                token_ids.extend(token.id for token in delta.tokens)
                if delta.interruption is not None:
                    interruptions.append(delta.interruption)
                pieces.append(delta.text)
                if delta.text:
                    write(delta.text)
                if delta.finish is not None:
                    last = delta
        except KeyboardInterrupt:
            pass
    return AnswerSummary(
        "".join(pieces), tuple(token_ids), last.finish or "cancelled", last.timings, tuple(interruptions)
    )


def as_json(model: str, request: GenerationRequest, reply: AnswerSummary, load_s: float) -> dict[str, Any]:
    timings = reply.timings or Timings()
    return {
        "model": model,
        "text": reply.text,
        "token_ids": list(reply.token_ids),
        "prompt_tokens": len(request.prompt) or timings.prompt_tokens,
        "finish": reply.finish,
        "seed": request.sampling.seed,
        "timings": {
            "load_s": load_s,
            "queue_s": timings.queue_s,
            "prefill_s": timings.prefill_s,
            "decode_s": timings.decode_s,
            "prefill_tokens_per_s": timings.prefill_tokens_per_s,
            "decode_tokens_per_s": timings.decode_tokens_per_s,
            "cached_tokens": timings.cached_tokens,
            "traversals": timings.traversals,
            "drafted_tokens": timings.drafted_tokens,
            "accepted_tokens": timings.accepted_tokens,
        },
    }


def describe_interruption(told: Interruption) -> str:
    """A rescue in a sentence or two, as the page has it."""
    lost, by = _listed(told.lost), _listed(told.taken_over_by)
    when = f"after {count_of(told.after_tokens, 'token')}" if told.after_tokens else "before the first token"
    if lost:
        is_many = len(told.lost) > 1
        back = "; they are back" if is_many else "; it is back"
        took = back if by == lost else f"; {by} took over" if by else ""
        happened = f"{lost} {'were' if is_many else 'was'} lost {when}{took}"
    else:
        happened = f"layers moved to {by} {when}" if by else f"a link was replaced {when}"
    return f"{happened}. The answer paused for {told.pause_s:.2f} s; no token was lost."


def _listed(names: Sequence[str]) -> str:
    return " and ".join(filter(None, [", ".join(names[:-1]), *names[-1:]]))


def describe_timings(reply: AnswerSummary, load_s: float | None = None) -> str:
    timings = reply.timings or Timings()
    parts = [] if not load_s else [f"loaded in {load_s:.2f} s"]
    parts += [
        f"prompt {timings.prompt_tokens} tokens{_cached(timings)} in {timings.prefill_s:.2f} s "
        f"({format_rate(timings.prefill_tokens_per_s)})",
        f"answer {timings.generated_tokens} tokens in {timings.decode_s:.2f} s "
        f"({format_rate(timings.decode_tokens_per_s)})",
        *_describe_traversals(timings),
        f"ended by {reply.finish}",
    ]
    return " · ".join(parts)


def timing_rows(reply: AnswerSummary) -> list[tuple[str, str]]:
    """Names and values of everything that is known about how an answer came to be."""
    timings = reply.timings or Timings()
    trip = timings.traversal
    rows = [
        ("prompt", f"{timings.prompt_tokens} tokens, {timings.cached_tokens} of them still known"),
        ("waited", f"{timings.queue_s:.2f} s"),
        ("read", f"{timings.prefill_s:.2f} s ({format_rate(timings.prefill_tokens_per_s)})"),
        (
            "answer",
            f"{timings.generated_tokens} tokens in {timings.decode_s:.2f} s "
            f"({format_rate(timings.decode_tokens_per_s)})",
        ),
        ("traversals", f"{timings.traversals}{_per_traversal(timings)}"),
        ("drafts", f"{timings.drafted_tokens} tokens, {timings.accepted_tokens} accepted"),
        ("ended by", reply.finish),
    ]
    if trip.ring_s > 0:
        shares = {"wire": trip.wire_s, "queues": trip.stage_queue_s, "codecs": trip.codec_s}
        rest = ", ".join(f"{name} {1000 * value:.1f}" for name, value in shares.items())
        rows.insert(
            5, ("a traversal", f"{1000 * trip.ring_s:.1f} ms: compute {1000 * trip.compute_s:.1f}, {rest}")
        )
    return rows


def _per_traversal(timings: Timings) -> str:
    # The first token comes with the prompt.
    made = timings.generated_tokens - 1
    return f", {made / timings.traversals:.2f} tokens each" if timings.traversals and made > 0 else ""


def _cached(timings: Timings) -> str:
    return f" ({timings.cached_tokens} still known)" if timings.cached_tokens else ""


def _describe_traversals(timings: Timings) -> list[str]:
    parts = [f"{timings.traversals} traversals"] if timings.traversals else []
    if timings.drafted_tokens:
        parts += [f"{timings.accepted_tokens} of {timings.drafted_tokens} drafted tokens were right"]
    return parts


def _with_seed(options: AnswerOptions) -> Sampling:
    if options.seed is not None:
        return replace(options.sampling, seed=options.seed)
    is_drawn = options.sampling.temperature > 0
    return replace(options.sampling, seed=secrets.randbits(_SEED_BITS)) if is_drawn else options.sampling
