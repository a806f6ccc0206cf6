"""One shard at work: sessions, KV and `step`, with the tail where the chain ends."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from shardcompute.backends.executor import Executor, KvUsage
from shardcompute.backends.matrix import Array
from shardcompute.core.steps import Opening, Picked, Work, segments_of
from shardcompute.runtime.tail import Tail


class StageRuntime:
    """Runs steps of one stage. One caller at a time."""

    def __init__(self, executor: Executor, *, is_first: bool, is_last: bool) -> None:
        self._executor = executor
        self._is_first = is_first
        self._tail = Tail() if is_last else None

    def step(
        self, work: Sequence[Work], openings: Iterable[Opening], activations: Array | None
    ) -> Array | list[Picked]:
        """Activations for the next stage or, from the last one, the picked tokens."""
        if self._is_first:
            inputs: Array = np.fromiter((token for part in work for token in part.ids), dtype=np.int64)
        elif activations is None:
            raise ValueError("a stage behind the first needs activations")
        else:
            inputs = activations
        out = self._executor.step(segments_of(work), inputs)
        if self._tail is None:
            return out
        self._tail.open(openings)
        return self._tail.pick(work, out)

    def close_sessions(self, sessions: Iterable[int]) -> None:
        for session in sessions:
            self._executor.close_session(session)
            if self._tail is not None:
                self._tail.close(session)

    def reset(self) -> None:
        """Forget every session: the chain has a new shape and its driver replays what it needs."""
        self.close_sessions(self._executor.sessions())

    def session_length(self, session: int) -> int:
        return self._executor.session_length(session)

    def session_lengths(self) -> dict[int, int]:
        """The sessions that hold KV here, and how many tokens of each this stage can go on from."""
        lengths = {session: self._executor.session_length(session) for session in self._executor.sessions()}
        if self._tail is None:
            return lengths
        # A step that failed while picking has left the tail behind.
        return {session: min(length, self._tail.length(session)) for session, length in lengths.items()}

    def kv_usage(self) -> KvUsage:
        return self._executor.kv_usage()

    def close(self) -> None:
        self._executor.close()
