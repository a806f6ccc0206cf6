"""Agenda of a simulation: what is due when, and a clock that jumps from one to the next."""

from __future__ import annotations

import heapq
from collections.abc import Callable

Task = Callable[[], None]


class Agenda:
    """Tasks of one moment are done in the order in which they were put down."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.done = 0
        self._due: list[tuple[float, int, Task]] = []
        self._order = 0

    def at(self, due_s: float, task: Task) -> None:
        self._order += 1
        heapq.heappush(self._due, (max(due_s, self.now_s), self._order, task))

    def after(self, delay_s: float, task: Task) -> None:
        self.at(self.now_s + delay_s, task)

    def run(self, until_s: float) -> None:
        """Do all that is due until then."""
        while self._due and self._due[0][0] <= until_s:
            self.now_s, _, task = heapq.heappop(self._due)
            self.done += 1
            task()
        self.now_s = until_s
