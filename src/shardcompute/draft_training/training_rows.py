"""Training rows of a draft head: every token of many conversations with the state that the model had behind it.

All rows lie one behind the other in buffers on the device, which are taken once; a conversation is a span of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn import functional

from shardcompute.backends.matrix import Array
from shardcompute.backends.torch.executor import TorchExecutor
from shardcompute.core.batch import Segment
from shardcompute.draft_training.dialogue import SelfPlayDialogue

_HALF_LIMIT = 65_504.0
_SCORED_ROWS = 2048
_HELD_OUT = 50
_FEW_GROUPS = 8


@dataclass(frozen=True, slots=True)
class Span:
    """Rows `[start, stop)` of one conversation; tokens from row `greedy_from` on were the likeliest ones."""

    start: int
    stop: int
    greedy_from: int


class TrainingRows:
    """Buffers of at most `capacity` rows. `head` scores states exactly where the executor's logits are rounded."""

    def __init__(
        self, capacity: int, hidden: int, device: torch.device, *, head: torch.Tensor | None = None
    ) -> None:
        self.capacity = capacity
        self.states = torch.empty((capacity, hidden), dtype=torch.float16, device=device)
        self.tokens = torch.empty(capacity, dtype=torch.int32, device=device)
        self.best = torch.empty(capacity, dtype=torch.int32, device=device)
        self.left = torch.zeros(capacity, dtype=torch.int16, device=device)
        """How many rows of the same conversation come behind a row."""
        self.spans: list[Span] = []
        self.rows = 0
        self.is_full = False
        self._head = head

    def read(self, executor: TorchExecutor, conversations: Sequence[SelfPlayDialogue], max_rows: int) -> None:
        """Have the model read these, several in a step. Once one does not fit, all is full."""
        group: list[SelfPlayDialogue] = []
        count = 0
        for conversation in conversations:
            length = len(conversation.ids)
            if self.is_full or self.rows + count + length > self.capacity:
                self.is_full = True
                break
            if group and count + length > max_rows:
                self._read_step(executor, group)
                group, count = [], 0
            group.append(conversation)
            count += length
        if group:
            self._read_step(executor, group)

    def starts(self, spans: Sequence[Span]) -> torch.Tensor:
        """Rows of these spans behind which at least one more comes."""
        parts = [np.arange(span.start, span.stop - 1) for span in spans]
        return self._upload(np.concatenate(parts) if parts else np.empty(0, np.int64))

    def greedy_starts(self, spans: Sequence[Span], steps: int) -> torch.Tensor:
        """Rows from which the model went on greedily for `steps` rows and one token more."""
        parts = [np.arange(max(span.greedy_from - 1, span.start), span.stop - steps) for span in spans]
        return self._upload(np.concatenate(parts) if parts else np.empty(0, np.int64))

    def split(self) -> tuple[list[Span], list[Span]]:
        """Spans to learn from and spans held out to evaluate on: one in fifty, or more where there are few."""
        every = max(2, min(_HELD_OUT, len(self.spans) // _FEW_GROUPS))
        learned = [span for index, span in enumerate(self.spans) if index % every]
        return learned, self.spans[::every]

    def _read_step(self, executor: TorchExecutor, conversations: Sequence[SelfPlayDialogue]) -> None:
        lengths = [len(conversation.ids) for conversation in conversations]
        segments = [Segment(-1 - index, 0, length, length) for index, length in enumerate(lengths)]
        ids = np.concatenate([np.asarray(conversation.ids) for conversation in conversations])
        left = np.concatenate([np.arange(length - 1, -1, -1) for length in lengths])
        with torch.inference_mode():
            logits = executor.step_tensor(segments, torch.from_numpy(ids), keeps_hidden=True)
            states = executor.hidden_tensor()
            best = self._likeliest(states, logits)
        for segment in segments:
            executor.close_session(segment.session)
        here = slice(self.rows, self.rows + len(ids))
        self.states[here] = states.clamp(-_HALF_LIMIT, _HALF_LIMIT)
        self.tokens[here] = self._upload(ids).int()
        self.left[here] = self._upload(left).short()
        self.best[here] = best
        for conversation, length in zip(conversations, lengths, strict=True):
            self.spans.append(Span(self.rows, self.rows + length, self.rows + conversation.greedy_from))
            self.rows += length

    def _likeliest(self, states: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        if self._head is None:
            return logits.argmax(-1).int()
        parts = [functional.linear(part, self._head).argmax(-1) for part in states.split(_SCORED_ROWS)]
        return torch.cat(parts).int()

    def _upload(self, rows: Array) -> torch.Tensor:
        return torch.from_numpy(rows).to(self.states.device)
