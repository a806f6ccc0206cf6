"""Calibration: how far apart honest machines may be found, from how far apart they were.

A threshold has to stand for windows that nobody measured: it is the larger of what a log-normal with the mean and
spread of the measured windows exceeds at the wanted rate, and the largest measured one with a margin.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

MARGIN = 1.15
_LEAST_WINDOWS = 20
_TINY = 1e-12


@dataclass(frozen=True, slots=True)
class Threshold:
    """Windows beyond `limit` are held against a machine. `windows` so many honest ones it was calibrated from, of which
    the furthest had `largest`; `false_alarm_rate` is that of the distribution which was fitted to them."""

    limit: float
    windows: int
    largest: float
    false_alarm_rate: float

    def is_beyond(self, distance: float) -> bool:
        return not distance <= self.limit


def calibrate(
    honest: Sequence[float], false_alarm_rate: float, *, floor: float = _TINY, margin: float = MARGIN
) -> Threshold:
    """Distances below `floor` count as that much: where many are nothing at all, their logarithms say nothing. A
    larger `margin` is for distances whose tails are heavier than the fitted ones.
    ValueError for windows so few that they say nothing of rare ones."""
    if len(honest) < _LEAST_WINDOWS:
        raise ValueError(f"{len(honest)} honest windows are too few to calibrate from")
    if not 0 < false_alarm_rate < 0.5:
        raise ValueError(f"{false_alarm_rate} is no rate of false alarms")
    fitted = _fit([math.log(max(each, floor)) for each in honest])
    largest = max(honest)
    limit = max(math.exp(fitted.inv_cdf(1 - false_alarm_rate)), largest * margin)
    return Threshold(limit, len(honest), largest, false_alarm_rate)


def tail_probability(honest: Sequence[float], limit: float) -> float:
    """How often a window would lie beyond `limit`, by the log-normal that fits these."""
    fitted = _fit([math.log(max(each, _TINY)) for each in honest])
    return 1 - fitted.cdf(math.log(max(limit, _TINY)))


def _fit(logs: Sequence[float]) -> NormalDist:
    mean = sum(logs) / len(logs)
    spread = math.sqrt(sum((each - mean) ** 2 for each in logs) / max(len(logs) - 1, 1))
    return NormalDist(mean, max(spread, 1e-6))
