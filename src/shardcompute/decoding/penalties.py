"""Changes to the logits before anything is drawn: penalties for what was said before, and biases.

`TokenHistory` is what a session has said so far. It counts as it grows and shrinks in constant time per
token, so that rejected drafts are rolled back as cheaply as they were tried.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from shardcompute.core.generation import Sampling

Logits = npt.NDArray[np.float32]
_LEAST_PENALTY = np.finfo(np.float32).tiny
"""Smaller ones are zero in 32 bits, or as good as zero."""


class TokenHistory:
    """The tokens before the next one: a prompt, which stays, then generated tokens, which come and go.

    `ids` are the distinct tokens of both; `counts` says how often each was generated (0: only in the prompt).
    Both are views that are valid until the history changes.
    """

    def __init__(self, prompt: Sequence[int] = ()) -> None:
        distinct = list(dict.fromkeys(prompt))
        self.prompt_length = len(prompt)
        self._generated: list[int] = []
        self._slots = {token: slot for slot, token in enumerate(distinct)}
        self._prompt_slots = len(distinct)
        self._ids = np.array(distinct, dtype=np.int64)
        self._counts = np.zeros(len(distinct), dtype=np.int64)

    def __len__(self) -> int:
        return self.prompt_length + len(self._generated)

    @property
    def ids(self) -> npt.NDArray[np.int64]:
        return self._ids[: len(self._slots)]

    @property
    def counts(self) -> npt.NDArray[np.int64]:
        return self._counts[: len(self._slots)]

    @property
    def generated(self) -> tuple[int, ...]:
        return tuple(self._generated)

    def append(self, token: int) -> None:
        slot = self._slots.setdefault(token, len(self._slots))
        if slot == len(self._ids):
            self._ids, self._counts = _grown(self._ids), _grown(self._counts)
        self._ids[slot] = token
        self._counts[slot] += 1
        self._generated.append(token)

    def extend(self, tokens: Iterable[int]) -> None:
        for token in tokens:
            self.append(token)

    def truncate(self, length: int) -> None:
        """Forget generated tokens from the end until `length` tokens, the prompt's included, are left."""
        if not self.prompt_length <= length <= len(self):
            raise ValueError(
                f"cannot cut {len(self)} tokens ({self.prompt_length} of them prompt) to {length}"
            )
        while len(self) > length:
            token = self._generated.pop()
            slot = self._slots[token]
            self._counts[slot] -= 1
            # Tokens leave in the reverse order of their coming, so one that is gone held the last slot.
            if self._counts[slot] == 0 and slot >= self._prompt_slots:
                del self._slots[token]


Adjuster = Callable[[Logits, TokenHistory], None]
"""Changes logits in place."""


def needs_history(sampling: Sampling) -> bool:
    """Whether what was said before changes the logits: biases alone do not ask."""
    return (
        sampling.repetition_penalty != 1.0
        or sampling.presence_penalty != 0.0
        or sampling.frequency_penalty != 0.0
    )


def build_adjusters(sampling: Sampling) -> tuple[Adjuster, ...]:
    """The changes that this sampling asks for, in the order in which they apply."""
    adjusters: list[Adjuster] = []
    if sampling.repetition_penalty != 1.0:
        adjusters.append(
            lambda logits, history: penalise_repetition(logits, history, sampling.repetition_penalty)
        )
    if sampling.presence_penalty != 0.0 or sampling.frequency_penalty != 0.0:
        adjusters.append(
            lambda logits, history: penalise_generated(
                logits, history, sampling.presence_penalty, sampling.frequency_penalty
            )
        )
    if sampling.logit_bias:
        adjusters.append(_bias_adjuster(sampling.logit_bias))
    return tuple(adjusters)


def penalise_repetition(logits: Logits, history: TokenHistory, penalty: float) -> None:
    """Scale down every token of prompt and answer: positive logits are divided, negative ones multiplied."""
    seen, factor = logits[history.ids], max(np.float32(penalty), _LEAST_PENALTY)
    with np.errstate(over="ignore"):  # a logit too large to scale is as good as infinite
        logits[history.ids] = np.where(seen > 0, seen / factor, seen * factor)


def penalise_generated(logits: Logits, history: TokenHistory, presence: float, frequency: float) -> None:
    """Lower every generated token by `presence` once and by `frequency` for each time it was generated."""
    counts = history.counts
    # A token is in the history's ids once, so the subtraction reaches each logit once.
    logits[history.ids] -= (presence * (counts > 0) + frequency * counts).astype(np.float32)


def _bias_adjuster(bias: Mapping[int, float]) -> Adjuster:
    ids = np.array(list(bias.keys()), dtype=np.int64)
    amounts = np.array(list(bias.values()), dtype=np.float32)

    def add_bias(logits: Logits, _history: TokenHistory) -> None:
        logits[ids] += amounts

    return add_bias


def _grown(array: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    grown = np.zeros(max(64, 2 * array.size), dtype=np.int64)
    grown[: array.size] = array
    return grown
