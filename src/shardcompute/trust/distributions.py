"""Distances of next-token distributions, and of picked tokens from what another machine would have picked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Logits = npt.NDArray[np.float32]
WINDOW = 32
"""Positions that are judged together: single ones tell honest kernels and cheats apart by nothing."""
FAR_GAP = 20.0
"""What a token counts for at most that the other machine has not among its best."""


def log_softmax(logits: Logits) -> npt.NDArray[np.float64]:
    wide = logits.astype(np.float64)
    wide -= wide.max(axis=-1, keepdims=True)
    wide -= np.log(np.exp(wide).sum(axis=-1, keepdims=True))
    return wide


def mean_kl(truth: Logits, found: Logits) -> float:
    """The mean over positions of the KL divergence of `found` from `truth`, in nats."""
    a, b = log_softmax(truth), log_softmax(found)
    return float(max(0.0, (np.exp(a) * (a - b)).sum(axis=-1).mean()))


def mean_tv(truth: Logits, found: Logits) -> float:
    """The mean over positions of half the sum of absolute differences of the probabilities."""
    a, b = np.exp(log_softmax(truth)), np.exp(log_softmax(found))
    return float((0.5 * np.abs(a - b).sum(axis=-1)).mean())


@dataclass(frozen=True, slots=True)
class ScoredPick:
    """A token that was picked, as another machine scores it, beside the best that it finds at that position. Scores
    are what the sampler compares: logits, or logits over the temperature with the noise of (seed, position, token)."""

    token: int
    score: float | None
    """None: not among those that were scored."""
    others: Mapping[int, float]

    @property
    def gap(self) -> float:
        """By how much the best token beats the one that was picked; 0 where it is the best."""
        best = max(self.others.values(), default=-np.inf)
        if self.score is None or not np.isfinite(self.score):
            return FAR_GAP
        return float(min(max(best - self.score, 0.0), FAR_GAP))


def mean_gap(picks: Sequence[ScoredPick]) -> float:
    """Over a window of positions."""
    return float(np.mean([each.gap for each in picks])) if picks else 0.0
