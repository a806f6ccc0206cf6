"""A link around another, for those who change what passes through it."""

from __future__ import annotations

from shardcompute.core.closing import Closing
from shardcompute.wire.framing import Body
from shardcompute.wire.links import Link, LinkStats
from shardcompute.wire.messages import Message


class WrappedLink(Closing):
    """Looks and behaves like `link`, except where a class that derives from it says otherwise."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self.peer = link.peer
        self.role = link.role

    @property
    def version(self) -> int:
        return self._link.version

    @property
    def address(self) -> str:
        return self._link.address

    @property
    def certificate(self) -> bytes | None:
        return self._link.certificate

    @property
    def stats(self) -> LinkStats:
        return self._link.stats

    def send(self, message: Message, body: Body = ()) -> None:
        self._link.send(message, body)

    def receive(self, timeout_s: float | None = None) -> tuple[Message, memoryview]:
        return self._link.receive(timeout_s)

    def close(self) -> None:
        self._link.close()
