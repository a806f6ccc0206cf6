"""Gaussian noise on rows, with what it is worth as differential privacy.

A row is clipped to a norm C and gets noise of standard deviation σ in every entry. Any row of that norm could stand in
its place, 2C away at most, so that one row is (ε, δ)-private by the Gaussian mechanism with sensitivity 2C; ε is the
least for which that holds (Balle and Wang 2018). Rows of a text add up: n of them
are one with √n times the sensitivity.
"""

from __future__ import annotations

import math

import numpy as np

from shardcompute.backends.matrix import Float32

_ROUNDS = 200


def clip_rows(rows: Float32, norm: float) -> Float32:
    lengths = np.linalg.norm(rows, axis=1, keepdims=True)
    return np.asarray(rows * np.minimum(1.0, norm / np.maximum(lengths, 1e-12)), np.float32)


def add_noise(rows: Float32, norm: float, level: float, rng: np.random.Generator) -> Float32:
    """Clipped, with noise whose own norm is about `level` times C."""
    clipped = clip_rows(rows, norm)
    if level == 0:
        return clipped
    sigma = noise_deviation(rows.shape[1], norm, level)
    return np.asarray(clipped + sigma * rng.standard_normal(rows.shape), np.float32)


def noise_deviation(width: int, norm: float, level: float) -> float:
    return level * norm / math.sqrt(width)


def gaussian_epsilon(sensitivity: float, sigma: float, delta: float) -> float:
    """The least ε for which noise of this deviation is (ε, δ)-private; infinity without noise."""
    if sigma <= 0:
        return math.inf
    ratio = sensitivity / sigma
    low, high = 0.0, 1.0
    while _log_delta(ratio, high) > math.log(delta):
        high *= 2
    for _ in range(_ROUNDS):
        middle = (low + high) / 2
        if _log_delta(ratio, middle) > math.log(delta):
            low = middle
        else:
            high = middle
    return high


def _log_delta(ratio: float, epsilon: float) -> float:
    """The logarithm of Φ(r/2 − ε/r) − exp(ε) Φ(−r/2 − ε/r)."""
    first = _log_normal_cdf(ratio / 2 - epsilon / ratio)
    second = epsilon + _log_normal_cdf(-ratio / 2 - epsilon / ratio)
    if second >= first:
        return -math.inf
    return first + math.log1p(-math.exp(second - first))


def _log_normal_cdf(x: float) -> float:
    if x > -30:
        return math.log(0.5 * math.erfc(-x / math.sqrt(2)))
    # The first terms of the series for the tail, where the function itself is too small for a float.
    return -x * x / 2 - math.log(-x * math.sqrt(2 * math.pi)) + math.log1p(-1 / x**2 + 3 / x**4)
