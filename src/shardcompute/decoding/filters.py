"""Which tokens may be drawn at all: top-k, top-p and min-p over a shrinking set of candidates.

A filter leaves at least the best token and, among equal tokens at its edge, those with the lowest ids. Each
looks only at the candidates before it: top-p measures mass among what top-k has left.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from shardcompute.core.generation import Sampling
from shardcompute.decoding.noise import NOISE_RANGE
from shardcompute.decoding.ranking import largest

COLDEST = 1e-6
"""The lowest temperature: as good as greedy."""
_NEAR = 8.0
_BINS_PER_NAT = 32


@dataclass(frozen=True, slots=True)
class Candidates:
    """Ascending token ids with their logits, less the best one and over temperature: the best scores 0."""

    ids: npt.NDArray[np.int64]
    scores: npt.NDArray[np.float32]

    def keep(self, selection: npt.NDArray[Any]) -> Candidates:
        """Those selected by a mask or by ascending indices."""
        return Candidates(self.ids[selection], self.scores[selection])


Filter = Callable[[Candidates], Candidates]


def build_filters(sampling: Sampling) -> tuple[Filter, ...]:
    """The filters after top-k that this sampling asks for, in the order in which they apply."""
    filters: list[Filter] = []
    if sampling.top_p < 1.0:
        filters.append(lambda candidates: keep_top_p(candidates, sampling.top_p))
    if sampling.min_p > 0.0:
        filters.append(lambda candidates: keep_min_p(candidates, sampling.min_p))
    return tuple(filters)


def candidates_of(
    logits: npt.NDArray[np.float32], best: float, temperature: float, top_k: int = 0
) -> Candidates:
    """The `top_k` best tokens (0: all), less those too far below the best for any noise to make them win.

    Top-k comes first since it needs no scores: a small k spares all later steps the rest of the vocabulary.
    Temperatures so low that scores would overflow are raised to one that is as good as greedy. A best logit
    of +inf leaves only the tokens that share it, equally likely.
    """
    temperature = max(temperature, COLDEST)
    floor = np.float32(best - NOISE_RANGE * temperature)
    if best < np.inf:
        # One step lower, so that rounding drops no token that could win; finite, as -inf forbids a token.
        with np.errstate(over="ignore"):
            floor = max(np.nextafter(floor, np.float32(-np.inf)), np.finfo(np.float32).min)
    if 0 < top_k < logits.size:
        ids = np.sort(largest(logits, top_k))
        ids = ids[logits[ids] >= floor]
    else:
        ids = np.flatnonzero(logits >= floor)
    if best == np.inf:
        return Candidates(ids, np.zeros(ids.size, dtype=np.float32))
    scores = logits[ids]
    scores -= np.float32(best)
    scores /= np.float32(temperature)
    return Candidates(ids, scores)


def keep_top_p(candidates: Candidates, p: float) -> Candidates:
    """The fewest best tokens whose probabilities reach `p` together, at least one.

    Sorting a vocabulary for this would cost more than all other steps. Mostly the tokens near the best hold
    enough mass; of those considered, only one bin of nearly equal scores, in which the sum reaches `p`, is
    sorted.
    """
    weights = np.exp(candidates.scores)
    target = p * weights.sum(dtype=np.float64)
    near = np.flatnonzero(candidates.scores >= -_NEAR)
    if weights[near].sum(dtype=np.float64) >= target:
        candidates, weights = candidates.keep(near), weights[near]
    bins = (candidates.scores * np.float32(-_BINS_PER_NAT)).astype(np.int64)
    mass_down_to = np.cumsum(np.bincount(bins, weights=weights))
    edge = int(np.searchsorted(mass_down_to, target))
    missing = target - (mass_down_to[edge - 1] if edge else 0.0)
    at_edge = np.flatnonzero(bins == edge)
    at_edge = at_edge[np.argsort(-candidates.scores[at_edge], kind="stable")]
    needed = int(np.searchsorted(np.cumsum(weights[at_edge], dtype=np.float64), missing)) + 1
    selected = bins < edge
    selected[at_edge[:needed]] = True
    return candidates.keep(selected)


def keep_min_p(candidates: Candidates, min_p: float) -> Candidates:
    """Tokens at least `min_p` times as likely as the best."""
    return candidates.keep(candidates.scores >= math.log(min_p))
