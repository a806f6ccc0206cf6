"""Live estimates of what speculation depends on: acceptance of drafts, times of a traversal, times of drafting.

Everything decays with each observation, so that old times count less; nothing reads a clock. Before there are
observations, priors answer.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from shardcompute.decoding.drafting import GRADES, HEAD_DRAFTER

_PRIOR_ACCEPTANCE: Mapping[str, tuple[float, ...]] = {
    "ngram": (0.2, 0.4, 0.6, 0.85),
    "model": (0.35, 0.5, 0.7, 0.85),
    HEAD_DRAFTER: (0.25, 0.45, 0.65, 0.85),
}
_OTHER_ACCEPTANCE = (0.4, 0.5, 0.6, 0.8)
_PRIOR_DRAFT_S: Mapping[str, float] = {"ngram": 2e-6, HEAD_DRAFTER: 2e-3}
_OTHER_DRAFT_S = 4e-3
_DRAFT_SAMPLES = 9
_CLEARLY_QUICKER = 0.5
_POSITIONS = (0, 1, 2, 3, 3, 4, 4, 4, 5)
"""Which bucket a position in a draft belongs to; what is beyond counts as the last."""
_BUCKETS = 6
_PRIOR_WEIGHT = 6.0
_BUCKET_WEIGHT = 16.0
_SESSION_WEIGHT = 12.0
_ACCEPTANCE_MEMORY = 600.0
_SESSION_MEMORY = 120.0
_TIME_FADE = 0.03
_FLOOR_FALL, _FLOOR_RISE = 0.5, 0.003
_LEAST, _MOST = 0.005, 0.995


def bucket_of(position: int) -> int:
    return _POSITIONS[min(position, len(_POSITIONS) - 1)]


def fade_of(memory: float) -> float:
    """The factor per observation with which about `memory` observations count."""
    return 1.0 - 1.0 / memory


@dataclass(slots=True)
class FadingTally:
    """Faded counts of tries and of those that went well."""

    tried: float = 0.0
    held: float = 0.0

    def add(self, held: float, memory: float) -> None:
        fade = fade_of(memory)
        self.tried = self.tried * fade + 1.0
        self.held = self.held * fade + held

    def share(self, prior: float, weight: float) -> float:
        return (self.held + prior * weight) / (self.tried + weight)


@dataclass(slots=True)
class _GradeTally:
    """One drafter's drafts of one grade: over all positions, and by position."""

    pooled: FadingTally = field(default_factory=FadingTally)
    buckets: tuple[FadingTally, ...] = field(
        default_factory=lambda: tuple(FadingTally() for _ in range(_BUCKETS))
    )


@dataclass(slots=True)
class _Leaning:
    """How a session's drafts fare against what was expected of them."""

    held: float = 0.0
    failed: float = 0.0
    expected_held: float = 0.0
    expected_failed: float = 0.0

    def add(self, held: bool, expected: float) -> None:
        fade = fade_of(_SESSION_MEMORY)
        self.held = self.held * fade + held
        self.failed = self.failed * fade + (not held)
        self.expected_held = self.expected_held * fade + expected
        self.expected_failed = self.expected_failed * fade + 1.0 - expected

    def odds_factor(self) -> float:
        weight = _SESSION_WEIGHT / 2
        better = (self.held + weight) / (self.expected_held + weight)
        worse = (self.failed + weight) / (self.expected_failed + weight)
        return better / worse


class Acceptance:
    """The chance that a drafted token holds, given that those before it did.

    Known for each drafter, grade and position over all sessions; a session then leans to better or worse than
    that, by a factor on the odds.
    """

    def __init__(self) -> None:
        self._global: dict[tuple[str, int], _GradeTally] = {}
        self._sessions: dict[int, dict[str, _Leaning]] = {}
        self._overall: dict[str, FadingTally] = {}

    def observe(self, session: int, drafter: str, grade: int, drafted: int, accepted: int) -> None:
        """Of `drafted` tokens the first `accepted` held; what came after the first failure says nothing."""
        tally = self._global.setdefault((drafter, grade), _GradeTally())
        leaning = self._sessions.setdefault(session, {}).setdefault(drafter, _Leaning())
        overall = self._overall.setdefault(drafter, FadingTally())
        for position in range(min(accepted + 1, drafted)):
            held = position < accepted
            leaning.add(held, self._expected(drafter, grade, position))
            tally.pooled.add(held, _ACCEPTANCE_MEMORY)
            tally.buckets[bucket_of(position)].add(held, _ACCEPTANCE_MEMORY)
        for position in range(drafted):
            overall.add(position < accepted, _ACCEPTANCE_MEMORY)

    def chances(self, session: int, drafter: str, grade: int, count: int) -> list[float]:
        """For each of the first `count` positions of a draft."""
        leaning = self._sessions.get(session, {}).get(drafter)
        factor = 1.0 if leaning is None else leaning.odds_factor()
        by_bucket = [_lean(self._expected_in(drafter, grade, bucket), factor) for bucket in range(_BUCKETS)]
        return [by_bucket[bucket_of(position)] for position in range(count)]

    def overall(self) -> dict[str, float]:
        """By drafter, the share of drafted tokens that were accepted."""
        return {drafter: tally.share(0.0, 0.0) for drafter, tally in self._overall.items() if tally.tried > 0}

    def forget(self, session: int) -> None:
        self._sessions.pop(session, None)

    def _expected(self, drafter: str, grade: int, position: int) -> float:
        return self._expected_in(drafter, grade, bucket_of(position))

    def _expected_in(self, drafter: str, grade: int, bucket: int) -> float:
        prior = _PRIOR_ACCEPTANCE.get(drafter, _OTHER_ACCEPTANCE)[min(max(grade, 0), GRADES - 1)]
        tally = self._global.get((drafter, grade))
        if tally is None:
            return prior
        return tally.buckets[bucket].share(tally.pooled.share(prior, _PRIOR_WEIGHT), _BUCKET_WEIGHT)


def _lean(chance: float, odds_factor: float) -> float:
    chance = min(max(chance, _LEAST), _MOST)
    odds = chance / (1.0 - chance) * odds_factor
    return min(max(odds / (1.0 + odds), _LEAST), _MOST)


@dataclass(slots=True)
class LineFit:
    """`seconds ≈ fixed_s + per_row_s · rows`, by least squares over faded observations.

    While all observations have about the same rows, the slope is what `row_share` (of the time of one row) says.
    """

    row_share: float
    _weight: float = 0.0
    _rows: float = 0.0
    _seconds: float = 0.0
    _spread: float = 0.0
    _covariance: float = 0.0

    @property
    def is_known(self) -> bool:
        return self._weight > 0.0

    def observe(self, rows: int, seconds: float) -> None:
        # Times of large frames vary more, and what matters is the time of small ones.
        weight = (8.0 / (8.0 + rows)) ** 2
        fade = 1.0 - _TIME_FADE * weight
        self._weight = self._weight * fade + weight
        step = weight / self._weight
        off_rows, off_seconds = rows - self._rows, seconds - self._seconds
        self._rows += step * off_rows
        self._seconds += step * off_seconds
        self._spread = self._spread * fade + weight * off_rows * (rows - self._rows)
        self._covariance = self._covariance * fade + weight * off_rows * (seconds - self._seconds)

    def line(self) -> tuple[float, float]:
        """(fixed_s, per_row_s), neither below 0."""
        if not self.is_known:
            return 0.0, 0.0
        assumed = self.row_share * self._seconds / (1.0 + self.row_share * (self._rows - 1.0))
        slope = max(0.0, (self._covariance + assumed) / (self._spread + 1.0))
        fixed = self._seconds - slope * self._rows
        return (fixed, slope) if fixed >= 0.0 else (0.0, self._seconds / max(self._rows, 1e-9))

    def at(self, rows: float) -> float:
        fixed, slope = self.line()
        return fixed + slope * rows


class WireFloor:
    """Time between stages without what frames spend in queues: about the least that was seen, for frames of similar
    size each. It follows falling times at once and rising ones slowly, as most of these are queues."""

    def __init__(self) -> None:
        self._floors: dict[int, tuple[float, float]] = {}

    @property
    def is_known(self) -> bool:
        return bool(self._floors)

    def observe(self, rows: int, seconds: float) -> None:
        mean_rows, floor_s = self._floors.get(rows.bit_length(), (float(rows), seconds))
        off_s = seconds - floor_s
        # However long a frame was held up, it raises the floor by a fraction of itself only.
        step_s = _FLOOR_FALL * off_s if off_s < 0.0 else _FLOOR_RISE * min(off_s, max(floor_s, 1e-4))
        self._floors[rows.bit_length()] = (mean_rows + 0.1 * (rows - mean_rows), floor_s + step_s)

    def line(self) -> tuple[float, float]:
        """(fixed_s, per_row_s): below every floor, and as steep as the smallest and the largest frames say."""
        if not self._floors:
            return 0.0, 0.0
        (few, few_s), (many, many_s) = self._floors[min(self._floors)], self._floors[max(self._floors)]
        slope = max(0.0, (many_s - few_s) / (many - few)) if many > 2.0 * few else 0.0
        slope = min(slope, few_s / max(few, 1.0))
        return max(0.0, min(floor_s - slope * rows for rows, floor_s in self._floors.values())), slope


class RingTimes:
    """How long frames take: on the wire, and in each stage."""

    def __init__(self) -> None:
        self._wire = WireFloor()
        self._stages: list[LineFit] = []

    def observe(self, rows: int, seconds: float, stage_compute_s: Sequence[float]) -> None:
        if rows < 1 or seconds <= 0.0:
            return
        if len(stage_compute_s) != len(self._stages):
            # Another shape of the chain: what was measured of the old one says little.
            self._wire = WireFloor()
            self._stages = [LineFit(row_share=0.1) for _ in stage_compute_s]
        for fit, stage_s in zip(self._stages, stage_compute_s, strict=True):
            fit.observe(rows, max(0.0, stage_s))
        self._wire.observe(rows, max(0.0, seconds - sum(stage_compute_s)))

    @property
    def is_known(self) -> bool:
        return self._wire.is_known

    def ring(self) -> tuple[float, float]:
        """(fixed_s, per_row_s) of a traversal of an idle ring."""
        lines = [self._wire.line(), *(fit.line() for fit in self._stages)]
        return sum(fixed for fixed, _ in lines), sum(slope for _, slope in lines)

    def bottleneck(self, rows: float = 1.0) -> tuple[float, float]:
        """(fixed_s, per_row_s) of the stage that is slowest with so many rows; zeros where stages tell no times."""
        lines = [fit.line() for fit in self._stages]
        return max(lines, key=lambda line: line[0] + line[1] * rows, default=(0.0, 0.0))


class DraftTimes:
    """Seconds per drafted token, by drafter: the median of the newest ones, as a single draft may have waited for
    anything."""

    def __init__(self) -> None:
        self._newest: dict[str, deque[float]] = {}

    def observe(self, drafter: str, seconds: float, count: int) -> None:
        if count < 1 or seconds < 0.0:
            return
        newest = self._newest.get(drafter)
        if newest is None:
            newest = self._newest[drafter] = deque([self.prior_s(drafter)], _DRAFT_SAMPLES)
        now = seconds / count
        if now < _CLEARLY_QUICKER * min(newest):
            # Nothing is quicker than it can be by accident: what was in the way is over.
            newest.clear()
        newest.append(now)

    def per_token_s(self, drafter: str) -> float:
        newest = self._newest.get(drafter)
        return self.prior_s(drafter) if newest is None else statistics.median_low(newest)

    def prior_s(self, drafter: str) -> float:
        """What it takes where nothing is in its way, as far as anybody can know."""
        return _PRIOR_DRAFT_S.get(drafter, _OTHER_DRAFT_S)
