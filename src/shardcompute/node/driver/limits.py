"""Limits of a driver and of its chain, how busy it is, and which requests it refuses at once."""

from __future__ import annotations

from dataclasses import dataclass

from shardcompute.core.errors import PromptTooLongError, UsageError
from shardcompute.core.generation import MAX_STOP_CHARS, MAX_STOPS, GenerationRequest, Speculation
from shardcompute.decoding import validate_sampling

AUTO = Speculation()


@dataclass(frozen=True, slots=True)
class DriverLimits:
    vocab_size: int
    context_length: int
    max_sessions: int = 16
    max_waiting: int = 256
    speculation: Speculation = AUTO
    """For requests that do not say."""
    has_draft_head: bool = False
    """Whether last stages draft."""


@dataclass(frozen=True, slots=True)
class DriverLoad:
    running: int
    waiting: int
    used_tokens: int
    capacity_tokens: int


@dataclass(frozen=True, slots=True)
class ChainShape:
    """What the driver must know of a chain: KV for how many tokens, how many stages, how large a step."""

    capacity_tokens: int
    stages: int = 1
    max_rows: int = 512
    max_logit_rows: int = 64
    can_share: bool = True
    """Whether a session can begin with another's memory."""
    can_continue: bool = False
    """Whether the chain can go on from the token that it picked, before its driver has seen it."""


def check_request(request: GenerationRequest, limits: DriverLimits) -> None:
    """Raises UsageError or PromptTooLongError for what cannot work."""
    if not request.prompt:
        raise UsageError("the prompt is empty", hint="give at least one token of text")
    if request.max_tokens < 1:
        raise UsageError("max_tokens must be at least 1")
    if max(request.prompt) >= limits.vocab_size or min(request.prompt) < 0:
        raise UsageError(f"a prompt token is outside the vocabulary of {limits.vocab_size}")
    if len(request.prompt) >= limits.context_length:
        raise PromptTooLongError(
            f"the prompt has {len(request.prompt)} tokens and the context holds {limits.context_length}, "
            "with room for at least one more",
            hint="shorten the prompt or start with a larger --context",
        )
    if len(request.stop) > MAX_STOPS or sum(map(len, request.stop)) > MAX_STOP_CHARS:
        raise UsageError(
            f"stop has more than {MAX_STOPS} strings or {MAX_STOP_CHARS} characters",
            hint="use fewer or shorter stop strings",
        )
    validate_sampling(request.sampling, limits.vocab_size)
