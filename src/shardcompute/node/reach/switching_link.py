"""A link that moves to a better way while it is in use, without losing a frame.

Each end ends its part of the old way with `PathSwitched` and goes on on the new one; the other reads the old way up to
that word, and then the new one. So every frame comes once, and in its order. The old way is closed a while after both
ends have left it.
"""

from __future__ import annotations

import threading

from shardcompute.core.closing import Closing
from shardcompute.core.errors import LinkError
from shardcompute.wire import LinkStats, Message
from shardcompute.wire.framing import Body
from shardcompute.wire.messages import PathSwitched
from shardcompute.wire.socket_link import SocketLink

_FOLLOW_S = 10.0
_LINGER_S = 5.0


class SwitchingLink(Closing):
    """Made of a link that is open; a `wire.Link` itself. `replace` may be called from any thread."""

    def __init__(self, link: SocketLink) -> None:
        self.peer = link.peer
        self.role = link.role
        self.version = link.version
        self.address = link.address
        self.certificate = link.certificate
        self.remark = ""
        self._out = link
        self._in = link
        self._next: SocketLink | None = None
        self._former: list[SocketLink] = []
        self._sending = threading.Lock()
        self._changed = threading.Condition()
        self.is_closed = False

    @property
    def rung(self) -> str:
        return self._out.rung

    @property
    def stats(self) -> LinkStats:
        """Of the way on which it sends now."""
        stats = self._out.stats
        return LinkStats(
            stats.frames_sent,
            stats.bytes_sent,
            stats.frames_received,
            stats.bytes_received,
            stats.congestion,
            stats.tls_version,
            stats.is_local,
            stats.rung,
            self.remark,
        )

    def send(self, message: Message, body: Body = ()) -> None:
        with self._sending:
            self._out.send(message, body)

    def receive(self, timeout_s: float | None = None) -> tuple[Message, memoryview]:
        while True:
            message, body = self._in.receive(timeout_s)
            if not isinstance(message, PathSwitched):
                return message, body
            self._follow()

    def replace(self, link: SocketLink) -> bool:
        """Go on on this link, whose other end is given to the same link's other end. False, and it is closed, where
        that cannot be."""
        with self._changed:
            can_be = not self.is_closed and self._next is None and self._in is self._out
            if can_be:
                self._next = link
                self._changed.notify_all()
        if not can_be:
            link.close()
            return False
        with self._sending:
            old = self._out
            old.send(PathSwitched())
            self._out = link
        self._settle(old)
        return True

    def close(self) -> None:
        with self._changed:
            self.is_closed = True
            ways = {self._in, self._out, *self._former, *([self._next] if self._next else [])}
            self._changed.notify_all()
        for way in ways:
            way.close()

    def _follow(self) -> None:
        """The other end has left the way on which we receive."""
        with self._changed:
            self._changed.wait_for(lambda: self._next is not None or self.is_closed, _FOLLOW_S)
            if self._next is None:
                raise LinkError(f"{self.peer} went on on another way, which did not come")
            old, self._in = self._in, self._next
        self._settle(old)

    def _settle(self, old: SocketLink) -> None:
        """Close the old way once nobody needs it; what was said last on it may still be under way."""
        with self._changed:
            if self._in is not self._out or self._next is None:
                return
            self._next = None
            self._former.append(old)
            is_closed = self.is_closed
        if is_closed:
            old.close()
            return
        timer = threading.Timer(_LINGER_S, old.close)
        timer.daemon = True
        timer.start()
