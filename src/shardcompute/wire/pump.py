"""A link that is served by two threads of its own: one receives, one sends from a bounded queue.

`on_message` is called in the receiving thread, one message at a time; while it works nothing more is read, and
the peer feels that as back-pressure. `on_closed` is called exactly once for a started pump, after the last
message, with the reason, whoever ended the link. An exception in `on_message` ends the link with it.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import Self

from shardcompute.core.errors import LinkClosedError, LinkError
from shardcompute.wire.framing import Body
from shardcompute.wire.links import Link
from shardcompute.wire.messages import Message
from shardcompute.wire.warmth import Warmth, WarmthPolicy


class LinkPump:
    """Owns `link`. Start it with `start()` or as a context manager; leaving the block closes it."""

    def __init__(
        self,
        link: Link,
        on_message: Callable[[Message, memoryview], None],
        on_closed: Callable[[LinkError], None],
        *,
        capacity_frames: int = 64,
        on_sent: Callable[[int, float], None] | None = None,
        warmth: WarmthPolicy | None = None,
    ) -> None:
        """`on_sent` hears, in the sending thread, how many bytes of a body went out and in how many seconds. With
        `warmth` the link is padded while nothing is queued."""
        self.link = link
        self._on_message = on_message
        self._on_closed = on_closed
        self._on_sent = on_sent
        self._warmth = None if warmth is None else Warmth(warmth, time.monotonic())
        self._capacity = capacity_frames
        self._queue: deque[tuple[Message, Body]] = deque()
        self._changed = threading.Condition()
        self._is_sending = False
        self._is_closing = False
        self._failure: LinkError | None = None
        self._sender = threading.Thread(target=self._send_all, name=f"send {link.peer}", daemon=True)
        self._receiver = threading.Thread(target=self._receive_all, name=f"receive {link.peer}", daemon=True)

    def start(self) -> None:
        self._sender.start()
        self._receiver.start()

    def offer(self, message: Message, body: Body = (), timeout_s: float | None = 0.0) -> bool:
        """Queue a frame; False if the queue stayed full for `timeout_s` (None: wait as long as it takes).

        The body's buffers are kept, not copied: leave them unchanged. `LinkClosedError` once closed.
        """
        with self._changed:
            has_room = self._changed.wait_for(
                lambda: self._is_closing or len(self._queue) < self._capacity, timeout_s
            )
            if self._is_closing:
                reason = self._failure.message if self._failure else "it was closed here"
                raise LinkClosedError(f"nothing can be sent to {self.link.peer!r} any more: {reason}")
            if has_room:
                self._queue.append((message, body))
                self._changed.notify_all()
            return has_room

    @property
    def backlog(self) -> int:
        """Frames that were offered and are not out yet."""
        with self._changed:
            return len(self._queue) + self._is_sending

    def close(self, drain_s: float = 0.0) -> None:
        """Close the link and end both threads; first give what is queued `drain_s` to go out.

        May be called from the callbacks too, and any number of times. From any other thread it returns after
        the last callback, so hold no lock that they need.
        """
        with self._changed:
            self._is_closing = True
            if drain_s <= 0:
                self._queue.clear()
            self._changed.notify_all()
        self._join(self._sender, drain_s)
        with self._changed:
            self._queue.clear()
        self.link.close()
        self._join(self._sender)
        self._join(self._receiver)

    def _send_all(self) -> None:
        while True:
            with self._changed:
                warmth = self._warmth
                wait_s = None if warmth is None else warmth.wait_s(time.monotonic())
                self._changed.wait_for(lambda: self._is_closing or self._queue, wait_s)
                if self._queue:
                    message, body = self._queue.popleft()
                    is_padding = False
                elif self._is_closing or warmth is None:
                    return
                else:
                    message, body = warmth.padding(time.monotonic())
                    is_padding = True
                self._is_sending = not is_padding
                self._changed.notify_all()
            try:
                started = time.perf_counter()
                self.link.send(message, body)
                self._is_sending = False
                if not is_padding:
                    self._note_sent(body, time.perf_counter() - started)
            except Exception as error:
                self._fail(error, f"sending {type(message).__name__}")
                return

    def _note_sent(self, body: Body, seconds: float) -> None:
        if self._warmth is not None:
            self._warmth.used(time.monotonic())
        if self._on_sent is not None:
            self._on_sent(sum(memoryview(part).nbytes for part in body), seconds)

    def _receive_all(self) -> None:
        what = "receiving"
        try:
            while True:
                what = "receiving"
                message, body = self.link.receive()
                what = f"taking in {type(message).__name__}"
                self._on_message(message, body)
        except Exception as error:
            failure = self._fail(error, what)
        self._join(self._sender)
        self._on_closed(failure)

    def _fail(self, error: Exception, what: str) -> LinkError:
        """Close the link for this reason, unless there was one before. Returns the first."""
        if not isinstance(error, LinkError):
            cause = error
            error = LinkError(f"{what} failed on the link to {self.link.peer!r}: {cause!r}")
            error.__cause__ = cause
        with self._changed:
            self._is_closing = True
            self._failure = self._failure or error
            failure = self._failure
            self._queue.clear()
            self._changed.notify_all()
        self.link.close()
        return failure

    def _join(self, thread: threading.Thread, timeout_s: float | None = None) -> None:
        if thread.ident is not None and thread is not threading.current_thread():
            thread.join(timeout_s)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
