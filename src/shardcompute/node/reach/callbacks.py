"""Callbacks: links that a node dials to us because we asked it to, each handed to whoever waits for it."""

from __future__ import annotations

import threading

from shardcompute.core.errors import LinkError
from shardcompute.node.reach.rungs import CALLBACK
from shardcompute.wire import Link
from shardcompute.wire.socket_link import SocketLink

_PREFIX = "callback "


class ExpectedCallback:
    """One that somebody waits for. Closing it refuses whoever comes later."""

    def __init__(self, callbacks: Callbacks, meeting: bytes, node: str) -> None:
        self._callbacks = callbacks
        self.meeting = meeting
        self.node = node
        self._changed = threading.Condition()
        self._link: Link | None = None
        self._is_closed = False

    def wait(self, patience_s: float) -> Link:
        """The link, once it has come; `LinkError` if it does not within this time."""
        with self._changed:
            self._changed.wait_for(lambda: self._link is not None, patience_s)
            link, self._link = self._link, None
        self.close()
        if link is None:
            raise LinkError(f"{self.node} did not call back", hint="no address of this node is open to it")
        return link

    def deliver(self, link: Link) -> bool:
        with self._changed:
            if self._is_closed or self._link is not None:
                return False
            self._link = link
            self._changed.notify_all()
            return True

    def close(self) -> None:
        self._callbacks.forget(self)
        with self._changed:
            self._is_closed = True
            left, self._link = self._link, None
        if left is not None:
            left.close()


class Callbacks:
    """Those that are expected, by their meetings. Methods may be called from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._expected: dict[str, ExpectedCallback] = {}

    def role(self, meeting: bytes) -> str:
        """The role in which a node calls back."""
        return _PREFIX + meeting.hex()

    def expect(self, meeting: bytes, node: str) -> ExpectedCallback:
        expected = ExpectedCallback(self, meeting, node)
        with self._lock:
            self._expected[self.role(meeting)] = expected
        return expected

    def is_expected(self, role: str, node: str) -> bool:
        with self._lock:
            expected = self._expected.get(role)
        return expected is not None and expected.node == node

    def take(self, link: Link) -> bool:
        """Whether this link is a callback; then it is somebody's, or closed."""
        if not link.role.startswith(_PREFIX):
            return False
        with self._lock:
            expected = self._expected.get(link.role)
        if isinstance(link, SocketLink):
            link.turn_round("", CALLBACK)
        if expected is None or expected.node != link.peer or not expected.deliver(link):
            link.close()
        return True

    def forget(self, expected: ExpectedCallback) -> None:
        role = self.role(expected.meeting)
        with self._lock:
            if self._expected.get(role) is expected:
                del self._expected[role]
