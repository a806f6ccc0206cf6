"""Training rows of a draft head: every token of many conversations with the state that the model had behind it.

All rows lie one behind the other in buffers on the device, which are taken once; a conversation is a span of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from shardcompute.backends.torch.transfers import upload
from shardcompute.draft_training.dialogue import SelfPlayDialogue
from shardcompute.draft_training.questions import HELD_OUT

_SHORT_TOKENS = 16
_ONE_IN = 50
_FEW_SPANS = 8
_MOST_EXAMINED = 1500
_LENGTH_STEP = 32
_SORTED_SPANS = 4096


@dataclass(frozen=True, slots=True)
class Span:
    """Rows `[start, stop)` of one conversation."""

    start: int
    stop: int
    kind: str


@dataclass(frozen=True, slots=True)
class SequenceBatch:
    """Conversations side by side, filled up at their ends: `[conversations, rows]` each.

    `following` is the token behind each row; `is_there` says which rows have one in the same conversation.
    """

    states: torch.Tensor
    tokens: torch.Tensor
    following: torch.Tensor
    origins: torch.Tensor
    is_there: torch.Tensor


class TrainingRows:
    """Buffers of at most `capacity` rows."""

    def __init__(self, capacity: int, hidden: int, device: torch.device) -> None:
        self.capacity = capacity
        self.states = torch.empty((capacity, hidden), dtype=torch.float16, device=device)
        self.tokens = torch.empty(capacity, dtype=torch.int32, device=device)
        self.origins = torch.empty(capacity, dtype=torch.uint8, device=device)
        self.spans: list[Span] = []
        self.rows = 0
        self.is_full = False

    def keep(self, dialogues: Sequence[SelfPlayDialogue], states: torch.Tensor) -> None:
        """Dialogues and the states of all their tokens. Once they do not fit, all is full."""
        count = len(states)
        if self.is_full or self.rows + count > self.capacity:
            self.is_full = True
            return
        here = slice(self.rows, self.rows + count)
        self.states[here] = states
        self.tokens[here] = self._upload(np.concatenate([each.ids for each in dialogues]))
        self.origins[here] = self._upload(np.concatenate([each.origins for each in dialogues]))
        for dialogue in dialogues:
            length = len(dialogue.ids)
            if length >= _SHORT_TOKENS:
                self.spans.append(Span(self.rows, self.rows + length, dialogue.kind))
            self.rows += length

    def split(self) -> tuple[list[Span], list[Span]]:
        """Spans to learn from and spans held out: one in fifty, or more where there are few, and all of the kinds that
        are never learned from."""
        learned: list[Span] = []
        unseen: list[Span] = []
        for span in self.spans:
            (unseen if span.kind in HELD_OUT else learned).append(span)
        every = max(2, min(_ONE_IN, len(learned) // _FEW_SPANS))
        held_out = learned[::every][:_MOST_EXAMINED] + unseen[:_MOST_EXAMINED]
        return [span for index, span in enumerate(learned) if index % every], held_out

    def batches(
        self, spans: Sequence[Span], max_rows: int, random: np.random.Generator | None = None
    ) -> Iterator[SequenceBatch]:
        """All of these, those of like length together, in steps of about `max_rows` rows; in another order each time
        where there is chance."""
        for batch in _cut(spans, max_rows, random):
            yield self._gather([spans[index] for index in batch])

    def _gather(self, spans: Sequence[Span]) -> SequenceBatch:
        starts = np.asarray([span.start for span in spans])
        lengths = np.asarray([span.stop - span.start for span in spans])
        width = -(-int(lengths.max()) // _LENGTH_STEP) * _LENGTH_STEP
        places = np.minimum(np.arange(width), lengths[:, None] - 1)
        rows = self._upload(starts[:, None] + places)
        after = self._upload(starts[:, None] + np.minimum(places + 1, lengths[:, None] - 1))
        is_there = self._upload(np.arange(width) < lengths[:, None] - 1)
        tokens = self.tokens[rows].long()
        return SequenceBatch(
            self.states[rows], tokens, self.tokens[after].long(), self.origins[rows], is_there
        )

    def _upload(self, values: NDArray[np.generic]) -> torch.Tensor:
        return upload(torch.from_numpy(values), self.states.device)


def _cut(spans: Sequence[Span], max_rows: int, random: np.random.Generator | None) -> Iterator[list[int]]:
    lengths = np.asarray([span.stop - span.start for span in spans])
    order = np.arange(len(spans)) if random is None else random.permutation(len(spans))
    batches: list[list[int]] = []
    for at in range(0, len(order), _SORTED_SPANS):
        part = order[at : at + _SORTED_SPANS]
        batch: list[int] = []
        for index in part[np.argsort(lengths[part], kind="stable")].tolist():
            if batch and (len(batch) + 1) * lengths[index] > max_rows:
                batches.append(batch)
                batch = []
            batch.append(index)
        batches.append(batch)
    if random is not None:
        random.shuffle(batches)
    yield from batches
