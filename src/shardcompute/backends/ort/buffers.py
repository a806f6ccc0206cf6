"""Row buffers between the steps of a program: memory is taken as rows are written, and can be given back.

A step of a long prompt fills hundreds of rows of every buffer, the steps of its answer one or a few.
"""

from __future__ import annotations

import mmap
import sys
from collections.abc import Iterable

import numpy as np

from shardcompute.backends.matrix import Float32


def reserve_rows(rows: int, width: int) -> Float32:
    """Zeros `[rows, width]`."""
    size = 4 * rows * width
    if sys.platform != "win32" and size:
        room = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        return np.frombuffer(room, dtype=np.float32).reshape(rows, width)
    return np.zeros((rows, width), dtype=np.float32)


def give_back_rows(buffers: Iterable[Float32], first: int) -> None:
    """Give the memory of rows from `first` on back to the system: they read as zeros then, at the same addresses."""
    if sys.platform != "win32":
        for buffer in buffers:
            room = _room_of(buffer)
            if room is not None:
                kept = -(-first * buffer.strides[0] // mmap.PAGESIZE) * mmap.PAGESIZE
                if kept < len(room):
                    room.madvise(mmap.MADV_DONTNEED, kept, len(room) - kept)


def _room_of(buffer: Float32) -> mmap.mmap | None:
    owner: object = buffer
    while isinstance(owner, np.ndarray):
        owner = owner.base
    if isinstance(owner, memoryview):
        owner = owner.obj
    return owner if isinstance(owner, mmap.mmap) else None
