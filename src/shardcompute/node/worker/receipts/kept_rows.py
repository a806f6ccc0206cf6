"""Kept rows: what a stage has sent of answers that are over, for a while, so that they can be audited.

Taken over from the activation log when an answer ends, without a copy. Bounded: what was kept longest goes first.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

from shardcompute.core.errors import UsageError
from shardcompute.node.rpc.commands import ShownRows, ShowRows
from shardcompute.node.worker.activation_log import Chunk
from shardcompute.wire import find_codec

MOST_KEPT_BYTES = 64 << 20
_MOST_ANSWERS = 1024
_MOST_SHOWN_BYTES = 2 << 20


class KeptRows:
    """Of all stages of a worker, by receipt and first layer. Methods may be called from any thread."""

    def __init__(self, limit_bytes: int = MOST_KEPT_BYTES) -> None:
        self._limit_bytes = limit_bytes
        self._lock = threading.Lock()
        self._kept: OrderedDict[tuple[str, int], tuple[Chunk, ...]] = OrderedDict()
        self._used_bytes = 0

    @property
    def used_bytes(self) -> int:
        with self._lock:
            return self._used_bytes

    def keep(self, receipt: str, start: int, chunks: Sequence[Chunk]) -> None:
        """All rows of an answer from the first on, as a stage that begins with layer `start` has sent them."""
        with self._lock:
            self._forget((receipt, start))
            self._kept[receipt, start] = tuple(chunks)
            self._used_bytes += _size_bytes(chunks)
            self._trim()

    def limit(self, limit_bytes: int) -> None:
        with self._lock:
            self._limit_bytes = min(limit_bytes, MOST_KEPT_BYTES)
            self._trim()

    def show(self, command: ShowRows) -> ShownRows:
        """Rows from `row` on, as many as one answer holds and one form was sent in. UsageError: they are not here."""
        with self._lock:
            chunks = self._kept.get((command.receipt, command.start))
        first = 0
        for chunk in chunks or ():
            if command.row < first + len(chunk):
                at = command.row - first
                most = max(1, _MOST_SHOWN_BYTES // (4 * chunk.width))
                part = chunk.part(at, min(at + most, len(chunk)))
                rows = find_codec(part.codec).rows.unpack(part.rows, part.width)
                content = np.ascontiguousarray(rows, dtype="<f4").tobytes()
                return ShownRows(part.codec, part.width, len(part), content)
            first += len(chunk)
        raise UsageError(f"row {command.row} of {command.receipt} is not kept here")

    def _trim(self) -> None:
        while self._kept and (self._used_bytes > self._limit_bytes or len(self._kept) > _MOST_ANSWERS):
            self._forget(next(iter(self._kept)))

    def _forget(self, key: tuple[str, int]) -> None:
        chunks = self._kept.pop(key, None)
        if chunks is not None:
            self._used_bytes -= _size_bytes(chunks)


def _size_bytes(chunks: Sequence[Chunk]) -> int:
    return sum(chunk.rows.nbytes for chunk in chunks)
