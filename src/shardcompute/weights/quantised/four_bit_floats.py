"""Weights in four-bit floats (E2M1) with scales for short groups: MXFP4 and NVFP4.

Twice an E2M1 number is a whole number up to 12, so 8-bit codes hold them exactly, in blocks of the file's own groups:
32 weights with a power of two (MXFP4), or 16 with an eight-bit float and one factor for the whole matrix (NVFP4). A
byte holds two neighbours, the first in its low half.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shardcompute.backends.footprint import MatrixForm
from shardcompute.backends.matrix import BlockMatrix, Matrix
from shardcompute.core.errors import CorruptModelError
from shardcompute.weights.formats.tensor_file import Span, TensorEntry, TensorFile
from shardcompute.weights.quantised.affine import block_columns, pieces
from shardcompute.weights.quantised.numbers import FP4_HALVES, read_scales
from shardcompute.weights.quantised.scheme import Parts, QuantisedMatrix

_CODES: NDArray[np.uint8] = (FP4_HALVES.astype(np.int16) + 128).astype(np.uint8)
# Both codes of every byte at once.
_PAIRS = np.stack([_CODES[np.arange(256) & 15], _CODES[np.arange(256) >> 4]], axis=1)


@dataclass(frozen=True, slots=True)
class Float4Parts:
    """Where the parts of such a matrix lie: codes `[…, out, in / 2]` (or `[…, out, groups, size / 2]`), scales
    `[…, out, groups]`, and a factor for all, which divides where `is_divisor` says so."""

    group_size: int
    codes: TensorEntry
    scales: TensorEntry
    factor: TensorEntry | None = None
    is_divisor: bool = False


def fold_float4(parts: Parts, label: str, where: Float4Parts) -> QuantisedMatrix:
    codes, scales = where.codes, where.scales
    if codes.dtype not in ("U8", "I8", "F4") or len(scales.shape) not in (2, 3) or 0 in scales.shape:
        raise parts.corrupt(f"has {codes.dtype} codes {list(codes.shape)}, scales {list(scales.shape)}")
    shape = (*scales.shape[:-1], scales.shape[-1] * where.group_size)
    per_byte = 1 if codes.dtype == "F4" else 2
    flat = (*shape[:-1], shape[-1] // per_byte)
    grouped = (*scales.shape, where.group_size // per_byte)
    if codes.shape not in (flat, grouped):
        raise parts.corrupt(
            f"has codes {list(codes.shape)} and scales {list(scales.shape)}, which do not make groups of "
            f"{where.group_size}"
        )
    if where.factor is not None and where.factor.shape not in ((), (1,)):
        raise parts.corrupt(f"has a factor of the shape {list(where.factor.shape)} for all of it")
    return QuantisedMatrix(
        label,
        shape,
        MatrixForm(8, where.group_size),
        lambda file, rows, columns: _read(parts, file, where, rows, columns),
    )


def _read(parts: Parts, file: TensorFile, where: Float4Parts, rows: Span, columns: Span) -> Matrix:
    size, blocks = where.group_size, where.scales.shape[-1]
    kept = block_columns(columns, size, parts.name)
    shape = (rows[1] - rows[0], kept.stop - kept.start)
    codes, scales = np.empty((*shape, size), np.uint8), np.empty(shape, np.float32)
    factor = np.ones(1, np.float32)
    if where.factor is not None:
        factor = read_scales(file, where.factor).reshape(1)
    row_bytes = blocks * size // 2
    for start, stop in pieces(rows, blocks * size):
        target = slice(start - rows[0], stop - rows[0])
        raw = file.read_bytes(where.codes.name, start * row_bytes, (stop - start) * row_bytes)
        pairs = np.frombuffer(raw, np.uint8).reshape(stop - start, blocks, -1)[:, kept]
        codes[target] = _PAIRS[pairs].reshape(*pairs.shape[:2], size)
        scales[target] = read_scales(file, where.scales, (start, stop), is_power=True)[:, kept]
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        scaled = np.divide(scales, factor) if where.is_divisor else np.multiply(scales, factor)
        scales = np.multiply(scaled, np.float32(0.5), dtype=np.float32)
    if not np.isfinite(scales).all():
        raise CorruptModelError(
            f"{parts.name!r} in {file.name} has scales that are infinite or not numbers",
            hint="fetch the file again; it is damaged",
        )
    return BlockMatrix(8, size, codes, scales)
