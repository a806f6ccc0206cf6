"""Quantisation: weight matrices turned into the form that was asked for, on the way from the file to the kernels.

`native` leaves a matrix as the file has it; `float32` widens it; `int8` and `int4` make blocks of 32; `mixed`
is `int8` with the loudest input columns kept in 16 bit. Widths that a form's blocks do not divide take the
next more exact form that they do divide. Blocks that a file already brings are never rounded a second time
where the wanted form can hold them.

A slice is converted exactly like the same part of the whole: any rows, and for `int8` and `int4` any columns
that start and end on multiples of 32. The one exception is `mixed` without `activation_scale`, which chooses
its columns by the weights that it sees.

`activation_scale` is the root mean square of each input column's activations. Random tokens give it as well
as text does, and with it `int4` loses a fifth of what it loses without (docs/decisions/0004).
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from shardcompute.backends.matrix import BlockMatrix, DenseMatrix, Float32, Matrix, MixedMatrix, widen
from shardcompute.core.errors import CorruptModelError, UsageError
from shardcompute.weights.formats.quantise_int4 import BLOCK_SIZE, block_importance, fit_blocks

WEIGHT_FORMS: tuple[str, ...] = ("native", "float32", "int8", "int4", "mixed")

# Weights handled at once: working arrays stay near the processor's caches.
_PIECE_WEIGHTS = 1 << 17
INT8_BLOCK_SIZES = (BLOCK_SIZE, 16)
OUTLIERS_PER_COLUMN = 0.01
# A block whose largest weight is smaller is zero: its scale would have no exact reciprocal.
_LEAST_WEIGHT = np.float32(1e-30)


def convert(matrix: Matrix, form: str, activation_scale: Float32 | None = None) -> Matrix:
    """`matrix` in one of `WEIGHT_FORMS`. `UsageError` for another form or a scale of another width,
    `CorruptModelError` for weights that are infinite or not numbers."""
    _check(matrix, form, activation_scale)
    width = matrix.shape[1]
    if form == "native":
        return matrix
    if form == "float32":
        return _to_float32(matrix)
    if form == "int4" and width % BLOCK_SIZE == 0:
        return _to_int4(matrix, activation_scale)
    size = next((size for size in INT8_BLOCK_SIZES if width % size == 0), None)
    if size is None:
        return _to_float32(matrix)
    if form == "mixed":
        return _to_mixed(matrix, size, activation_scale)
    return _to_int8(matrix, size)


def _check(matrix: Matrix, form: str, activation_scale: Float32 | None) -> None:
    if form not in WEIGHT_FORMS:
        raise UsageError(
            f"{form!r} is not a form that weights can take", hint=f"choose one of {', '.join(WEIGHT_FORMS)}"
        )
    if activation_scale is None:
        return
    if activation_scale.shape != (matrix.shape[1],):
        raise UsageError(
            f"activation scales of shape {list(activation_scale.shape)} do not fit a matrix of "
            f"{matrix.shape[1]} input columns",
            hint="measure them on this model, and cut them like the matrix's columns",
        )
    if not (np.isfinite(activation_scale).all() and (activation_scale >= 0).all()):
        raise UsageError(
            "activation scales hold negative or infinite numbers",
            hint="they are root mean squares; measure them again",
        )


def _to_float32(matrix: Matrix) -> DenseMatrix:
    if isinstance(matrix, DenseMatrix) and matrix.values.dtype == np.float32:
        return matrix
    return DenseMatrix(matrix.to_dense())


def _to_int4(matrix: Matrix, activation_scale: Float32 | None) -> BlockMatrix:
    if isinstance(matrix, BlockMatrix) and (matrix.bits, matrix.block_size) == (4, BLOCK_SIZE):
        return matrix
    rows, blocks = matrix.shape[0], matrix.shape[1] // BLOCK_SIZE
    importance = None if activation_scale is None else block_importance(activation_scale)
    codes = np.empty((rows, blocks, BLOCK_SIZE // 2), np.uint8)
    scales, shifts = np.empty((rows, blocks), np.float32), np.empty((rows, blocks), np.float32)
    for piece, values in _pieces(matrix):
        codes[piece], scales[piece], shifts[piece] = fit_blocks(values, importance)
    return BlockMatrix(4, BLOCK_SIZE, codes, scales, shifts)


def _to_int8(matrix: Matrix, block_size: int) -> BlockMatrix:
    if isinstance(matrix, BlockMatrix):
        return _widen_codes(matrix)
    return _round_int8(matrix, block_size, np.empty(0, np.int64))


def _to_mixed(matrix: Matrix, block_size: int, activation_scale: Float32 | None) -> MixedMatrix:
    if isinstance(matrix, MixedMatrix) and matrix.blocks.bits == 8:
        return matrix
    loudness = _column_peaks(matrix) if activation_scale is None else activation_scale
    count = max(1, round(matrix.shape[1] * OUTLIERS_PER_COLUMN))
    columns = np.sort(np.argsort(-loudness, kind="stable")[:count]).astype(np.int64)
    values = np.empty((matrix.shape[0], count), np.float16)
    limit = np.finfo(np.float16).max
    for piece, dense in _pieces(matrix):
        values[piece] = np.clip(dense[:, columns], -limit, limit)
    return MixedMatrix(_round_int8(matrix, block_size, columns), columns, values)


def _round_int8(matrix: Matrix, block_size: int, skipped: NDArray[np.int64]) -> BlockMatrix:
    """Symmetric blocks, rounded to nearest; `skipped` columns become exact zeros and do not set scales."""
    rows, width = matrix.shape
    codes = np.empty((rows, width // block_size, block_size), np.uint8)
    scales = np.empty(codes.shape[:2], np.float32)
    for piece, dense in _pieces(matrix):
        if skipped.size:
            dense[:, skipped] = 0
        values = dense.reshape(len(dense), -1, block_size)
        peaks = np.maximum(values.max(axis=2), -values.min(axis=2))
        is_zero = peaks < _LEAST_WEIGHT
        scales[piece] = np.where(is_zero, np.float32(0), peaks / np.float32(127))
        steps = np.where(is_zero, np.float32(0), np.float32(127) / np.where(is_zero, np.float32(1), peaks))
        values *= steps[:, :, None]
        np.rint(values, out=values)
        values += np.float32(128)
        codes[piece] = values
    return BlockMatrix(8, block_size, codes, scales)


def _widen_codes(matrix: BlockMatrix) -> BlockMatrix:
    """The same numbers in 8-bit codes."""
    if matrix.bits == 8:
        return matrix
    pairs = np.stack([matrix.codes & np.uint8(0x0F), matrix.codes >> np.uint8(4)], axis=-1)
    codes = pairs.reshape(*matrix.codes.shape[:2], matrix.block_size) + np.uint8(128 - 8)
    return BlockMatrix(8, matrix.block_size, codes, matrix.scales, matrix.shifts)


def _column_peaks(matrix: Matrix) -> Float32:
    peaks = np.zeros(matrix.shape[1], np.float32)
    for _, dense in _pieces(matrix):
        np.maximum(peaks, np.abs(dense).max(axis=0), out=peaks)
    return peaks


def _pieces(matrix: Matrix) -> Iterator[tuple[slice, Float32]]:
    """A few rows at a time, as float32 that the caller may overwrite."""
    rows, width = matrix.shape
    step = max(1, _PIECE_WEIGHTS // max(1, width))
    for start in range(0, rows, step):
        piece = slice(start, min(start + step, rows))
        dense = _dense_rows(matrix, piece)
        if not np.isfinite(dense).all():
            raise CorruptModelError(
                "a weight matrix holds numbers that are infinite or not numbers at all",
                hint="fetch the file again; it is damaged",
            )
        yield piece, dense


def _dense_rows(matrix: Matrix, piece: slice) -> Float32:
    if isinstance(matrix, DenseMatrix):
        values = matrix.values[piece]
        return values.copy() if values.dtype == np.float32 else widen(values)
    if isinstance(matrix, BlockMatrix):
        return _block_rows(matrix, piece).to_dense()
    blocks = _block_rows(matrix.blocks, piece)
    return MixedMatrix(blocks, matrix.columns, matrix.values[piece]).to_dense()


def _block_rows(matrix: BlockMatrix, piece: slice) -> BlockMatrix:
    shifts = None if matrix.shifts is None else matrix.shifts[piece]
    return BlockMatrix(matrix.bits, matrix.block_size, matrix.codes[piece], matrix.scales[piece], shifts)
