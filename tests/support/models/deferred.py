"""Executors that compute as a device does: beside its host, done when the test says so; one picks tokens too."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from shardcompute.backends.executor import Executor, KvUsage, PendingStep, PickRule
from shardcompute.backends.matrix import Array
from shardcompute.core.batch import Segment
from shardcompute.core.pictures import PictureSpan
from shardcompute.core.steps import PICKED


@dataclass
class DeferredStep:
    """Done when it was looked at so often as its device takes, or when it is waited for."""

    output: Array
    device: DeferredExecutor
    looks: int = 0

    def is_ready(self) -> bool:
        self.looks += 1
        return self.looks > self.device.looks

    def wait(self) -> Array:
        self.device.order.append("waited")
        self.device.under_way -= 1
        if self.device.failure is not None:
            failure, self.device.failure = self.device.failure, None
            raise failure
        return self.output


@dataclass
class DeferredExecutor:
    """Wraps an executor. `order` tells what was launched and waited for."""

    inner: Executor
    order: list[str] = field(default_factory=list)
    under_way: int = 0
    failure: Exception | None = None
    looks: int = 3

    @property
    def is_asynchronous(self) -> bool:
        return True

    def launch(
        self, segments: Sequence[Segment], inputs: Array, *, keeps_hidden: bool = False
    ) -> PendingStep:
        assert self.under_way < 2, "two steps are under way already"
        output = np.array(self.inner.step(segments, inputs, keeps_hidden=keeps_hidden))
        self.order.append("launched")
        self.under_way += 1
        return DeferredStep(output, self)

    def step(self, segments: Sequence[Segment], inputs: Array, *, keeps_hidden: bool = False) -> Array:
        return self.launch(segments, inputs, keeps_hidden=keeps_hidden).wait()

    def hidden_rows(self) -> Array:
        return self.inner.hidden_rows()

    def final_rows(self) -> Array:
        return self.inner.final_rows()

    def adopt(self, source: int, target: int, length: int, *, is_moved: bool = False) -> None:
        self.inner.adopt(source, target, length, is_moved=is_moved)

    def open_pictures(
        self, session: int, spans: Sequence[PictureSpan], patches: Sequence[bytes] | None
    ) -> None:
        self.inner.open_pictures(session, spans, patches)

    def close_session(self, session: int) -> None:
        self.inner.close_session(session)

    def session_length(self, session: int) -> int:
        return self.inner.session_length(session)

    def sessions(self) -> list[int]:
        return self.inner.sessions()

    def kv_usage(self) -> KvUsage:
        return self.inner.kv_usage()

    def close(self) -> None:
        self.inner.close()


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
