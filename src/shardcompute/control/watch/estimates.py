"""Decayed estimates of what is measured again and again: what it is of late, and how far a single value is off. Pure.

Older values count less with the time that has passed, not with how many came since. The spread is taken from one value
to the next, so that a change of the level itself hardly widens it: what is noise and what is drift can be told apart.
"""

from __future__ import annotations

import statistics
from math import exp, inf, log, sqrt

from msgspec import Struct

_HALF_LIFE_S = 30.0
_LEAST_STEP, _MOST_STEP = 0.05, 0.5
_AGREEING = 3
"""So many values in a row have to say the same."""
_SPREADS = 2.0
"""By so many spreads each of them has to be off."""


class DecayedEstimate(Struct, frozen=True):
    """Of a positive quantity, such as seconds."""

    mean: float
    """Geometric: a machine is slower or faster by a factor."""
    spread: float = 0.0
    """The standard deviation of single values, as a part of the mean."""
    newest: tuple[float, ...] = ()
    at_s: float = 0.0

    @property
    def is_settled(self) -> bool:
        return len(self.newest) == _AGREEING

    @property
    def level(self) -> float:
        """The middle one of the newest."""
        return statistics.median_low(self.newest)

    def shift_from(self, believed: float, least: float) -> float | None:
        """What it is now, where the newest values agree that this is more than `least`, as a part, and more than noise
        away from what was believed; else None."""
        if not self.is_settled or believed <= 0:
            return None
        limit = max(log(1 + least), _SPREADS * self.spread)
        off = [log(value / believed) for value in self.newest]
        return self.level if min(off) > limit or max(off) < -limit else None


def observe(known: DecayedEstimate | None, value: float, now_s: float) -> DecayedEstimate | None:
    """The estimate with one value more; what cannot be changes nothing."""
    if not 0 < value < inf:
        return known
    if known is None:
        return DecayedEstimate(value, 0.0, (value,), now_s)
    step = 1 - 0.5 ** (max(0.0, now_s - known.at_s) / _HALF_LIFE_S)
    step = min(max(step, _LEAST_STEP), _MOST_STEP)
    jump = log(value / known.newest[-1])
    # Two values that are each off by a spread differ by sqrt(2) of it.
    variance = known.spread**2 + min(step, 0.2) * (jump * jump / 2 - known.spread**2)
    mean = exp(log(known.mean) + step * log(value / known.mean))
    return DecayedEstimate(mean, sqrt(max(0.0, variance)), (*known.newest, value)[-_AGREEING:], now_s)
