"""Floating point of 8 bits (e4m3: sign, 4 bits of exponent, 3 of mantissa) with a float32 scale for each row.

Rounded by way of fp16, for which processors have an instruction, and a table from there: to the nearest of the 8-bit
numbers, except that a value within 2⁻¹¹ of the middle between two of them may become either.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import numpy.typing as npt

from shardcompute.core.errors import LinkError
from shardcompute.wire.codecs.rows import LARGEST, Activations, PackedRows, bytes_of

_PEAK = np.float32(448.0)
_SMALLEST_SCALE = np.finfo(np.float32).tiny
_MAGNITUDE = np.uint8(0x7F)
_NAN = 0x7F
_SCALE_BYTES = 4
_FP16_INFINITE = 0x7C00


class Fp8Rows:
    """A row: its scale, then its values."""

    name = "fp8"

    def row_bytes(self, width: int) -> int:
        return _SCALE_BYTES + width

    def pack(self, activations: Activations) -> PackedRows:
        exact = np.ascontiguousarray(activations, dtype=np.float32)
        peaks = np.abs(exact).max(axis=1, keepdims=True)
        is_lost = ~(peaks <= LARGEST)
        if is_lost.any():
            exact = np.where(is_lost, np.float32(0), exact)
            peaks = np.where(is_lost, np.float32(0), peaks)
        scales = np.maximum(peaks / _PEAK, _SMALLEST_SCALE).astype("<f4")
        halves = (exact / scales).astype(np.float16)
        values = _codes_of_halves().take(halves.view(np.uint16))
        scales[is_lost] = np.nan
        return np.concatenate([bytes_of(scales), values], axis=1)

    def unpack(self, packed: PackedRows, width: int) -> Activations:
        scales = packed[:, :_SCALE_BYTES].copy().view("<f4")
        codes = packed[:, _SCALE_BYTES:]
        if not (np.isnan(scales) | ((scales >= 0) & (scales <= LARGEST))).all():
            raise LinkError("activations came with a scale that is negative or infinite")
        if ((codes & _MAGNITUDE) == _NAN).any():
            raise LinkError("activations in fp8 came with values that are no numbers")
        values = _values_of_codes().take(codes)
        with np.errstate(over="ignore", invalid="ignore"):
            values *= scales
        return values


@cache
def _values_of_codes() -> Activations:
    codes = np.arange(256)
    exponents, mantissas = (codes >> 3) & 15, codes & 7
    values = np.where(
        exponents == 0, mantissas * 2.0**-9, (8 + mantissas) * 2.0 ** (exponents.astype(np.float64) - 10)
    )
    values[codes & _NAN == _NAN] = np.nan
    return np.where(codes < 128, values, -values).astype(np.float32)


@cache
def _codes_of_halves() -> npt.NDArray[np.uint8]:
    """For each fp16 number, by its bits, the nearest code; of two as near the even one."""
    numbers = _values_of_codes()[:_NAN].astype(np.float64)
    middles = (numbers[:-1] + numbers[1:]) / 2
    halves = np.arange(_FP16_INFINITE, dtype=np.uint16).view(np.float16).astype(np.float64)
    below, above = np.searchsorted(middles, halves, "left"), np.searchsorted(middles, halves, "right")
    codes = np.where(below % 2 == 0, below, above)
    table = np.zeros(1 << 16, np.uint8)
    table[:_FP16_INFINITE] = codes
    table[0x8000 : 0x8000 + _FP16_INFINITE] = codes | 0x80
    return table
