"""An executor that picks tokens as a device does, on the host: greedily, and unsure where the test says so."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from shardcompute.backends.executor import Executor, PickRule
from shardcompute.backends.matrix import Array
from shardcompute.core.batch import Segment
from shardcompute.core.steps import PICKED
from support.models.deferred import DeferredExecutor


@dataclass
class PickedOnHost:
    """Tokens of a step; an unsure row guesses a token that is next to the best one."""

    rows: Array
    rules: Sequence[PickRule | None]
    unsure: bool

    def is_ready(self) -> bool:
        return True

    def wait(self) -> PickedOnHost:
        return self

    def token(self, row: int) -> int | None:
        return None if self.unsure or self.rules[row] is None else self.guess(row)

    def guess(self, row: int) -> int:
        best = int(np.argmax(self.rows[row]))
        return (best + 1) % self.rows.shape[1] if self.unsure else best

    def logits(self, row: int) -> Array:
        logits: Array = self.rows[row]
        return logits


@dataclass
class PickingDevice(DeferredExecutor):
    """`unsure_steps` are numbers of steps, counted from 0, whose rows are all unsure. `fed` counts ids that it knew."""

    inner: Executor = field(kw_only=True)
    unsure_steps: set[int] = field(default_factory=set)
    fed: int = 0
    steps: int = 0
    last: dict[int, tuple[int, int]] = field(default_factory=dict)

    @property
    def can_pick(self) -> bool:
        return True

    def launch_picks(
        self,
        segments: Sequence[Segment],
        inputs: Array,
        rules: Sequence[PickRule | None],
        *,
        keeps_hidden: bool = False,
    ) -> Any:
        ids, row = np.array(inputs), 0
        for segment in segments:
            if ids[row] == PICKED:
                assert self.can_continue(segment.session, segment.start)
                ids[row] = self.last[segment.session][1]
                self.fed += 1
            row += segment.count
        logits = np.array(self.inner.step(segments, ids, keeps_hidden=keeps_hidden))
        picks = PickedOnHost(logits, rules, self.steps in self.unsure_steps)
        self.steps += 1
        self.order.append("launched")
        row = 0
        for segment in segments:
            row += segment.logit_rows
            self.last.pop(segment.session, None)
            if segment.logit_rows and rules[row - 1] is not None:
                self.last[segment.session] = segment.stop, picks.guess(row - 1)
        return picks

    def can_continue(self, session: int, position: int) -> bool:
        return session in self.last and self.last[session][0] == position
