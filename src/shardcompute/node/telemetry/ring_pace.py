"""Ring pace: what a chain's steps take of late, as its driver sees them come back. Pure; no clock.

Stages tell how long they computed and kept a frame waiting; what is left of its time was spent on lines. Frames of more
rows are longer on the way, so that each is held against others of about its size: what is told is the time of the
smallest, by the pace of all. Whether it has drifted is the coordinator's to decide.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass

LEAST_WINDOW_S = 3.0
_LEAST_STEPS = 24
_MOST_STEPS = 256
_MOST_ROWS = 16
"""Frames with more rows have prompts in them."""


@dataclass(frozen=True, slots=True)
class RingWindow:
    """Of many steps, the middle one."""

    step_s: float
    """Once round, without waiting in queues."""
    wire_s: float
    """Of that, on lines."""


class RingPace:
    """Of one epoch of a chain."""

    def __init__(self) -> None:
        self._steps: list[tuple[int, float, float]] = []
        self._began_s = 0.0
        self._usual_s: dict[int, float] = {}
        """Wire time by size of a frame, as the first window with such frames had it."""

    def observe(self, rows: int, step_s: float, wire_s: float, now_s: float) -> RingWindow | None:
        """A frame of so many rows came back. Returns the window that ends with it, else None."""
        if not 0 < rows <= _MOST_ROWS or not step_s > 0:
            return None
        if not self._steps:
            self._began_s = now_s
        self._steps.append((rows.bit_length(), step_s, max(wire_s, 1e-6)))
        if len(self._steps) < _LEAST_STEPS or now_s - self._began_s < LEAST_WINDOW_S:
            del self._steps[: max(0, len(self._steps) - _MOST_STEPS)]
            return None
        window = self._summed_up()
        self._steps = []
        return window

    def _summed_up(self) -> RingWindow:
        sizes = {size for size, _, _ in self._steps}
        paces: list[float] = []
        for size in sizes:
            times = [wire_s for each, _, wire_s in self._steps if each == size]
            if size not in self._usual_s:
                known = self._usual_s
                # What is new is held against its own first window, at the pace that others have by now.
                now = [w / known[each] for each, _, w in self._steps if each in known]
                self._usual_s[size] = statistics.median(times) / (statistics.median(now) if now else 1.0)
            paces += [wire_s / self._usual_s[size] for wire_s in times]
        smallest = self._usual_s[min(self._usual_s)]
        steps = [step_s for _, step_s, _ in self._steps]
        return RingWindow(statistics.median(steps), statistics.median(paces) * smallest)
