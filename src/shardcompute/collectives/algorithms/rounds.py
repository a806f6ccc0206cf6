"""One call of a collective as its algorithm sees it: ranks, and rounds in which flat arrays are sent and received."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from shardcompute.collectives.elements import code_of
from shardcompute.collectives.fabrics.fabric import ExpectedFrame, Fabric, OutgoingFrame, bytes_of
from shardcompute.collectives.fabrics.frames import FrameKind, pack_head
from shardcompute.collectives.group import Array

_MOST_KEPT_BYTES = 4 << 20
_MOST_BUFFERS = 16
_LEAST_BYTES = 16 << 10


@dataclass(slots=True)
class Traffic:
    """What a rank has moved in a group: bytes of arrays, and frames."""

    bytes_sent: int = 0
    bytes_received: int = 0
    frames_sent: int = 0


class Scratch:
    """Memory for what comes from others during a call, used again by the next one."""

    def __init__(self) -> None:
        self._buffers: list[npt.NDArray[np.uint8]] = []
        self._used = 0

    def begin(self) -> None:
        self._used = 0

    def space(self, like: Array) -> Array:
        """Room for as many elements of the same type, in one run."""
        size_bytes = like.nbytes
        if size_bytes > _MOST_KEPT_BYTES or self._used >= _MOST_BUFFERS:
            return np.empty_like(like)
        if self._used == len(self._buffers):
            self._buffers.append(np.empty(max(size_bytes, _LEAST_BYTES), np.uint8))
        elif self._buffers[self._used].size < size_bytes:
            self._buffers[self._used] = np.empty(size_bytes, np.uint8)
        found: Array = self._buffers[self._used][:size_bytes].view(like.dtype)
        self._used += 1
        return found


@dataclass(frozen=True, slots=True)
class Place:
    """A rank in a group, as far as frames and algorithms must know it. `members` are the ranks of the group by their
    rank in the fabric's world."""

    fabric: Fabric
    members: Sequence[int]
    rank: int
    group: int
    traffic: Traffic
    scratch: Scratch


class Rounds:
    """One call."""

    __slots__ = ("_deadline", "_operation", "_place", "_sequence", "others", "rank", "size")

    def __init__(self, place: Place, operation: int, sequence: int, deadline: float) -> None:
        self._place = place
        self._operation = operation
        self._sequence = sequence
        self._deadline = deadline
        self.rank = place.rank
        self.size = len(place.members)
        self.others = [rank for rank in range(self.size) if rank != self.rank]
        place.scratch.begin()

    def space(self, like: Array) -> Array:
        """Room for a flat array like this one, for the time of the call."""
        return self._place.scratch.space(like)

    def exchange(
        self, step: int, sends: Sequence[tuple[int, Array]], receives: Sequence[tuple[int, Array]]
    ) -> None:
        """Send arrays to ranks and fill arrays with what ranks send, all at once. Each is one run of memory. Steps
        are numbered so that both ends of a frame know which it is; empty arrays do not travel."""
        out = [self._outgoing(step, to, array) for to, array in sends if array.size]
        came = [
            ExpectedFrame(
                self._place.members[source],
                self._head(step, source, code_of(array), array.shape, array.nbytes),
                bytes_of(array),
            )
            for source, array in receives
            if array.size
        ]
        self._move(out, came)

    def exchange_free(
        self, step: int, sends: Sequence[tuple[int, Array]], sources: Sequence[int], dtype: int
    ) -> list[Array]:
        """As `exchange`, for arrays whose shapes only their senders know, and empty ones too; `dtype` 0: any type."""
        out = [self._outgoing(step, to, array) for to, array in sends]
        came = [
            ExpectedFrame(self._place.members[source], self._head(step, source, dtype, (), 0))
            for source in sources
        ]
        self._move(out, came)
        return [each.array for each in came if each.array is not None]

    def signal(self, step: int, to: int, source: int) -> None:
        """Say to one rank that this one is here, and hear it from another."""
        out = OutgoingFrame(self._place.members[to], self._head(step, self.rank, 0, (), 0), memoryview(b""))
        self._move([out], [ExpectedFrame(self._place.members[source], self._head(step, source, 0, (), 0))])

    def _outgoing(self, step: int, to: int, array: Array) -> OutgoingFrame:
        head = self._head(step, self.rank, code_of(array), array.shape, array.nbytes)
        return OutgoingFrame(self._place.members[to], head, bytes_of(array))

    def _head(self, step: int, rank: int, dtype: int, shape: tuple[int, ...], body_bytes: int) -> bytes:
        return pack_head(
            FrameKind.ELEMENTS,
            self._operation,
            dtype,
            self._place.group,
            self._place.fabric.epoch,
            self._sequence,
            step,
            rank,
            shape,
            body_bytes,
        )

    def _move(self, out: Sequence[OutgoingFrame], came: Sequence[ExpectedFrame]) -> None:
        if not out and not came:
            return
        self._place.fabric.exchange(out, came, self._deadline)
        traffic = self._place.traffic
        traffic.frames_sent += len(out)
        for send in out:
            traffic.bytes_sent += len(send.body)
        for receive in came:
            body = receive.body
            if body is not None:
                traffic.bytes_received += len(body)
            elif receive.array is not None:
                traffic.bytes_received += receive.array.nbytes
