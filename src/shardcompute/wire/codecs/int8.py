"""Whole numbers of 8 bits and scales of 16: a scale for every 64 columns, or one for a row without its outliers.

A few columns of a language model's activations are a hundred times larger than the rest. In blocks they spoil only
their neighbours; `int8-outliers` sends the eight largest values of each row on their own. Scales are rounded up to
bf16, by at most 2⁻⁷, so that the largest value still fits: half a step is at most 1/252 of it.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from shardcompute.core.errors import LinkError
from shardcompute.wire.codecs.rows import (
    LARGEST,
    Activations,
    PackedRows,
    bytes_of,
    quantise,
    read_scales,
    scales_of,
    widen,
)

_STEPS = 127
_BLOCK = 64
_OUTLIERS = 8
_GROUP = 16
_HALF = 2
_FP16_MAX = np.float32(65504.0)
Columns = npt.NDArray[np.intp]


class Int8Rows:
    """A row: the scales of its blocks, then its values. The last block may be shorter."""

    name = "int8"

    def row_bytes(self, width: int) -> int:
        return _HALF * _blocks(width) + width

    def pack(self, activations: Activations) -> PackedRows:
        rows, width = activations.shape
        blocks = _in_blocks(activations)
        scales = scales_of(np.abs(blocks).max(axis=-1), _STEPS)
        values = quantise(_without(blocks, scales), widen(scales)[:, :, None])
        packed = np.empty((rows, self.row_bytes(width)), np.uint8)
        start = _HALF * scales.shape[1]
        packed[:, :start] = bytes_of(scales)
        packed[:, start:] = values.reshape(rows, -1).view(np.uint8)[:, :width]
        return packed

    def unpack(self, packed: PackedRows, width: int) -> Activations:
        start = _HALF * _blocks(width)
        scales = read_scales(packed[:, :start].copy().view("<u2"))
        values = _in_blocks(packed[:, start:].view(np.int8).astype(np.float32))
        with np.errstate(over="ignore", invalid="ignore"):
            values *= scales[:, :, None]
        return values.reshape(len(packed), -1)[:, :width]


class Int8OutlierRows:
    """A row: its scale, the columns of its largest values, these values in fp16, then all the others."""

    name = "int8-outliers"

    def row_bytes(self, width: int) -> int:
        kept = min(_OUTLIERS, width)
        return _HALF + kept * (_column_type(width).itemsize + _HALF) + width

    def pack(self, activations: Activations) -> PackedRows:
        rest = np.array(activations, dtype=np.float32, order="C")
        width = rest.shape[1]
        columns = _largest(np.abs(rest), min(_OUTLIERS, width))
        outliers = np.take_along_axis(rest, columns, axis=1)
        np.put_along_axis(rest, columns, np.float32(0), axis=1)
        peaks = np.abs(rest).max(axis=1)
        # An outlier out of range spoils its row, as any other value would.
        peaks[~(np.abs(outliers).max(axis=1) <= LARGEST)] = np.nan
        scales = scales_of(peaks[:, None], _STEPS)
        outliers[np.isnan(widen(scales)[:, 0])] = np.nan
        halves = np.clip(outliers, -_FP16_MAX, _FP16_MAX).astype("<f2")
        values = quantise(_without(rest, scales[:, 0]), widen(scales))
        named = columns.astype(_column_type(width))
        parts = [bytes_of(scales), bytes_of(named), bytes_of(halves), values.view(np.uint8)]
        return np.concatenate(parts, axis=1)

    def unpack(self, packed: PackedRows, width: int) -> Activations:
        kept, column_type = min(_OUTLIERS, width), _column_type(width)
        named_stop = _HALF + kept * column_type.itemsize
        halves_stop = named_stop + kept * _HALF
        scales = read_scales(packed[:, :_HALF].copy().view("<u2"))
        columns = packed[:, _HALF:named_stop].copy().view(column_type)
        if (columns >= width).any():
            raise LinkError(f"activations of {width} columns came with a value for column {columns.max()}")
        values = packed[:, halves_stop:].view(np.int8).astype(np.float32)
        with np.errstate(over="ignore", invalid="ignore"):
            values *= scales
        outliers = packed[:, named_stop:halves_stop].copy().view("<f2").astype(np.float32)
        np.put_along_axis(values, columns.astype(np.intp), outliers, axis=1)
        return values


def _blocks(width: int) -> int:
    return -(-width // _BLOCK)


def _in_blocks(values: Activations) -> Activations:
    """`[rows, blocks, 64]`, filled up with zeros."""
    rows, width = values.shape
    full = _blocks(width) * _BLOCK
    if full != width:
        padded = np.zeros((rows, full), np.float32)
        padded[:, :width] = values
        values = padded
    return np.ascontiguousarray(values, dtype=np.float32).reshape(rows, -1, _BLOCK)


def _without(values: Activations, scales: npt.NDArray[np.uint16]) -> Activations:
    """Zeros instead of what has no scale: NaN and infinity have no whole number near them."""
    lost = np.isnan(widen(scales))
    if not lost.any():
        return values
    return np.where(lost[..., None], np.float32(0), values)


def _column_type(width: int) -> np.dtype[np.unsignedinteger]:
    return np.dtype("<u2" if width <= 1 << 16 else "<u4")


def _largest(magnitudes: Activations, count: int) -> Columns:
    """The columns of the `count` largest values of each row, in ascending order."""
    rows, width = magnitudes.shape
    groups = width // _GROUP
    if width % _GROUP or groups <= count:
        return np.sort(_top(magnitudes, count), axis=1)
    # All of them lie in the `count` groups with the largest maxima, so that few values need to be put in order. The
    # members of a group are `groups` columns apart, which makes their maximum a plain loop over rows.
    grouped = magnitudes.reshape(rows, _GROUP, groups)
    chosen = _top(grouped.max(axis=1), count)
    candidates = np.take_along_axis(grouped, chosen[:, None, :], axis=2).reshape(rows, -1)
    found = _top(candidates, count)
    columns = found // count * groups + np.take_along_axis(chosen, found % count, axis=1)
    return np.sort(columns, axis=1)


def _top(values: Activations, count: int) -> Columns:
    first = values.shape[1] - count
    return np.argpartition(values, first, axis=1)[:, first:]
