"""Collectives over any link of ours: within a process, or over an emulated network, whose delays apply.

Each link is served by the two threads of a `LinkPump`, so this fabric is for lines where a switch of threads does not
count; between real machines there is `socket_fabric`.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from shardcompute.collectives.fabrics.fabric import ExpectedFrame, OutgoingFrame, PeerFailedError
from shardcompute.collectives.fabrics.inbox import Inbox
from shardcompute.core.errors import LinkError
from shardcompute.wire import CollectiveFrame, Link, LinkPump, Message

_FULL_S = 30.0
_FAREWELL_S = 0.5


class LinkFabric:
    def __init__(self, rank: int, epoch: int, links: Mapping[int, Link]) -> None:
        """A link to every other rank, introduced and not yet used; they are closed with the fabric."""
        self.rank = rank
        self.size = len(links) + 1
        self.epoch = epoch
        self._inbox = Inbox(links, epoch)
        self._pumps = {peer: self._serve(peer, link) for peer, link in links.items()}
        self._is_over = False
        for pump in self._pumps.values():
            pump.start()

    @property
    def refused_frames(self) -> int:
        return self._inbox.refused_frames

    def exchange(
        self, sends: Sequence[OutgoingFrame], receives: Sequence[ExpectedFrame], deadline: float
    ) -> None:
        for send in sends:
            # The pump keeps what it is given, and the caller goes on to use its buffers.
            body = b"".join((send.head, send.body))
            try:
                left_s = max(0.0, deadline - time.monotonic())
                is_queued = self._pumps[send.peer].offer(CollectiveFrame(len(body)), (body,), left_s)
            except LinkError as error:
                raise PeerFailedError(send.peer, error.message, hint=error.hint) from error
            if not is_queued:
                raise PeerFailedError(
                    send.peer, "it takes no frames", hint="the rank may be stuck or cut off", is_late=True
                )
        self._inbox.take(receives, deadline)

    def end(self, farewell: bytes) -> None:
        if self._is_over:
            return
        self._is_over = True
        for pump in self._pumps.values():
            try:
                pump.offer(CollectiveFrame(len(farewell)), (farewell,))
            except LinkError:
                continue

    def interrupt(self) -> None:
        self._inbox.close()

    def close(self) -> None:
        self._inbox.close()
        for pump in self._pumps.values():
            pump.close(_FAREWELL_S)

    def _serve(self, peer: int, link: Link) -> LinkPump:
        def on_message(message: Message, body: memoryview) -> None:
            if not isinstance(message, CollectiveFrame):
                raise LinkError(f"a rank sends {type(message).__name__}, which is no frame of a collective")
            if not self._inbox.put(peer, body, time.monotonic() + _FULL_S):
                raise LinkError(f"rank {peer} sends more than this rank takes")

        def on_closed(reason: LinkError) -> None:
            self._inbox.fail(peer, reason.message, self.epoch)

        return LinkPump(link, on_message, on_closed)
