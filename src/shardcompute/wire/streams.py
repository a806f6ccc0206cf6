"""Bytes through a non-blocking socket, in the clear or through TLS, from two threads at once.

One thread may read while another writes. OpenSSL allows no two calls on one connection at the same time, and a
blocking read would keep writers out for as long as the peer is silent; so sockets never block: a call that
cannot proceed lets go, waits until the system says that it can, and tries again.
"""

from __future__ import annotations

import math
import select
import socket
import ssl
import sys
import threading
import time
from typing import Protocol

from shardcompute.wire.framing import Part

# A TLS record holds 16 KiB at most. Up to this size one copy is cheaper than another record and system call.
_JOIN_BYTES = 16 * 1024
# Below what any system allows in one scatter list.
_MAX_PARTS = 64
_WOULD_BLOCK = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)


class ByteStream(Protocol):
    """All methods but `prepare` raise `TimeoutError` at `deadline` (None: never) and other `OSError`s as they
    come."""

    def prepare(self, parts: list[Part]) -> list[Part]:
        """The same bytes, cut as suits this stream."""

    def read(self, space: memoryview, deadline: float | None) -> int:
        """Fill the beginning of `space` with what there is; 0 at the end of the stream."""

    def write(self, parts: list[Part], deadline: float | None) -> None:
        """Write all of `parts`."""


class PlainStream:
    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock

    def prepare(self, parts: list[Part]) -> list[Part]:
        # Windows has no scatter list for sockets.
        return [b"".join(parts)] if sys.platform == "win32" else parts

    def read(self, space: memoryview, deadline: float | None) -> int:
        while True:
            try:
                return self._sock.recv_into(space)
            except BlockingIOError:
                wait_until_ready(self._sock, select_write=False, deadline=deadline)

    def write(self, parts: list[Part], deadline: float | None) -> None:
        while parts:
            try:
                sent = self._send(parts)
            except BlockingIOError:
                wait_until_ready(self._sock, select_write=True, deadline=deadline)
            else:
                parts = drop_bytes(parts, sent)

    def _send(self, parts: list[Part]) -> int:
        if sys.platform != "win32" and len(parts) > 1:
            return self._sock.sendmsg(parts[:_MAX_PARTS])
        return self._sock.send(parts[0])


class TlsStream:
    """After its handshake. The socket must be non-blocking."""

    def __init__(self, sock: ssl.SSLSocket) -> None:
        self._sock = sock
        self._lock = threading.Lock()

    def prepare(self, parts: list[Part]) -> list[Part]:
        """The first record full: a header of its own would cost one more record and system call."""
        if sum(map(len, parts)) <= _JOIN_BYTES:
            return [b"".join(parts)]
        head, rest = bytearray(), list(parts)
        while len(head) < _JOIN_BYTES:
            piece = memoryview(rest[0])[: _JOIN_BYTES - len(head)]
            head += piece
            rest = drop_bytes(rest, len(piece))
        return [head, *rest]

    def read(self, space: memoryview, deadline: float | None) -> int:
        while True:
            try:
                with self._lock:
                    return self._sock.recv_into(space)
            except _WOULD_BLOCK as error:
                self._wait(error, deadline)

    def write(self, parts: list[Part], deadline: float | None) -> None:
        while parts:
            try:
                with self._lock:
                    sent = self._sock.send(parts[0])
            except _WOULD_BLOCK as error:
                self._wait(error, deadline)
            else:
                parts = drop_bytes(parts, sent)

    def _wait(self, error: OSError, deadline: float | None) -> None:
        # TLS may have to write before it can read on, and the other way round.
        select_write = isinstance(error, ssl.SSLWantWriteError)
        wait_until_ready(self._sock, select_write=select_write, deadline=deadline)


def drop_bytes(parts: list[Part], count: int) -> list[Part]:
    """`parts` without their first `count` bytes."""
    for index, part in enumerate(parts):
        if count < len(part):
            return [memoryview(part)[count:], *parts[index + 1 :]] if count else parts[index:]
        count -= len(part)
    return []


def wait_until_ready(sock: socket.socket, *, select_write: bool, deadline: float | None) -> None:
    """Return once the socket can be read (or written); `TimeoutError` at `deadline`."""
    left_s = None if deadline is None else deadline - time.monotonic()
    if left_s is not None and left_s <= 0:
        raise TimeoutError
    if sys.platform != "win32":
        poll = select.poll()
        poll.register(sock, select.POLLOUT if select_write else select.POLLIN)
        is_ready = bool(poll.poll(None if left_s is None else math.ceil(left_s * 1000)))
    else:
        reading, writing = ([], [sock]) if select_write else ([sock], [])
        is_ready = any(select.select(reading, writing, [], left_s))
    if not is_ready:
        raise TimeoutError
