"""HTTP server: runs the application under uvicorn until a signal, or until it is told to stop.

A port that is taken is the most common first mistake, so the error names who holds it where the system tells.
"""

from __future__ import annotations

import asyncio
import errno
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import psutil
import uvicorn
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from shardcompute.api.connections import BoundedConnection, ConnectionLimits
from shardcompute.api.errors import error_response
from shardcompute.api.tls_listener import TlsListener
from shardcompute.core.errors import CapacityError, UsageError
from shardcompute.security.https.server import ServerTls
from shardcompute.security.https.sources import KeyedCertificate

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_BACKLOG = 2048
_HANDSHAKE_S = 10.0
CERTIFICATE_EVERY_S = 5.0


async def serve(
    app: ASGIApp,
    host: str = "127.0.0.1",
    port: int = 8000,
    *,
    on_listening: Callable[[str, int], None] | None = None,
    stop: asyncio.Event | None = None,
    grace_s: int = 5,
    limits: ConnectionLimits | None = None,
    tls: ServerTls | None = None,
    on_certificate: Callable[[KeyedCertificate], None] = lambda certificate: None,
    certificate_every_s: float = CERTIFICATE_EVERY_S,
) -> None:
    """Serves until SIGINT, SIGTERM, `stop` or cancellation; then open requests get `grace_s` to end.

    `on_listening` is told the address once connections are accepted (port 0 picks a free one). Signals are
    watched only in the main thread; a second one ends the grace. UsageError when the address cannot be used.
    With `tls` it speaks HTTPS; every `certificate_every_s` it looks for another certificate, shows it, and tells
    `on_certificate`.
    """
    listener = await bind(host, port)
    limits = limits or ConnectionLimits()
    config = uvicorn.Config(
        _with_shutdown_reply(app, lambda: server.should_exit),
        http=BoundedConnection.bounded(limits),
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=grace_s,
        # So many are accepted in one go, before any of them is counted.
        backlog=max(1, min(_BACKLOG, limits.most_connections // 4)),
    )
    server = _UnsignalledServer(config, tls, most_handshakes=max(1, limits.most_connections // 4))
    watcher = asyncio.create_task(_watch(server, listener, on_listening, stop))
    renewing = asyncio.create_task(_renew(tls, on_certificate, certificate_every_s))
    try:
        with _signals(server):
            await server.serve(sockets=[listener])
    except asyncio.CancelledError:
        server.should_exit = True
        if server.started:
            await server.shutdown(sockets=[listener])
        raise
    finally:
        # uvicorn cancels what outlives the grace but does not wait for it.
        await asyncio.gather(*server.server_state.tasks, return_exceptions=True)
        watcher.cancel()
        renewing.cancel()
        await asyncio.gather(watcher, renewing, return_exceptions=True)
        await server.end_listening()
        listener.close()
        await server.hang_up()
    if watcher.done() and not watcher.cancelled():
        watcher.result()


async def bind(host: str, port: int) -> socket.socket:
    """A listening socket; UsageError that says why not."""
    if not 0 <= port <= 65535:
        raise UsageError(f"{port} is not a port.", hint="choose one from 1 to 65535, or 0 for any free one")
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise UsageError(
            f"The address {host!r} is unknown: {error}.", hint="use 127.0.0.1 or 0.0.0.0"
        ) from error
    family, kind, protocol, _, address = found[0]
    listener = socket.socket(family, kind, protocol)
    try:
        if hasattr(signal, "SIGHUP"):  # On Windows this option would let two servers share the port.
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            # On every address means those of IPv4, too, whatever the system's own choice is.
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, int(address[0] != "::"))
        listener.bind(address)
        listener.listen(_BACKLOG)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        raise _explain(error, host, port) from error
    return listener


def port_holder(port: int) -> str | None:
    """Who listens on `port`, as `name (pid 123)`; None when nobody does or the system does not tell."""
    try:
        for connection in psutil.net_connections(kind="tcp"):
            if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port and connection.pid:
                return f"{psutil.Process(connection.pid).name()} (pid {connection.pid})"
    except (psutil.Error, OSError):
        return None
    return None


class _UnsignalledServer(uvicorn.Server):
    """uvicorn without its signal handling, which ends the process by raising the signal again; with `tls`, behind a
    `TlsListener`."""

    def __init__(self, config: uvicorn.Config, tls: ServerTls | None, *, most_handshakes: int) -> None:
        super().__init__(config)
        self._tls = tls
        self._most_handshakes = most_handshakes
        self._listeners: list[TlsListener] = []

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets if self._tls is None else [])
        for listener in sockets or ():
            listener.listen(_BACKLOG)  # more than are accepted in one go may wait
            if self._tls is not None:
                self._listeners.append(
                    TlsListener(
                        listener,
                        self._tls.context,
                        self._make_connection,
                        timeout_s=_HANDSHAKE_S,
                        most_handshakes=self._most_handshakes,
                    )
                )

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await self.end_listening()
        await super().shutdown(sockets)

    async def end_listening(self) -> None:
        """Accept no more connections that need a handshake."""
        listeners, self._listeners = self._listeners, []
        for listener in listeners:
            listener.close()
        for listener in listeners:
            await listener.wait_closed()

    async def hang_up(self) -> None:
        """On connections that came while the server stopped, and on clients that do not read their answers."""
        for connection in list(self.server_state.connections):
            connection.transport.abort()
        await asyncio.sleep(0)

    def _make_connection(self) -> asyncio.Protocol:
        made: asyncio.Protocol = self.config.http_protocol_class(
            config=self.config, server_state=self.server_state, app_state=self.lifespan.state
        )  # type: ignore[call-arg]
        return made

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _with_shutdown_reply(app: ASGIApp, is_stopping: Callable[[], bool]) -> ASGIApp:
    """Requests that are cut off by the end of the grace get a 503, or a closed connection once they began."""

    async def run(scope: Scope, receive: Receive, send: Send) -> None:
        has_begun = False

        async def send_noting(message: Message) -> None:
            nonlocal has_begun
            has_begun = True
            await send(message)

        try:
            await app(scope, receive, send_noting)
        except asyncio.CancelledError:
            if not is_stopping():
                raise
            if not has_begun:
                stopped = CapacityError("The server is stopping.", hint="send the request again later")
                await error_response(stopped)(scope, receive, send)

    return run


async def _watch(
    server: uvicorn.Server,
    listener: socket.socket,
    on_listening: Callable[[str, int], None] | None,
    stop: asyncio.Event | None,
) -> None:
    """Connections queue in the kernel since `bind`, so the address can be told at once."""
    if on_listening is not None:
        host, port = listener.getsockname()[:2]
        try:
            on_listening(host, port)
        except BaseException:
            server.should_exit = True
            raise
    if stop is not None:
        await stop.wait()
        server.should_exit = True


async def _renew(
    tls: ServerTls | None, on_certificate: Callable[[KeyedCertificate], None], every_s: float
) -> None:
    while tls is not None:
        await asyncio.sleep(every_s)
        found = await asyncio.to_thread(tls.look)
        if found is not None:
            tls.show(found)
            on_certificate(found)


@contextmanager
def _signals(server: uvicorn.Server) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(number: int, frame: object) -> None:
        server.force_exit = server.should_exit
        server.should_exit = True

    previous = {number: signal.signal(number, end) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, former in previous.items():
            signal.signal(number, former)


def _explain(error: OSError, host: str, port: int) -> UsageError:
    if error.errno == errno.EADDRINUSE:
        holder = port_holder(port)
        return UsageError(
            f"Port {port} is already in use" + (f" by {holder}." if holder else "."),
            hint="stop that process or choose another port",
        )
    if error.errno == errno.EACCES:
        return UsageError(f"Port {port} may not be used by this user.", hint="choose a port above 1023")
    return UsageError(
        f"Cannot listen on {host}:{port}: {error.strerror}.",
        hint="use an address of this machine, or 0.0.0.0",
    )
