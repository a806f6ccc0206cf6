"""A world of threads: ranks within one process.

Frames are packed, checked and copied as on any other fabric, so that what works here works over a network and no memory
is shared by accident.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from shardcompute.collectives.fabrics.fabric import ExpectedFrame, OutgoingFrame, PeerFailedError
from shardcompute.collectives.fabrics.inbox import Inbox


class InprocHub:
    """Where the threads of a world meet. They may form it again and again, each time under a higher epoch."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.inboxes = [Inbox(peer for peer in range(size) if peer != rank) for rank in range(size)]

    def fabric(self, rank: int, epoch: int = 1) -> InprocFabric:
        return InprocFabric(self, rank, epoch)


class InprocFabric:
    def __init__(self, hub: InprocHub, rank: int, epoch: int) -> None:
        self.rank = rank
        self.size = hub.size
        self.epoch = epoch
        self._hub = hub
        self._inbox = hub.inboxes[rank]
        self._inbox.open(epoch)
        self._is_over = False

    @property
    def refused_frames(self) -> int:
        return self._inbox.refused_frames

    def exchange(
        self, sends: Sequence[OutgoingFrame], receives: Sequence[ExpectedFrame], deadline: float
    ) -> None:
        for send in sends:
            frame = memoryview(b"".join((send.head, send.body)))
            if not self._hub.inboxes[send.peer].put(self.rank, frame, deadline):
                raise PeerFailedError(send.peer, "it takes no frames", hint="the rank may have stopped")
        self._inbox.take(receives, deadline)

    def end(self, farewell: bytes) -> None:
        if not self._is_over:
            self._is_over = True
            for peer in range(self.size):
                if peer != self.rank:
                    self._hub.inboxes[peer].put(self.rank, memoryview(farewell), time.monotonic())

    def interrupt(self) -> None:
        self._inbox.close()

    def close(self) -> None:
        for peer in range(self.size):
            if peer != self.rank:
                self._hub.inboxes[peer].fail(self.rank, "it has left", self.epoch)
        self._inbox.close()
