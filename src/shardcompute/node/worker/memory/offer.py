"""Memory offer of a worker: lowered where memory ran out, and raised again by what is measured since. Pure; no clock.

What is measured must have been there for a while: the least of several measurements in a row counts, so that memory
which others take and give back is not offered. Each shortage doubles that while, so that a device which says that it
has what it does not have is tried ever more rarely.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

_MOST_DOUBLINGS = 16


@dataclass(frozen=True, slots=True)
class RecoveryPolicy:
    """When a lowered offer may rise."""

    first_wait_s: float = 60.0
    """So long memory must have been free after a first shortage; twice as long after another one, and so on."""
    most_wait_s: float = 3600.0
    samples: int = 4
    """So often it is measured in that time."""
    least_rise: float = 1 / 16
    """Of the whole offer: what is regained by less than that is no news, unless it is all that was missing."""
    forgotten_after_s: float = 86_400.0
    """After so long without a shortage the next one counts as a first."""


class MemoryOffer:
    """What all that a worker holds may take. `full_bytes` is what it was given."""

    def __init__(self, full_bytes: int, policy: RecoveryPolicy) -> None:
        self._full_bytes = full_bytes
        self._policy = policy
        self._bytes = full_bytes
        self._shortages = 0
        self._short_at_s = 0.0
        self._measure_at_s = 0.0
        self._measured: deque[int] = deque(maxlen=policy.samples)

    @property
    def size_bytes(self) -> int:
        """What is offered now."""
        return self._bytes

    @property
    def is_full(self) -> bool:
        return self._bytes >= self._full_bytes

    def count_shortage(self, now_s: float) -> int:
        """Memory ran out: how often it did so of late, this time counted."""
        is_forgotten = now_s - self._short_at_s >= self._policy.forgotten_after_s
        self._shortages = 1 if is_forgotten else self._shortages + 1
        self._short_at_s = now_s
        self._await_samples(now_s)
        return self._shortages

    def lower(self, size_bytes: int) -> None:
        self._bytes = min(self._bytes, size_bytes)

    def measure_in_s(self, now_s: float) -> float | None:
        """How long until free memory is to be measured; None while all is offered."""
        return None if self.is_full else max(0.0, self._measure_at_s - now_s)

    def measured(self, possible_bytes: int | None, now_s: float) -> bool:
        """So much could be offered, by what is free now (None: nobody knows). True where more is offered for it."""
        self._measure_at_s = now_s + self._wait_s / self._policy.samples
        if possible_bytes is None:
            self._measured.clear()
            return False
        self._measured.append(possible_bytes)
        if len(self._measured) < self._policy.samples:
            return False
        raised = min(self._full_bytes, *self._measured)
        rise = raised - self._bytes
        if rise <= 0 or (raised < self._full_bytes and rise < self._policy.least_rise * self._full_bytes):
            return False
        self._bytes = raised
        self._await_samples(now_s)
        return True

    @property
    def _wait_s(self) -> float:
        doublings = min(max(self._shortages - 1, 0), _MOST_DOUBLINGS)
        return min(self._policy.most_wait_s, self._policy.first_wait_s * 2.0**doublings)

    def _await_samples(self, now_s: float) -> None:
        self._measured.clear()
        self._measure_at_s = now_s + self._wait_s / self._policy.samples
