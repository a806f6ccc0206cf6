"""An HTTP server in a thread, and requests written by hand."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import Any, Self

from starlette.types import ASGIApp

from shardcompute.api import serve
from shardcompute.api.connections import ConnectionLimits

TIMEOUT_S = 60.0


class ApiServer:
    """Serves an application on loopback, on any free port unless one is given; leaving the block stops it."""

    def __init__(self, app: ASGIApp, port: int = 0, limits: ConnectionLimits | None = None) -> None:
        self._app = app
        self._limits = limits
        self._listening = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), name="api server")
        self.port = port

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._listening.wait(60)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    def connect(self, *, receive_bytes: int | None = None) -> socket.socket:
        sock = socket.socket()
        if receive_bytes is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        sock.settimeout(TIMEOUT_S)
        sock.connect(("127.0.0.1", self.port))
        return sock

    def ask(self, content: bytes) -> tuple[int, bytes]:
        """Status and body of what comes back for these bytes; 0 if the connection ends without a word."""
        return ask_port(self.port, content)

    def post(self, path: str, body: Mapping[str, Any], key: str = "key") -> tuple[int, Any]:
        status, content = self.ask(request(path, json.dumps(body).encode(), key=key))
        return status, json.loads(content)

    async def _run(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        await serve(
            self._app,
            port=self.port,
            stop=self._stop,
            on_listening=self._tell,
            grace_s=1,
            limits=self._limits,
        )

    def _tell(self, host: str, port: int) -> None:
        self.port = port
        self._listening.set()


def ask_port(port: int, content: bytes, *, timeout_s: float = TIMEOUT_S) -> tuple[int, bytes]:
    """Status and body of what a server on this machine says to these bytes; 0 if it ends without a word."""
    with socket.create_connection(("127.0.0.1", port), timeout_s) as sock:
        # It may have answered already, and hung up.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            sock.sendall(content)
        return read_answer(sock)


def request(
    path: str,
    body: bytes = b"",
    *,
    method: str = "POST",
    key: str = "key",
    headers: str = "",
    host: str = "127.0.0.1",
) -> bytes:
    """Ends the connection after the answer."""
    head = (
        f"{method} {path} HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\nauthorization: Bearer {key}\r\n"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\n{headers}\r\n"
    )
    return head.encode() + body


def read_all(sock: socket.socket) -> Iterator[bytes]:
    """What comes until the connection ends, politely or not."""
    with contextlib.suppress(ConnectionResetError):
        while chunk := sock.recv(65536):
            yield chunk


def read_answer(sock: socket.socket) -> tuple[int, bytes]:
    content = b"".join(read_all(sock))
    head, _, body = content.partition(b"\r\n\r\n")
    return (int(head.split(b" ")[1]), body) if head else (0, b"")
