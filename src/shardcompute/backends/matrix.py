"""Weight matrices as they travel from files to kernels: dense, in quantised blocks, or blocks with outliers.

All matrices are `[out, in]`, as checkpoints store them: `y = x @ w.T`. Kernels take these forms without a
second rounding; `to_dense` is the definition of what each form means.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Float32 = NDArray[np.float32]
_LEAST_BLOCK = 16
"""The smallest block that kernels take."""


@dataclass(frozen=True, slots=True)
class DenseMatrix:
    """Plain numbers: float32, float16, or bfloat16 kept as raw uint16 (numpy has no bfloat16)."""

    values: Array

    @property
    def shape(self) -> tuple[int, int]:
        return (self.values.shape[0], self.values.shape[1])

    @property
    def size_bytes(self) -> int:
        return self.values.nbytes

    def to_dense(self) -> Float32:
        return widen(self.values)


@dataclass(frozen=True, slots=True)
class BlockMatrix:
    """Blocks of `block_size` along the input, each `w = scale · (code − 2^(bits−1)) + shift`.

    `codes` is uint8 `[out, blocks, block_size · bits / 8]`; 4-bit codes lie two in a byte, the lower index in
    the low half. `shifts` is None where every shift is zero. The input width is `blocks · block_size`.
    """

    bits: int
    block_size: int
    codes: NDArray[np.uint8]
    scales: Float32
    shifts: Float32 | None = None

    @property
    def shape(self) -> tuple[int, int]:
        return (self.codes.shape[0], self.codes.shape[1] * self.block_size)

    @property
    def size_bytes(self) -> int:
        return self.codes.nbytes + self.scales.nbytes + (0 if self.shifts is None else self.shifts.nbytes)

    def to_dense(self) -> Float32:
        rows = self.codes.shape[0]
        codes = self.codes
        if self.bits == 4:
            codes = np.stack([codes & 0x0F, codes >> 4], axis=-1).reshape(rows, -1, self.block_size)
        centred = codes.astype(np.float32) - np.float32(1 << (self.bits - 1))
        dense = centred * self.scales[:, :, None]
        if self.shifts is not None:
            dense += self.shifts[:, :, None]
        return dense.reshape(rows, -1)


@dataclass(frozen=True, slots=True)
class MixedMatrix:
    """A block matrix whose few outlier input columns are kept in 16 bit (their codes mean zero)."""

    blocks: BlockMatrix
    columns: NDArray[np.int64]
    values: NDArray[np.float16]

    @property
    def shape(self) -> tuple[int, int]:
        return self.blocks.shape

    @property
    def size_bytes(self) -> int:
        return self.blocks.size_bytes + self.columns.nbytes + self.values.nbytes

    def to_dense(self) -> Float32:
        dense = self.blocks.to_dense()
        dense[:, self.columns] += self.values.astype(np.float32)
        return dense


Matrix = DenseMatrix | BlockMatrix | MixedMatrix


class StoredRows(Protocol):
    """A matrix that stays where it is stored: rows are read as they are asked for."""

    @property
    def shape(self) -> tuple[int, int]: ...

    def read(self, rows: Array) -> Matrix:
        """These rows, in any order."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class HeldRows:
    """`StoredRows` of a matrix in memory."""

    matrix: Matrix

    @property
    def shape(self) -> tuple[int, int]:
        return self.matrix.shape

    def read(self, rows: Array) -> Matrix:
        return rows_of(self.matrix, rows)

    def close(self) -> None:
        """Its memory goes with it."""


@dataclass(frozen=True, slots=True)
class ChosenRows:
    """Some rows of a stored matrix as a matrix of their own, which takes no memory."""

    stored: StoredRows
    chosen: Array

    @property
    def shape(self) -> tuple[int, int]:
        return (len(self.chosen), self.stored.shape[1])

    def read(self, rows: Array) -> Matrix:
        return self.stored.read(self.chosen[rows])

    def close(self) -> None:
        self.stored.close()


def rows_of(matrix: Matrix, rows: Array | slice) -> Matrix:
    """These rows of a matrix, in its own form."""
    if isinstance(matrix, DenseMatrix):
        return DenseMatrix(matrix.values[rows])
    if isinstance(matrix, MixedMatrix):
        return MixedMatrix(_block_rows(matrix.blocks, rows), matrix.columns, matrix.values[rows])
    return _block_rows(matrix, rows)


def part_of(matrix: Matrix, rows: tuple[int, int] | None, columns: tuple[int, int] | None) -> Matrix:
    """These rows and columns (None: all) of a matrix, with the numbers that it has."""
    if rows is not None:
        matrix = rows_of(matrix, slice(*rows))
    return matrix if columns is None else columns_of(matrix, *columns)


def columns_of(matrix: Matrix, start: int, stop: int) -> Matrix:
    """Columns `[start, stop)` of a matrix, with the numbers that it has: nothing is rounded again.

    A cut through blocks makes them smaller ones of the same scale; where they would be too small for kernels, the part
    is dense.
    """
    if isinstance(matrix, DenseMatrix):
        return DenseMatrix(np.ascontiguousarray(matrix.values[:, start:stop]))
    if isinstance(matrix, MixedMatrix):
        blocks = columns_of(matrix.blocks, start, stop)
        if not isinstance(blocks, BlockMatrix):
            return DenseMatrix(matrix.to_dense()[:, start:stop])
        here = (start <= matrix.columns) & (matrix.columns < stop)
        if not here.any():
            return blocks
        values = np.ascontiguousarray(matrix.values[:, here])
        return MixedMatrix(blocks, matrix.columns[here] - start, values)
    size = math.gcd(matrix.block_size, start, stop)
    if size < _LEAST_BLOCK:
        return DenseMatrix(np.ascontiguousarray(matrix.to_dense()[:, start:stop]))
    kept, parts = slice(start // size, stop // size), matrix.block_size // size

    def spread(values: Float32) -> Float32:
        return np.ascontiguousarray(np.repeat(values, parts, axis=1)[:, kept])

    codes = matrix.codes.reshape(len(matrix.codes), -1, size * matrix.bits // 8)[:, kept]
    shifts = None if matrix.shifts is None else spread(matrix.shifts)
    return BlockMatrix(matrix.bits, size, np.ascontiguousarray(codes), spread(matrix.scales), shifts)


def _block_rows(matrix: BlockMatrix, rows: Array | slice) -> BlockMatrix:
    shifts = None if matrix.shifts is None else matrix.shifts[rows]
    return BlockMatrix(matrix.bits, matrix.block_size, matrix.codes[rows], matrix.scales[rows], shifts)


def widen(values: Array) -> Float32:
    """float32 from float32, float16 or raw bfloat16 (uint16), exactly."""
    if values.dtype == np.uint16:
        return (values.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return np.ascontiguousarray(values, dtype=np.float32)
