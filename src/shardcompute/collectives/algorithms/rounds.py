"""One call of a collective as its algorithm sees it: ranks, and rounds in which flat arrays are sent and received."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shardcompute.collectives.elements import code_of
from shardcompute.collectives.fabrics.fabric import ExpectedFrame, Fabric, OutgoingFrame, bytes_of
from shardcompute.collectives.fabrics.frames import FrameKind, pack_head
from shardcompute.collectives.group import Array


@dataclass(slots=True)
class Traffic:
    """What a rank has moved in a group: bytes of arrays, and frames."""

    bytes_sent: int = 0
    bytes_received: int = 0
    frames_sent: int = 0


@dataclass(slots=True)
class Rounds:
    """`members` are the ranks of the group by their rank in the fabric's world."""

    fabric: Fabric
    members: Sequence[int]
    rank: int
    group: int
    operation: int
    sequence: int
    deadline: float
    traffic: Traffic

    @property
    def size(self) -> int:
        return len(self.members)

    def exchange(
        self, step: int, sends: Sequence[tuple[int, Array]], receives: Sequence[tuple[int, Array]]
    ) -> None:
        """Send arrays to ranks and fill arrays with what ranks send, all at once. Each is one run of memory. Steps
        are numbered so that both ends of a frame know which it is; empty arrays do not travel."""
        out = [self._outgoing(step, to, array) for to, array in sends if array.size]
        came = [
            ExpectedFrame(
                self.members[source],
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
            ExpectedFrame(self.members[source], self._head(step, source, dtype, (), 0)) for source in sources
        ]
        self._move(out, came)
        return [each.array for each in came if each.array is not None]

    def signal(self, step: int, to: int, source: int) -> None:
        """Say to one rank that this one is here, and hear it from another."""
        out = OutgoingFrame(self.members[to], self._head(step, self.rank, 0, (), 0), memoryview(b""))
        self._move([out], [ExpectedFrame(self.members[source], self._head(step, source, 0, (), 0))])

    def _outgoing(self, step: int, to: int, array: Array) -> OutgoingFrame:
        head = self._head(step, self.rank, code_of(array), array.shape, array.nbytes)
        return OutgoingFrame(self.members[to], head, bytes_of(array))

    def _head(self, step: int, rank: int, dtype: int, shape: tuple[int, ...], body_bytes: int) -> bytes:
        return pack_head(
            FrameKind.ELEMENTS,
            self.operation,
            dtype,
            self.group,
            self.fabric.epoch,
            self.sequence,
            step,
            rank,
            shape,
            body_bytes,
        )

    def _move(self, out: Sequence[OutgoingFrame], came: Sequence[ExpectedFrame]) -> None:
        if not out and not came:
            return
        self.fabric.exchange(out, came, self.deadline)
        traffic = self.traffic
        traffic.frames_sent += len(out)
        for send in out:
            traffic.bytes_sent += len(send.body)
        for receive in came:
            body = receive.body
            if body is not None:
                traffic.bytes_received += len(body)
            elif receive.array is not None:
                traffic.bytes_received += receive.array.nbytes
