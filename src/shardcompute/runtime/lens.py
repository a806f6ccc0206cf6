"""A lens: from a hidden state amid the layers to what the final norm will make of it, guessed by one linear map.

Hidden states behind early layers are not yet in the form that the output head reads. A lens, fitted by least squares
on states of the same rows before and after the remaining layers, brings most of the difference about.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from shardcompute.backends.matrix import Array, Float32
from shardcompute.core.errors import CorruptModelError

_EPS = 1e-6
_RIDGE = 1e-3


@dataclass(frozen=True, slots=True)
class Lens:
    """`weights` `[hidden + 1, hidden]`; the last row is the part that is the same for all states."""

    weights: Float32

    def apply(self, rows: Array) -> Float32:
        """States behind some layer in, guesses of final normed states out."""
        out: Float32 = _unit(rows) @ self.weights[:-1] + self.weights[-1]
        return out


class LensSums:
    """What a lens is fitted from, summed up row by row."""

    def __init__(self, hidden: int) -> None:
        self._squares = np.zeros((hidden + 1, hidden + 1))
        self._products = np.zeros((hidden + 1, hidden))
        self.rows = 0

    def add(self, rows: Array, final: Array) -> None:
        """States of the same rows behind a layer, and behind the final norm."""
        inputs = np.concatenate([_unit(rows), np.ones((len(rows), 1), dtype=np.float32)], axis=1)
        self._squares += inputs.T @ inputs
        self._products += inputs.T @ final
        self.rows += len(rows)

    def solve(self) -> Lens:
        size = len(self._squares)
        # A little of the mean square keeps directions that hardly occur from being blown up.
        ridge = _RIDGE * np.trace(self._squares) / size
        weights = np.linalg.solve(self._squares + ridge * np.eye(size), self._products)
        return Lens(weights.astype(np.float32))


def encode_lens(lens: Lens) -> bytes:
    return lens.weights.astype("<f2").tobytes()


def decode_lens(content: bytes, hidden: int) -> Lens:
    """Raises CorruptModelError for what cannot be a lens of this width."""
    is_whole = len(content) == 2 * hidden * (hidden + 1)
    values = np.frombuffer(content if is_whole else b"", dtype="<f2")
    if not (is_whole and np.isfinite(values).all()):
        raise CorruptModelError(
            f"{len(content)} bytes are no draft head for a width of {hidden}",
            hint="fit it again with `shardcompute draft-head fit`",
        )
    return Lens(values.reshape(hidden + 1, hidden).astype(np.float32))


def _unit(rows: Array) -> Float32:
    """Rows with a mean square of 1, as norms make them."""
    rows = np.asarray(rows, dtype=np.float32)
    unit: Float32 = rows / np.sqrt(np.mean(rows * rows, axis=1, keepdims=True) + _EPS)
    return unit
