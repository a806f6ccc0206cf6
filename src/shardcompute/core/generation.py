"""What is asked of a model and what comes back, as every room sees it.

A request is complete in itself: prompt ids, sampling parameters and stop rules determine the answer exactly,
whichever machines compute it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from shardcompute.core.pictures import Picture

FinishReason = Literal["stop", "length", "cancelled"]


GrammarKind = Literal["json_schema", "regex", "choice", "lark"]
MAX_GRAMMAR_CHARS = 1 << 18
MAX_GRAMMAR_BYTES = 1 << 16
"""Of its text, compressed: so much of it travels with a session."""


MAX_PATTERN_CHARS = 1 << 12
"""Of all regular expressions in a grammar, as if they were one: what they cost grows by the square of their length."""
RECEIPT_PREFIX = "rcpt-"
MAX_STOPS = 16
MAX_STOP_CHARS = 1 << 12
"""Of all stop strings of a request: each character is a state to be kept in memory."""


MAX_STATES_BYTES = 4 << 20
"""Of the final states of one prompt: they are handed on in one piece."""


@dataclass(frozen=True, slots=True)
class Grammar:
    """What an answer must look like, whole: the text of a JSON schema, a regular expression, a JSON list of texts to
    choose from, or a Lark grammar."""

    kind: GrammarKind
    text: str


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
    grammar: Grammar | None = None
    """Only tokens that can lead to a whole answer of this grammar are picked, and its end only where it may end."""
    wants_hidden: bool = False
    """Give with each picked token the hidden state that it was picked from (embeddings)."""
    wants_states: bool = False
    """Give with each picked token, and with each of the prompt's that is scored, the final state before it (what draft
    heads learn from). Scores are left out then."""

    @property
    def shows_rows(self) -> bool:
        """Whether something of the rows themselves is given, which have to be computed for that."""
        return self.wants_hidden or self.wants_states


DrafterName = Literal["auto", "off", "ngram", "model", "head"]


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
    speculation: Speculation | None = None
    """None: as the server does by default."""
    caller: str = ""
    """The public name of the API key behind it; "" where none was asked for."""
    request_id: str = ""
    """The id of the HTTP request behind it, as its client sees it; "" where there is none."""
    cache_salt: str = ""
    """A caller's own partition of what is kept of prompts."""
    shown_ids: frozenset[int] = frozenset()
    """Special tokens whose text belongs to the answer, such as marks of tool calls; others are left out of it."""

    adapter: str = ""
    """The name of the adapter to compute it with; "": the base alone."""
    pictures: tuple[Picture, ...] = ()
    """Those of the prompt, in its order: their rows are placeholders in it."""
    receipt: str = ""
    """The id of the receipt that its stages are to sign for (`security.receipts`); "": none is asked for."""

    @property
    def receipt_nonce(self) -> bytes:
        """What stages are told of that. ValueError where it is no id."""
        return bytes.fromhex(self.receipt.removeprefix(RECEIPT_PREFIX))

    @property
    def prefix_scope(self) -> tuple[str, str, str]:
        """What is kept of one generation may speed up another of the same scope: callers share nothing, and another
        adapter computes other keys and values."""
        return self.caller, self.cache_salt, self.adapter


@dataclass(frozen=True, slots=True)
class TokenChoice:
    """One token with, where asked for, its log-probability and the most likely alternatives."""

    id: int
    logprob: float | None = None
    alternatives: tuple[tuple[int, float], ...] = ()
    hidden: bytes = b""
    """The normed final hidden state before it, little-endian float32, where `Sampling.wants_hidden` says so; where
    `wants_states` does, the final state before the norm, of a mean square of 1, little-endian float16."""


@dataclass(frozen=True, slots=True)
class Traversal:
    """Where the time of a frame's way around the chain went, in the mean, and the bytes that the stages received."""

    wire_s: float = 0.0
    stage_queue_s: float = 0.0
    codec_s: float = 0.0
    compute_s: float = 0.0
    draft_s: float = 0.0
    received_bytes: float = 0.0
    codecs: tuple[str, ...] = ()
    """The forms in which activations went from stage to stage."""

    @property
    def ring_s(self) -> float:
        return self.wire_s + self.stage_queue_s + self.codec_s + self.compute_s


@dataclass(frozen=True, slots=True)
class Interruption:
    """The chain of a generation was lost, or moved, and the generation went on where it was: no token of it is missing.

    Machines are given by the names that people know them by. Without one that was `lost` the layers were moved, or a
    link was replaced.
    """

    lost: tuple[str, ...]
    taken_over_by: tuple[str, ...]
    pause_s: float
    """From the last token before to the first one after."""
    after_tokens: int
    """So many had been generated by then, and were kept."""


@dataclass(frozen=True, slots=True)
class Timings:
    """Where a generation's time went, in seconds."""

    queue_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    cached_tokens: int = 0
    """Tokens of the prompt that were not computed, because the chain still knew them."""
    traversals: int = 0
    """Frames that carried rows of this generation after its prompt."""
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    traversal: Traversal = field(default_factory=Traversal)
    """Of the frames after the prompt."""
    interrupted_s: float = 0.0
    """Waited for another chain; no part of the prefill or the decode."""
    drafted_by_position: tuple[int, ...] = ()
    """How many drafts had a first token, a second, and so on."""
    accepted_by_position: tuple[int, ...] = ()

    @property
    def prefill_tokens_per_s(self) -> float:
        return (self.prompt_tokens - self.cached_tokens) / self.prefill_s if self.prefill_s > 0 else 0.0

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
    interruption: Interruption | None = None
    """What had to be waited for before this piece."""
