"""Draft backlog: what a drafter that is still being loaded would have been shown, kept until it is there.

A last stage that takes another's place gets the rows of all sessions replayed at once, and its draft head a little
later. Bounded: what is too much is forgotten, the oldest first, and is then not in the drafter's memory.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from shardcompute.backends.matrix import Array
from shardcompute.core.steps import Picked, SessionRows
from shardcompute.runtime.head_drafter import HeadDrafter

_MOST_BYTES = 8 << 20


class DraftBacklog:
    """Takes what a `HeadDrafter` takes, for `tell` to hand it on."""

    def __init__(self, most_bytes: int = _MOST_BYTES) -> None:
        self._most_bytes = most_bytes
        self._kept: deque[tuple[int, Callable[[HeadDrafter], None]]] = deque()
        self._size_bytes = 0

    def remember(self, work: Sequence[SessionRows], picked: Sequence[Picked], states: Array) -> None:
        # Of a state only the direction counts, so it fits into 16 bits whatever its size.
        largest = np.maximum(np.abs(states).max(axis=-1, keepdims=True), np.float32(1e-30))
        packed = (states / largest).astype(np.float16)

        def remember(drafter: HeadDrafter) -> None:
            drafter.remember(work, picked, packed.astype(np.float32) * largest)

        self._keep(packed.nbytes + largest.nbytes, remember)

    def adopt(self, source: int, target: int, length: int, *, is_moved: bool = False) -> None:
        self._keep(0, lambda drafter: drafter.adopt(source, target, length, is_moved=is_moved))

    def close_session(self, session: int) -> None:
        self._keep(0, partial(HeadDrafter.close_session, session=session))

    def sessions(self) -> list[int]:
        """Which they are is known when they are told."""
        return []

    def tell(self, drafter: HeadDrafter) -> None:
        """Hand on all that was kept."""
        while self._kept:
            self._kept.popleft()[1](drafter)
        self._size_bytes = 0

    def close(self) -> None:
        self._kept.clear()

    def _keep(self, size_bytes: int, tell: Callable[[HeadDrafter], None]) -> None:
        if size_bytes or self._kept:
            self._kept.append((size_bytes, tell))
            self._size_bytes += size_bytes
        while self._kept and self._size_bytes > self._most_bytes:
            self._size_bytes -= self._kept.popleft()[0]
