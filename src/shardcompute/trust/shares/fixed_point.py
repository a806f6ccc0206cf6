"""Fixed point: weights and activations as integers modulo 2^64, back again, and how far that is off.

Each output of a linear map has a scale of its own, known to everybody who has the weights. Each row of activations has
one too, which stays with whoever encoded it. Products are below 2^62 in magnitude, so that nothing wraps.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Float32 = npt.NDArray[np.float32]
Float64 = npt.NDArray[np.float64]
Ring = npt.NDArray[np.uint64]

WEIGHT_BITS = 22
"""Weights are at most 2^22 in magnitude: 16 bits of a share times a weight, summed over 2^14 columns, is a whole number
that float64 holds exactly (see `ring.multiply`)."""
ROW_BITS = 28
"""Activations are at most 2^28, which is finer than float32 for the largest of a row."""
_PRODUCT_BITS = 62
_FLOAT32_ROUNDING = 2.0**-23
_FLOAT32_LEAST = 2.0**-149


@dataclass(frozen=True, slots=True)
class RingMatrix:
    """A linear map `[outputs, inputs]` in integers: weight = integer · 2^-exponent, by output."""

    integers: Float64
    """Whole numbers, in the type that multiplies quickest."""
    exponents: npt.NDArray[np.int32]

    @property
    def outputs(self) -> int:
        return int(self.integers.shape[0])

    @property
    def inputs(self) -> int:
        return int(self.integers.shape[1])

    @property
    def row_bits(self) -> int:
        """How large activations may be, in bits, so that no product wraps."""
        largest = float(np.abs(self.integers).sum(axis=1).max(initial=1.0))
        return min(ROW_BITS, _PRODUCT_BITS - int(np.ceil(np.log2(max(largest, 1.0)))))

    def digest(self) -> bytes:
        """Equal where two machines compute with the same integers."""
        digest = hashlib.sha256(f"{self.outputs} {self.inputs} ".encode())
        digest.update(self.exponents.astype("<i4").tobytes())
        digest.update(self.integers.astype("<i4").tobytes())
        return digest.digest()


@dataclass(frozen=True, slots=True)
class RowShape:
    """What encoding and decoding rows for a map takes, without the map: sums of its outputs' weights among it."""

    inputs: int
    row_bits: int
    exponents: npt.NDArray[np.int32]
    weight_sums: Float64
    """The magnitudes of each output's weights, summed: what an error of an activation can grow to."""


@dataclass(frozen=True, slots=True)
class EncodedRows:
    """Rows in integers: activation = integer · 2^-exponent, by row."""

    integers: Ring
    exponents: npt.NDArray[np.int32]


def encode_matrix(weights: Float32) -> RingMatrix:
    """Each weight rounded to the nearest integer of its output's scale. ValueError where one is no finite number."""
    largest = np.abs(weights).max(axis=1, initial=0.0)
    exponents = _exponents(largest, WEIGHT_BITS)
    return RingMatrix(np.rint(np.ldexp(weights.astype(np.float64), exponents[:, None])), exponents)


def row_shape(matrix: RingMatrix) -> RowShape:
    sums = np.ldexp(np.abs(matrix.integers).sum(axis=1), -matrix.exponents)
    return RowShape(matrix.inputs, matrix.row_bits, matrix.exponents, sums)


def encode_rows(rows: Float32, shape: RowShape) -> EncodedRows:
    """Activations `[rows, inputs]` as integers. ValueError where one is no finite number, or their width is another."""
    if rows.ndim != 2 or rows.shape[1] != shape.inputs:
        raise ValueError(f"rows of {rows.shape[-1]} activations are none of a map with {shape.inputs} inputs")
    exponents = _exponents(np.abs(rows).max(axis=1, initial=0.0), shape.row_bits)
    integers = np.rint(np.ldexp(rows.astype(np.float64), exponents[:, None])).astype(np.int64)
    return EncodedRows(integers.view(np.uint64), exponents)


def decode_products(products: Ring, rows: EncodedRows, shape: RowShape) -> Float32:
    """Products `[rows, outputs]` of encoded rows with a map as numbers."""
    scale = -(rows.exponents[:, None] + shape.exponents[None, :])
    with np.errstate(over="ignore"):
        # What is too large for float32 is infinite, as it would be without shares.
        decoded: Float32 = np.ldexp(products.view(np.int64).astype(np.float64), scale).astype(np.float32)
        return decoded


def error_bound(rows: Float32, encoded: EncodedRows, shape: RowShape) -> Float64:
    """How far each decoded product `[rows, outputs]` can be from that of the unrounded numbers, at most: an activation
    is off by half of its step, a weight by half of its own, and the result is rounded to float32."""
    row_step = np.ldexp(0.5, -encoded.exponents)[:, None]
    weight_step = np.ldexp(0.5, -shape.exponents)[None, :]
    magnitudes = np.abs(rows.astype(np.float64))
    sums, largest = magnitudes.sum(axis=1)[:, None], magnitudes.max(axis=1, initial=0.0)[:, None]
    weights = shape.weight_sums[None, :]
    off = row_step * weights + weight_step * (sums + shape.inputs * row_step)
    bound: Float64 = off + _FLOAT32_ROUNDING * (largest * weights + off) + _FLOAT32_LEAST
    return bound


def _exponents(largest: npt.NDArray[np.floating], bits: int) -> npt.NDArray[np.int32]:
    """The largest power of two by which each number stays within so many bits."""
    if not np.isfinite(largest).all():
        raise ValueError("there are numbers that are not finite")
    _, powers = np.frexp(largest.astype(np.float64))
    return np.where(largest > 0, bits - powers, 0).astype(np.int32)
