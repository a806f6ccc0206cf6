"""Limits of a driver and of its chain, how busy it is, and which requests it refuses at once."""

from __future__ import annotations

from dataclasses import dataclass

from shardcompute.core.errors import PromptTooLongError, UsageError
from shardcompute.core.generation import MAX_STOP_CHARS, MAX_STOPS, GenerationRequest, Speculation
from shardcompute.core.pictures import MAX_PICTURE_BYTES, check_spans
from shardcompute.decoding import validate_sampling
from shardcompute.models.spec import VisionSpec
from shardcompute.models.vision.prepare import check_picture

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
    vision: VisionSpec | None = None
    """How the model sees; None: it takes text alone."""
    max_picture_bytes: int = 512 << 20
    """What is kept of the pictures of all requests, also of those that wait."""


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
    if request.pictures:
        _check_pictures(request, limits.vision)


def picture_bytes(request: GenerationRequest) -> int:
    """What is kept of a request's pictures."""
    return sum(len(picture.patches) for picture in request.pictures)


def _check_pictures(request: GenerationRequest, vision: VisionSpec | None) -> None:
    if vision is None:
        raise UsageError("this model does not see pictures", hint="send text only")
    if request.prompt_logprobs is not None:
        raise UsageError("a prompt with pictures has no log-probabilities", hint="leave prompt_logprobs out")
    check_spans([picture.span for picture in request.pictures], len(request.prompt))
    if picture_bytes(request) > MAX_PICTURE_BYTES:
        raise UsageError(
            f"the pictures of a prompt have more than {MAX_PICTURE_BYTES >> 20} MiB together",
            hint="send fewer, or smaller ones",
        )
    for picture in request.pictures:
        check_picture(vision, picture.span, picture.patches)
