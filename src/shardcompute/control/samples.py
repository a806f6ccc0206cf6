"""Samples of what is measured again and again: the newest few, and the middle one of them.

A single measurement says what a machine could do at one moment, beside whatever else it did then; what is believed of
it changes once several agree.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

_KEPT = 5
"""Three of them have to agree before a machine counts as faster or slower."""


def with_sample(samples: tuple[float, ...], value: float) -> tuple[float, ...]:
    return (*samples, value)[-_KEPT:]


def median(samples: Sequence[float]) -> float | None:
    """The smaller one of two in the middle: other work only ever makes a time longer."""
    return statistics.median_low(samples) if samples else None
