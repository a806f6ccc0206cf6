"""One socket to one peer: frames out and in, without ever blocking.

A frame that is expected is read with its head in one system call, straight to where it belongs. Where something else
comes, what was read beyond its head is taken back and looked at in order. Nothing is read beyond what is expected, so
that what a peer sends ahead stays in the system's buffers, and slows it down there.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import sys
from collections import deque

from shardcompute.collectives.fabrics.fabric import (
    ExpectedFrame,
    OutgoingFrame,
    PeerAbortedError,
    PeerFailedError,
    frame_space,
    judge_head,
    read_reason,
)
from shardcompute.collectives.fabrics.frames import HEAD_BYTES, FrameKind
from shardcompute.wire.framing import Part
from shardcompute.wire.socket_link import shut_down
from shardcompute.wire.streams import PlainStream, TlsStream, drop_bytes

_WOULD_BLOCK = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)
_SKIPPED_BYTES = 1 << 16
_MOST_PARTS = 64


class PeerConnection:
    """`early` is what was already read from the socket, which must be non-blocking."""

    def __init__(self, peer: int, sock: socket.socket, early: bytes = b"") -> None:
        self.peer = peer
        self.sock = sock
        self.refused_frames = 0
        self.wants_write = False
        self.sending: list[Part] = []
        self.waiting: deque[ExpectedFrame] = deque()
        is_tls = isinstance(sock, ssl.SSLSocket)
        self._stream = TlsStream(sock) if isinstance(sock, ssl.SSLSocket) else PlainStream(sock)
        self._can_scatter = not is_tls
        self._early = bytearray(early)
        self._head = bytearray(HEAD_BYTES)
        self._head_view = memoryview(self._head)
        self._head_filled = 0
        self._body: memoryview | None = None
        self._filled = 0
        self._skip_bytes = 0
        self._blamed: int | None = None

    def send(self, frame: OutgoingFrame) -> None:
        """Begin to send; `push` goes on with it."""
        parts: list[Part] = [frame.head, frame.body] if len(frame.body) else [frame.head]
        self.sending += self._stream.prepare(parts)

    def push(self) -> bool:
        """Write what the system takes now; True once all is out."""
        try:
            while self.sending:
                self.sending = drop_bytes(self.sending, self._write())
        except _WOULD_BLOCK:
            return False
        except OSError as error:
            raise self._lost(error) from error
        return True

    def pull(self) -> bool:
        """Read what there is; True once every frame that is waited for has come."""
        self.wants_write = False
        try:
            while self.waiting:
                if self._pull_frame(self.waiting[0]):
                    self.waiting.popleft()
        except _WOULD_BLOCK as error:
            self.wants_write = isinstance(error, ssl.SSLWantWriteError)
            return False
        except OSError as error:
            raise self._lost(error) from error
        return True

    def end(self, farewell: bytes) -> None:
        """Say that the world is over, if that can be said at once, and nothing more."""
        with contextlib.suppress(OSError):
            # In the middle of a frame it could not be told from the frame.
            if not self.sending:
                self.sock.send(farewell)
        with contextlib.suppress(OSError):
            socket.socket.shutdown(self.sock, socket.SHUT_WR)

    def interrupt(self) -> None:
        shut_down(self.sock)

    def close(self) -> None:
        self.sock.close()

    @property
    def needs(self) -> tuple[bool, bool]:
        """Whether the socket must be readable, and writable, before `push` or `pull` can go on."""
        return bool(self.waiting), bool(self.sending) or self.wants_write

    def _pull_frame(self, receive: ExpectedFrame) -> bool:
        """True once the frame has come. False: what came was to be skipped."""
        if self._skip_bytes:
            self._skip()
            return False
        if self._body is None:
            self._pull_head(receive)
        body = self._body
        if body is None:
            return False
        while self._filled < len(body):
            self._filled += self._read(body[self._filled :])
        self._head_filled, self._filled, self._body = 0, 0, None
        if self._blamed is not None:
            raise PeerAbortedError(self._blamed, read_reason(body))
        return True

    def _pull_head(self, receive: ExpectedFrame) -> None:
        """Read a head, with as much of what follows it as comes along; say where the rest belongs."""
        surplus = 0
        body = receive.body
        is_fresh = not self._head_filled and not self._early
        if sys.platform != "win32" and self._can_scatter and body is not None and is_fresh:
            count = self.sock.recvmsg_into((self._head_view, body))[0]
            if count == 0:
                raise self._gone()
            self._head_filled = min(count, HEAD_BYTES)
            surplus = count - self._head_filled
        while self._head_filled < HEAD_BYTES:
            self._head_filled += self._read(self._head_view[self._head_filled :])
        if body is not None and self._head == receive.expected:
            self._body, self._filled = body, surplus
            return
        if body is not None and surplus:
            self._early[:0] = body[:surplus]
        self._begin_judged(receive)

    def _begin_judged(self, receive: ExpectedFrame) -> None:
        head = judge_head(self._head, receive)
        if head is None:
            self.refused_frames += 1
            self._skip_bytes = int.from_bytes(self._head[24:32], "little")
            self._head_filled = 0
            return
        if head.kind == FrameKind.ABORT:
            self._blamed = head.rank
            self._body = memoryview(bytearray(head.body_bytes))
        else:
            self._body = frame_space(head, receive)
        self._filled = 0

    def _skip(self) -> None:
        while self._skip_bytes:
            self._skip_bytes -= self._read(memoryview(bytearray(min(self._skip_bytes, _SKIPPED_BYTES))))

    def _write(self) -> int:
        if sys.platform != "win32" and self._can_scatter:
            return self.sock.sendmsg(self.sending[:_MOST_PARTS])
        return self.sock.send(self.sending[0])

    def _read(self, space: memoryview) -> int:
        if self._early:
            count = min(len(self._early), len(space))
            space[:count] = self._early[:count]
            del self._early[:count]
            return count
        count = self.sock.recv_into(space)
        if count == 0:
            raise self._gone()
        return count

    def _gone(self) -> PeerFailedError:
        return PeerFailedError(self.peer, "it has ended the connection", hint="the rank may have stopped")

    def _lost(self, error: OSError) -> PeerFailedError:
        return PeerFailedError(
            self.peer,
            f"the connection broke: {error.strerror or error}",
            hint="the rank may have stopped or lost its network",
        )
