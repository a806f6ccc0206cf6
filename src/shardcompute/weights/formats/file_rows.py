"""Rows of a matrix that stays in its file: read as they are asked for, so that a table takes no memory of a process.

What the system has of the file in memory is its own, and goes where memory is short.
"""

from __future__ import annotations

import threading

import numpy as np

from shardcompute.backends.matrix import Array, Matrix
from shardcompute.core.closing import Closing
from shardcompute.core.errors import UsageError
from shardcompute.weights.formats.bytes import ByteSource
from shardcompute.weights.formats.gguf_blocks import BLOCK_LAYOUTS
from shardcompute.weights.formats.tensor_file import (
    FLOAT_TYPES,
    TensorEntry,
    TensorFile,
    decode_rows,
    lasting_bytes,
)

ROW_TYPES = frozenset((*FLOAT_TYPES, *BLOCK_LAYOUTS))
"""Number types whose rows lie in one piece and are decoded alone."""


class FileRows(Closing):
    """A matrix `[out, in]` as its tensor lies in a file (see `backends.matrix.StoredRows`). Any thread may read."""

    def __init__(self, content: ByteSource, entry: TensorEntry) -> None:
        self._content = content
        self._entry = entry
        self._lock = threading.Lock()
        self._is_closed = False

    @property
    def shape(self) -> tuple[int, int]:
        return (self._entry.shape[0], self._entry.shape[1])

    def read(self, rows: Array) -> Matrix:
        size = self._entry.row_bytes
        raw = np.empty((len(rows), size), dtype=np.uint8)
        with self._lock:
            if self._is_closed:
                raise UsageError(f"{self._content.name} is closed")
            for target, row in zip(raw, rows.tolist(), strict=True):
                target[:] = np.frombuffer(self._content.read(row * size, size), np.uint8)
        return decode_rows(self._content.name, self._entry, raw)

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            self._content.close()


def open_file_rows(file: TensorFile, entry: TensorEntry) -> FileRows | None:
    """None where its bytes cannot be read once `file` is closed, or not row by row."""
    if entry.dtype not in ROW_TYPES or len(entry.shape) != 2:
        return None
    content = lasting_bytes(file, entry.name)
    return None if content is None else FileRows(content, entry)
