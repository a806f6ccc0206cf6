"""Embedding table, in a file or in host memory: rows are looked up, never multiplied with."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from shardcompute.backends.matrix import Array, BlockMatrix, Float32, Matrix, StoredRows, rows_of


class EmbeddingTable:
    """The rows of a matrix, exactly, with scales and shifts in 16 bits where that loses nothing.

    Files keep most of them so; spread to 32 bits, a table would take a ninth to a fifth more than its file. Where it
    has only the ids from `first` on, other ids are rows of zeros.
    """

    def __init__(self, matrix: Matrix, first: int | None = None) -> None:
        self._first, self._count = first, matrix.shape[0]
        self._matrix = matrix
        self._scales: NDArray[np.float16] | None = None
        self._shifts: NDArray[np.float16] | None = None
        if isinstance(matrix, BlockMatrix):
            none: Float32 = np.zeros((0, 0), dtype=np.float32)
            self._scales = _narrowed(matrix.scales)
            self._shifts = None if matrix.shifts is None else _narrowed(matrix.shifts)
            self._matrix = replace(
                matrix,
                scales=matrix.scales if self._scales is None else none,
                shifts=matrix.shifts if self._shifts is None else none,
            )

    @property
    def size_bytes(self) -> int:
        narrow = (each.nbytes for each in (self._scales, self._shifts) if each is not None)
        return self._matrix.size_bytes + sum(narrow)

    def close(self) -> None:
        """Its memory goes with it."""

    def rows(self, ids: Array) -> Float32:
        if self._first is None:
            return self._rows(ids)
        own = (self._first <= ids) & (ids < self._first + self._count)
        rows = self._rows(np.where(own, ids - self._first, 0))
        rows[~own] = 0
        return rows

    def _rows(self, ids: Array) -> Float32:
        matrix = self._matrix
        if not isinstance(matrix, BlockMatrix):
            return rows_of(matrix, ids).to_dense()
        shifts = matrix.shifts if self._shifts is None else self._shifts
        return BlockMatrix(
            matrix.bits,
            matrix.block_size,
            matrix.codes[ids],
            (matrix.scales if self._scales is None else self._scales)[ids].astype(np.float32),
            None if shifts is None else shifts[ids].astype(np.float32),
        ).to_dense()


class StoredTable:
    """The rows of a matrix in a file."""

    def __init__(self, stored: StoredRows) -> None:
        self._stored = stored

    def rows(self, ids: Array) -> Float32:
        wanted, places = np.unique(ids, return_inverse=True)
        return self._stored.read(wanted).to_dense()[places]

    def close(self) -> None:
        self._stored.close()


def _narrowed(values: Float32) -> NDArray[np.float16] | None:
    with np.errstate(over="ignore"):
        narrow = values.astype(np.float16)
    return narrow if np.array_equal(narrow, values) else None
