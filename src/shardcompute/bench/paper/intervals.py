"""Intervals of what was counted on a sample: how far the truth may be off, with 95 % confidence. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

_Z = 1.959963984540054
_RESAMPLES = 1000


@dataclass(frozen=True, slots=True)
class Interval:
    value: float
    low: float
    high: float

    def told(self, digits: int = 1, scale: float = 100.0) -> str:
        return (
            f"{scale * self.value:.{digits}f} [{scale * self.low:.{digits}f}, {scale * self.high:.{digits}f}]"
        )


def wilson(hits: int, count: int) -> Interval:
    """Of a share: Wilson's interval, which is sane for few and for rare ones."""
    if count == 0:
        return Interval(math.nan, 0.0, 1.0)
    share, z2 = hits / count, _Z**2
    middle = (share + z2 / (2 * count)) / (1 + z2 / count)
    half = _Z / (1 + z2 / count) * math.sqrt(share * (1 - share) / count + z2 / (4 * count**2))
    return Interval(share, max(0.0, middle - half), min(1.0, middle + half))


def paired_difference(ours: Sequence[bool], base: Sequence[bool]) -> Interval:
    """Of two shares of the same questions: what `ours` has more, by the questions on which the two differ."""
    differences = np.array(ours, dtype=float) - np.array(base, dtype=float)
    count, mean = len(differences), float(differences.mean())
    spread = float(differences.std(ddof=1)) if count > 1 else 0.0
    # Without any difference the normal interval has no width; the rule of three does for what was never seen.
    half = _Z * spread / math.sqrt(count) if spread else 3 / count
    return Interval(mean, max(-1.0, mean - half), min(1.0, mean + half))


def perplexity(losses: Sequence[float], tokens: Sequence[int], seed: int = 1) -> Interval:
    """Of texts, by drawing them again and again: tokens of one text are no sample of all texts."""
    loss, count = np.array(losses), np.array(tokens)
    drawn = np.random.default_rng(seed).integers(0, len(loss), (_RESAMPLES, len(loss)))
    found = np.exp(loss[drawn].sum(axis=1) / count[drawn].sum(axis=1))
    low, high = np.quantile(found, (0.025, 0.975))
    return Interval(math.exp(loss.sum() / count.sum()), float(low), float(high))
