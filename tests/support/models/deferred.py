"""An executor that computes as a device does: beside its host, and done when the test says so."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from shardcompute.backends.executor import Executor, KvUsage, PendingStep
from shardcompute.backends.matrix import Array
from shardcompute.core.batch import Segment


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

    def adopt(self, source: int, target: int, length: int, *, is_moved: bool = False) -> None:
        self.inner.adopt(source, target, length, is_moved=is_moved)

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
