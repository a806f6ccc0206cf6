"""What is asked of a model and what comes back, as every room sees it.

A request is complete in itself: prompt ids, sampling parameters and stop rules determine the answer exactly,
whichever machines compute it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

FinishReason = Literal["stop", "length", "cancelled"]


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the next token is picked from logits. `temperature` 0 is greedy; `seed` fixes all randomness."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int = 0
    logprobs: int | None = None
    """None: no log-probabilities; N ≥ 0: that of the chosen token and of the N most likely ones."""


DrafterName = Literal["auto", "off", "ngram", "model", "self"]


@dataclass(frozen=True, slots=True)
class Speculation:
    """How drafts may speed up a generation; they never change its tokens. What is None is left to the router."""

    drafter: DrafterName = "auto"
    tokens: int | None = None
    """Drafted tokens in a frame."""
    frames: int | None = None
    """Frames on their way at once."""


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One generation. `stop_ids` end it silently; `stop` strings end it and are cut from the text."""

    prompt: tuple[int, ...]
    max_tokens: int
    sampling: Sampling = field(default_factory=Sampling)
    stop: tuple[str, ...] = ()
    stop_ids: frozenset[int] = frozenset()
    include_stop: bool = False
    prompt_logprobs: int | None = None
    """As `Sampling.logprobs`, for the prompt's own tokens (the first has none)."""
    speculation: Speculation = field(default_factory=Speculation)


@dataclass(frozen=True, slots=True)
class TokenChoice:
    """One token with, where asked for, its log-probability and the most likely alternatives."""

    id: int
    logprob: float | None = None
    alternatives: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Timings:
    """Where a generation's time went, in seconds."""

    queue_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    traversals: int = 0
    """Frames that carried rows of this generation after its prompt."""
    drafted_tokens: int = 0
    accepted_tokens: int = 0

    @property
    def prefill_tokens_per_s(self) -> float:
        return self.prompt_tokens / self.prefill_s if self.prefill_s > 0 else 0.0

    @property
    def decode_tokens_per_s(self) -> float:
        """Speed after the first token, which the prefill pays for."""
        return (self.generated_tokens - 1) / self.decode_s if self.decode_s > 0 else 0.0


@dataclass(frozen=True, slots=True)
class Delta:
    """The next piece of an answer: text that is certain by now, the tokens behind it, and how it ended.

    `text` may be empty while a character or a possible stop string is incomplete. Exactly one delta of a
    generation, the last, has a `finish`. `prompt` is filled in the first delta when prompt log-probabilities
    were asked for.
    """

    text: str = ""
    tokens: tuple[TokenChoice, ...] = ()
    prompt: tuple[TokenChoice, ...] = ()
    finish: FinishReason | None = None
    timings: Timings | None = None
