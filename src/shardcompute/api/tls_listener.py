"""TLS listener: accepts connections of an HTTPS server, within bounds that hold before a request can be seen.

A handshake has a deadline; beyond so many that are under way the oldest must go. Whoever speaks plain HTTP is told so,
and is not sent on to HTTPS: a client that has just shown its key to the whole network should be noticed.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import socket
import ssl
from collections.abc import Callable

from shardcompute.core.rate_limited_log import RateLimitedLog
from shardcompute.core.sockets.accepting import accept_one, until_readable, wait_after

_log = logging.getLogger(__name__)
_HANDSHAKE = b"\x16"
"""The first byte of every TLS connection, and of no HTTP request."""
_DRAIN_S = 1.0
_DRAIN_BYTES = 1 << 16
_PLAIN_BODY = json.dumps(
    {
        "error": {
            "message": "This server speaks HTTPS, and this was plain HTTP: whoever listens has seen what you sent.",
            "hint": "begin the address with https://; if you sent an API key, have it replaced",
            "type": "invalid_request_error",
            "param": None,
            "code": "https_required",
        }
    }
).encode()
_PLAIN_REPLY = (
    b"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\nconnection: close\r\n"
    b"content-length: %d\r\n\r\n%b" % (len(_PLAIN_BODY), _PLAIN_BODY)
)


class TlsListener:
    """Makes a protocol of `make_protocol` for each connection whose handshake succeeds. Used as asyncio's servers are:
    `close`, then `wait_closed`."""

    def __init__(
        self,
        listener: socket.socket,
        context: ssl.SSLContext,
        make_protocol: Callable[[], asyncio.Protocol],
        *,
        timeout_s: float,
        most_handshakes: int,
    ) -> None:
        self._listener = listener
        self._context = context
        self._make_protocol = make_protocol
        self._timeout_s = timeout_s
        self._most = most_handshakes
        self._limited_log = RateLimitedLog(_log)
        self._handshakes: dict[asyncio.Task[None], None] = {}
        """Oldest first."""
        self._untaken: set[socket.socket] = set()
        """Connections that no transport has yet."""
        self._accepting = asyncio.create_task(self._accept())

    def close(self) -> None:
        for task in (self._accepting, *self._handshakes):
            task.cancel()

    async def wait_closed(self) -> None:
        await asyncio.gather(self._accepting, *self._handshakes, return_exceptions=True)

    async def _accept(self) -> None:
        while True:
            try:
                connection = await accept_one(self._listener)
            except BlockingIOError:  # whoever knocked has gone again
                continue
            except OSError as error:
                self._limited_log.warning("accept", "a connection could not be accepted: %s", error)
                await wait_after(error)
                continue
            while len(self._handshakes) >= self._most:
                self._limited_log.warning("most", "more than %d handshakes at once", self._most)
                oldest = next(iter(self._handshakes))
                del self._handshakes[oldest]
                oldest.cancel()
            self._begin(connection)

    def _begin(self, connection: socket.socket) -> None:
        task = asyncio.create_task(self._shake_hands(connection))
        self._handshakes[task] = None
        self._untaken.add(connection)

        def end(done: asyncio.Task[None]) -> None:
            # Also of one that was ended before it began.
            self._handshakes.pop(done, None)
            if connection in self._untaken:
                self._untaken.discard(connection)
                connection.close()

        task.add_done_callback(end)

    async def _shake_hands(self, connection: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        try:
            connection.setblocking(False)
            async with asyncio.timeout(self._timeout_s):
                if await _begins_with(connection) not in (_HANDSHAKE, None):
                    await _refuse(connection)
                    return
            self._untaken.discard(connection)  # from here on its transport closes it
            await loop.connect_accepted_socket(
                self._make_protocol, connection, ssl=self._context, ssl_handshake_timeout=self._timeout_s
            )
        except (OSError, TimeoutError) as error:
            self._limited_log.info("handshake", "a TLS handshake with the API failed: %s", error)


async def _begins_with(connection: socket.socket) -> bytes | None:
    """The first byte that a client sends, left where it is; None where that cannot be found out."""
    if not await until_readable(connection):
        return None
    first = connection.recv(1, socket.MSG_PEEK)
    if not first:
        raise ConnectionResetError("the client left")
    return first


async def _refuse(connection: socket.socket) -> None:
    """Say what is wrong. What was sent is read first, or closing would wipe out the answer on its way."""
    loop = asyncio.get_running_loop()
    await loop.sock_sendall(connection, _PLAIN_REPLY)
    connection.shutdown(socket.SHUT_WR)
    left = _DRAIN_BYTES
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_DRAIN_S):
            while left > 0 and (piece := await loop.sock_recv(connection, 4096)):
                left -= len(piece)
