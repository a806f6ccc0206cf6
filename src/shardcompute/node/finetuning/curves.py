"""Curves of runs that teach through a cluster, as its page shows them: told by whoever drives a run, kept for a while.

Bounded however many runs there are and however long they are: of a long one every other step is forgotten.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

MOST_RUNS = 8
MOST_POINTS = 512
_SILENT_S = 120.0
"""A run that has told nothing for so long is not running any more, or very slow."""


@dataclass(frozen=True, slots=True)
class CurveStep:
    """One step of a run. `held_out` is the loss on what is not learned from, where it was looked at."""

    step: int
    loss: float
    norm: float
    tokens_per_s: float
    held_out: float | None = None


@dataclass(frozen=True, slots=True)
class RunCurve:
    """A run as it is shown. `status`: running, silent or done."""

    id: str
    model: str
    steps: int
    workers: int
    status: str
    updated_s: float
    """Since it told something."""
    points: tuple[CurveStep, ...]


@dataclass(frozen=True, slots=True)
class RunReport:
    """What the driver of a run tells: steps since the last time, in order."""

    id: str
    model: str
    steps: int
    workers: int
    points: tuple[CurveStep, ...]
    is_over: bool = False


class CurveBoard:
    """The curves of the last few runs. Methods may be called from any thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._runs: dict[str, tuple[RunReport, float]] = {}
        """By id, the one that told something last at the end, with when that was."""

    def tell(self, report: RunReport) -> None:
        """A run that begins again from a checkpoint tells some steps twice: what is told last counts."""
        with self._lock:
            former = self._runs.pop(report.id, None)
            known: Sequence[CurveStep] = () if former is None else former[0].points
            if report.points:
                known = [point for point in known if point.step < report.points[0].step]
            points = _thin((*known, *report.points))
            self._runs[report.id] = replace(report, points=points), self._clock()
            while len(self._runs) > MOST_RUNS:
                self._runs.pop(next(iter(self._runs)))

    def curves(self) -> list[RunCurve]:
        """The newest first."""
        now_s = self._clock()
        with self._lock:
            runs = list(self._runs.values())
        return [_curve(report, now_s - told_s) for report, told_s in reversed(runs)]


def _curve(report: RunReport, ago_s: float) -> RunCurve:
    status = "done" if report.is_over else "silent" if ago_s > _SILENT_S else "running"
    return RunCurve(report.id, report.model, report.steps, report.workers, status, ago_s, report.points)


def _thin(points: Sequence[CurveStep]) -> tuple[CurveStep, ...]:
    """Every other one but the last, as often as it takes."""
    while len(points) > MOST_POINTS:
        points = [*points[:-1:2], points[-1]]
    return tuple(points)
