"""Time as seen by somebody who may be held up: a machine that slept must not believe that all others fell silent."""

from __future__ import annotations

from collections.abc import Callable


class SteadyClock:
    """A clock on which the time between two turns of its owner is never more than `most_s`."""

    def __init__(self, clock: Callable[[], float], most_s: float = 0.5) -> None:
        self._clock = clock
        self._most_s = most_s
        self._lost_s = 0.0
        self._turned_s = clock()

    def __call__(self) -> float:
        return self._clock() - self._lost_s

    def turn(self) -> float:
        """The owner is at it again; returns how much time was taken off the clock."""
        now_s = self._clock()
        lost_s = max(0.0, now_s - self._turned_s - self._most_s)
        self._lost_s += lost_s
        self._turned_s = now_s
        return lost_s
