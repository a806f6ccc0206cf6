"""Linear probe of hidden states: reads from a row alone which token stood at its place.

Linear discriminant analysis with one covariance for all tokens. The mean row of a token is drawn towards what a linear
map makes of its embedding, so that tokens which the training text does not have can be read as well. It knows nothing
of the rows before, of language or of the model's layers: attackers with more than that read more.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from shardcompute.backends.matrix import Array, Float32

_RIDGE = 0.05
"""Of the mean variance, added to all of them."""
_PRIOR_ROWS = 1.0
"""For how many rows of a token the guess from its embedding counts."""
_CHUNK = 256


@dataclass(frozen=True, slots=True)
class TokenProbe:
    """Scores of a row: `row @ weights.T + bias`, for every token of the vocabulary."""

    weights: Float32
    bias: Float32

    def best(self, rows: Float32, count: int) -> Array:
        """For each row the `count` tokens that fit best, the best one first."""
        return np.concatenate([_largest(scores, count) for scores in self._scores(rows)])

    def recall(self, rows: Float32, ids: Array, counts: tuple[int, ...] = (1, 10)) -> dict[int, float]:
        """How often the true token is among the best one, ten, and so on."""
        places: list[Array] = []
        for at, scores in enumerate(self._scores(rows)):
            true = ids[at * _CHUNK : at * _CHUNK + len(scores)]
            own = scores[np.arange(len(true)), true]
            places.append((scores > own[:, None]).sum(axis=1))
        place = np.concatenate(places)
        return {count: float((place < count).mean()) for count in counts}

    def _scores(self, rows: Float32) -> Iterator[Float32]:
        for start in range(0, len(rows), _CHUNK):
            yield unit_rows(rows[start : start + _CHUNK]) @ self.weights.T + self.bias


def fit_probe(rows: Float32, ids: Array, embedding: Float32) -> TokenProbe:
    """From rows whose tokens are known, and the table of all tokens, which is public."""
    x, table = unit_rows(rows), unit_rows(embedding)
    vocabulary, width = len(embedding), rows.shape[1]
    counts = np.bincount(ids, minlength=vocabulary).astype(np.float64)
    sums = np.zeros((vocabulary, width))
    np.add.at(sums, ids, x)
    seen = counts > 0
    means = sums[seen] / counts[seen, None]
    to_rows = _ridge(_with_one(table[seen]), means, counts[seen]).astype(np.float32)
    centre = _with_one(table) @ to_rows
    known = (sums[seen] + _PRIOR_ROWS * centre[seen]) / (counts[seen] + _PRIOR_ROWS)[:, None]
    centre[seen] = known
    within = (x.T @ x - (means * counts[seen, None]).T @ means) / len(x)
    within += _RIDGE * np.trace(within) / width * np.eye(width)
    weights = centre @ np.linalg.inv(within).astype(np.float32)
    return TokenProbe(weights, -0.5 * np.einsum("ij,ij->i", weights, centre))


def unit_rows(rows: Float32) -> Float32:
    """With the same length each: lengths are those of positions more than of tokens."""
    lengths = np.linalg.norm(rows, axis=1, keepdims=True)
    return np.asarray(rows / np.maximum(lengths, 1e-12) * np.sqrt(rows.shape[1]), np.float32)


def _with_one(rows: Float32) -> Float32:
    return np.concatenate([rows, np.ones((len(rows), 1), np.float32)], axis=1)


def _ridge(x: Array, y: Array, weights: Array) -> Array:
    weighted = x * weights[:, None]
    gram = weighted.T @ x
    gram += 1e-3 * np.trace(gram) / len(gram) * np.eye(len(gram))
    return np.asarray(np.linalg.solve(gram, weighted.T @ y))


def _largest(scores: Float32, count: int) -> Array:
    chosen = np.argpartition(-scores, count - 1, axis=1)[:, :count]
    order = np.argsort(-np.take_along_axis(scores, chosen, axis=1), axis=1, kind="stable")
    return np.asarray(np.take_along_axis(chosen, order, axis=1))
