"""Loading room: memory that weights pass through on their way into kernels, used again for the next session.

`MatMulNBits` packs codes and scales while a session is opened. ONNX Runtime frees the codes afterwards but keeps the
scales for the life of the session, although nothing reads them: an eighth of a byte for every weight. Scales that lie
here are the session's without a copy, and since nothing reads them, the next session's may take their place.

Whether nothing reads them is a kernel's business: `linear` asks each kind of kernel first.
"""

from __future__ import annotations

import contextlib
import mmap
import sys
import threading
from collections.abc import Iterator, Mapping

import numpy as np
import onnxruntime

from shardcompute.backends.matrix import Array, Float32

_ALIGNED_BYTES = 64
_SMALLEST_BYTES = 1 << 20


class LoadingRoom:
    """Float32 constants of one session at a time. Addresses that were given out stay valid for good."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._rooms: list[mmap.mmap] = []

    @contextlib.contextmanager
    def place(self, constants: Mapping[str, Array]) -> Iterator[dict[str, onnxruntime.OrtValue]]:
        """These constants as values for a session that is opened inside the block; then they are gone."""
        offsets, size = {}, 0
        for name, values in constants.items():
            offsets[name] = size
            size += -(-values.nbytes // _ALIGNED_BYTES) * _ALIGNED_BYTES
        with self._lock:
            room = self._room(size)
            placed = {}
            for name, values in constants.items():
                there: Float32 = np.frombuffer(room, np.float32, values.size, offsets[name])
                there[:] = values.reshape(-1)
                placed[name] = onnxruntime.OrtValue.ortvalue_from_numpy(there.reshape(values.shape))
            try:
                yield placed
            finally:
                # Whoever reads them after all gets something that no probe overlooks.
                np.frombuffer(room, np.float32, size // 4)[:] = np.nan

    def release(self) -> None:
        """Give the memory back to the system; addresses stay valid."""
        with self._lock:
            if sys.platform != "win32":
                for room in self._rooms:
                    room.madvise(mmap.MADV_DONTNEED)

    def _room(self, size: int) -> mmap.mmap:
        """The largest, or a new one of twice its size: what sessions hold in the others must stay there."""
        if not self._rooms or len(self._rooms[-1]) < size:
            smallest = 2 * len(self._rooms[-1]) if self._rooms else _SMALLEST_BYTES
            # Private, so that memory that was given back reads as zeros and costs nothing.
            if sys.platform != "win32":
                room = mmap.mmap(-1, max(size, smallest), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            else:
                room = mmap.mmap(-1, max(size, smallest))
            self._rooms.append(room)
        return self._rooms[-1]
