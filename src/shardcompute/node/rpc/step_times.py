"""Step deadlines: how long a step may take before it is looked for, from how long steps have taken. Pure; no clock.

A deadline that passes is a reason to ask, never to act: whoever owes the result is asked where it is, and only one who
is stuck, by its own measure, is replaced. So deadlines may be short, and limits of what counts as stuck are long.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from shardcompute.decoding.routing.estimates import LineFit

_QUEUE_FADE = 0.9
_LOOK_AGAIN_S = 10.0
_UNTRIED = 16
"""More than so many times the rows of any step so far is as good as never tried."""


@dataclass(frozen=True, slots=True)
class Patience:
    """Waits for `factor` times what is expected, and for `floor_s` at least; for `cold_s` where a step of this size
    was never tried: first steps compile, and read weights from disk."""

    floor_s: float
    factor: float
    cold_s: float


ROUND_PATIENCE = Patience(floor_s=2.0, factor=8.0, cold_s=10.0)
"""Of a driver, for a frame's way round the chain."""
STAGE_PATIENCE = Patience(floor_s=10.0, factor=30.0, cold_s=180.0)
"""Of a stage, for a step of its own: who takes longer is stuck. A machine that pages, or shares its cores with others,
may be slower by far than it was."""


@dataclass(slots=True)
class StepTimes:
    """What steps took, fading with each of them."""

    patience: Patience
    _fit: LineFit = field(default_factory=lambda: LineFit(row_share=1.0))
    _queue_s: float = 0.0
    _most_rows: int = 0

    def observe(self, rows: int, seconds: float, queue_s: float = 0.0) -> None:
        """A step of so many rows took `seconds`, besides which it waited for others."""
        if rows < 1 or not seconds >= 0.0:  # also not a number
            return
        self._fit.observe(rows, seconds)
        self._queue_s = max(queue_s, self._queue_s * _QUEUE_FADE)
        self._most_rows = max(self._most_rows, rows)

    def allowed_s(self, rows: int, rows_ahead: int = 0) -> float:
        """How long a step of so many rows may take, with so many before it on the way."""
        if rows > self._most_rows * _UNTRIED:
            return max(self.patience.cold_s, self._estimate_s(rows + rows_ahead))
        return max(self.patience.floor_s, self._estimate_s(rows + rows_ahead))

    def _estimate_s(self, rows: int) -> float:
        return self.patience.factor * (self._fit.at(rows) + self._queue_s)


@dataclass(frozen=True, slots=True)
class OverdueStep:
    sequence: int
    waited_s: float
    allowed_s: float


@dataclass(slots=True)
class _Awaited:
    rows: int
    sent_s: float
    allowed_s: float
    look_s: float
    """When it is to be looked for next."""


class StepDeadlines:
    """Which of a driver's steps are under way, and which have been for too long."""

    def __init__(self, patience: Patience = ROUND_PATIENCE) -> None:
        self._times = StepTimes(patience)
        self._awaited: dict[int, _Awaited] = {}

    def sent(self, sequence: int, rows: int, now_s: float) -> None:
        ahead = sum(each.rows for each in self._awaited.values())
        allowed_s = self._times.allowed_s(rows, ahead)
        self._awaited[sequence] = _Awaited(rows, now_s, allowed_s, now_s + allowed_s)

    def landed(self, sequence: int, seconds: float, queue_s: float) -> None:
        """A step's results are here, after `seconds` of which it waited for others for a part."""
        awaited = self._awaited.pop(sequence, None)
        if awaited is not None:
            self._times.observe(awaited.rows, max(0.0, seconds - queue_s), queue_s)

    def drop(self, sequence: int) -> None:
        """Nothing more is awaited of this step."""
        self._awaited.pop(sequence, None)

    def clear(self) -> None:
        """Nothing is under way any more."""
        self._awaited.clear()

    def next_look_s(self, now_s: float) -> float | None:
        """In how many seconds some step is overdue, unless its results come; None: nothing is under way."""
        looks = [each.look_s for each in self._awaited.values()]
        return max(0.0, min(looks) - now_s) if looks else None

    def overdue(self, now_s: float) -> list[OverdueStep]:
        """Steps that are to be looked for now; each again when it has waited for twice as long."""
        found = []
        for sequence, awaited in self._awaited.items():
            if awaited.look_s <= now_s:
                waited_s = now_s - awaited.sent_s
                awaited.look_s = now_s + min(waited_s, _LOOK_AGAIN_S)
                found.append(OverdueStep(sequence, waited_s, awaited.allowed_s))
        return found
