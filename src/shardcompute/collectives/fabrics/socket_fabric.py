"""Collectives over sockets: the quick fabric, in the thread that computes.

Links prove who is at the other end and leave their sockets to us (`SocketLink.detach`): TLS between machines, Unix
sockets in the clear between processes of one machine. There is no other thread and no event loop between an array and
the system. Whoever waits looks again and again for a short time, because a peer that computes the same is never far
behind; then it sleeps until something comes. Looking in vain takes a core from others, perhaps from the very peer that
is waited for: after a wait that was longer than any look the next look is half as long, after a short one twice as
long. Where more ranks share a machine than it has cores there is none of it.
"""

from __future__ import annotations

import math
import select
import sys
import time
from collections.abc import Mapping, Sequence

from shardcompute.collectives.fabrics.connection import PeerConnection
from shardcompute.collectives.fabrics.fabric import ExpectedFrame, OutgoingFrame, PeerFailedError

SPIN_S = 250e-6
"""Longer than ranks that compute the same are mostly apart; short beside a layer, so that it costs little where one is
late."""

_LEAST_SPIN = 16
"""How many times shorter than the longest the shortest look is."""


class SocketFabric:
    def __init__(
        self, rank: int, epoch: int, connections: Mapping[int, PeerConnection], spin_s: float = SPIN_S
    ) -> None:
        """A connection to every other rank; they are closed with the fabric."""
        self.rank = rank
        self.size = len(connections) + 1
        self.epoch = epoch
        self._connections = dict(connections)
        self._most_spin_s = self._spin_s = spin_s
        self._is_over = False

    @property
    def refused_frames(self) -> int:
        return sum(each.refused_frames for each in self._connections.values())

    def exchange(
        self, sends: Sequence[OutgoingFrame], receives: Sequence[ExpectedFrame], deadline: float
    ) -> None:
        active: dict[int, PeerConnection] = {}
        for send in sends:
            connection = active[send.peer] = self._connections[send.peer]
            connection.send(send)
            connection.push()
        for receive in receives:
            connection = active[receive.peer] = self._connections[receive.peer]
            connection.waiting.append(receive)
        started_s = 0.0
        while left := [each for each in active.values() if not _advance(each)]:
            now_s = time.monotonic()
            if now_s >= deadline:
                raise PeerFailedError(
                    left[0].peer,
                    "it did not answer in time",
                    hint="the rank may be stuck or cut off",
                    is_late=True,
                )
            if not started_s:
                started_s = now_s
            elif now_s > started_s + self._spin_s:
                _wait(left, deadline - now_s)
        if started_s:
            self._learn(time.monotonic() - started_s)

    def _learn(self, waited_s: float) -> None:
        most_s = self._most_spin_s
        is_short = waited_s <= most_s
        self._spin_s = (
            min(2 * self._spin_s, most_s) if is_short else max(self._spin_s / 2, most_s / _LEAST_SPIN)
        )

    def end(self, farewell: bytes) -> None:
        if not self._is_over:
            self._is_over = True
            for connection in self._connections.values():
                connection.end(farewell)

    def interrupt(self) -> None:
        for connection in self._connections.values():
            connection.interrupt()

    def close(self) -> None:
        for connection in self._connections.values():
            connection.close()


def _advance(connection: PeerConnection) -> bool:
    """True once this connection has nothing more to do."""
    is_out = not connection.sending or connection.push()
    return (not connection.waiting or connection.pull()) and is_out


def _wait(connections: Sequence[PeerConnection], timeout_s: float) -> None:
    """Sleep until one of them can go on, or the time is up."""
    if sys.platform != "win32":
        poll = select.poll()
        for each in connections:
            reads, writes = each.needs
            poll.register(each.sock, (select.POLLIN if reads else 0) | (select.POLLOUT if writes else 0))
        poll.poll(math.ceil(timeout_s * 1000))
    else:
        reading = [each.sock for each in connections if each.needs[0]]
        writing = [each.sock for each in connections if each.needs[1]]
        select.select(reading, writing, [], timeout_s)
