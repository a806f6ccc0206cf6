"""The way to a relay: a plain connection, or a WebSocket, through an HTTP proxy where the environment names one.

TLS between members needs a socket, so what a WebSocket carries comes out of one end of a socket pair, and a thread
moves bytes between the other end and the network.
"""

from __future__ import annotations

import base64
import contextlib
import errno
import os
import selectors
import socket
import ssl
import threading
import time
from urllib.parse import SplitResult, unquote, urlsplit

from shardcompute.core.errors import LinkError, UsageError
from shardcompute.core.sockets.connecting import connect
from shardcompute.core.sockets.keepalive import keep_alive
from shardcompute.core.sockets.secure_socket import SecureSocket
from shardcompute.relay.websocket import (
    MOST_HEAD_BYTES,
    FrameDecoder,
    check_response,
    encode_frame,
    request_head,
)

_PORTS = {"tcp": 7422, "ws": 80, "wss": 443}
PLAIN_DOOR = "relay://"
DOORS = (PLAIN_DOOR, "ws://", "wss://")
"""How addresses begin that lead through a relay to the coordinator behind it."""
_BUFFER_BYTES = 1 << 16
_WOULD_BLOCK = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)
_HINT = "check the relay's address and that it is running"


def check_relay_url(url: str) -> str:
    """The URL itself; `UsageError` unless it names a relay as tcp://host:port, ws:// or wss://."""
    _split(url)
    return url


def door_url(url: str) -> str:
    """The address of a relay as that of a door by which its coordinator is reached: others of the same form are
    addresses of nodes."""
    return url.replace("tcp://", PLAIN_DOOR, 1) if url.startswith("tcp://") else url


def connect_relay(url: str, timeout_s: float, *, source: tuple[str, int] | None = None) -> socket.socket:
    """A connected socket whose other end is the relay's door; `LinkError` where there is no way. `source` is the
    address and port to come from, on a plain connection."""
    parts = _split(url.replace(PLAIN_DOOR, "tcp://", 1))
    host, port = parts.hostname or "", parts.port or _PORTS[parts.scheme]
    deadline = time.monotonic() + timeout_s
    try:
        if parts.scheme == "tcp":
            return _connect(host, port, timeout_s, source)
        sock = _connect_web(parts.scheme, host, port, deadline)
        try:
            head, expected = request_head(f"{host}:{port}")
            sock.sendall(head)
            answer, rest = _read_head(sock, deadline)
            check_response(answer, expected)
            return _pumped(sock, rest)
        except BaseException:
            sock.close()
            raise
    except OSError as error:
        raise LinkError(f"{url} cannot be reached: {error.strerror or error}", hint=_HINT) from error


def _split(url: str) -> SplitResult:
    parts = urlsplit(url)
    try:
        is_good = parts.scheme in _PORTS and bool(parts.hostname) and (parts.port or parts.scheme != "tcp")
    except ValueError:
        is_good = False
    if not is_good:
        raise UsageError(
            f"{url[:80]!r} is no relay's address", hint="write tcp://host:port, ws://host or wss://host"
        )
    return parts


def _connect(host: str, port: int, timeout_s: float, source: tuple[str, int] | None) -> socket.socket:
    if source is None:
        sock = connect(host, port, timeout_s)
        keep_alive(sock)
        return sock
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    family = socket.AF_INET6 if ":" in source[0] else socket.AF_INET
    address = next((each[4] for each in found if each[0] == family), None)
    if address is None:
        raise OSError(errno.EAFNOSUPPORT, os.strerror(errno.EAFNOSUPPORT))
    sock = bound_socket(family, source)
    try:
        sock.settimeout(max(timeout_s, 0.01))
        sock.connect(address)
    except BaseException:
        sock.close()
        raise
    return sock


def bound_socket(family: int, source: tuple[str, int]) -> socket.socket:
    """A socket that leaves from this address and port, which others of this process may use, too."""
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if hasattr(socket, "SO_REUSEPORT"):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        sock.bind(source)
    except BaseException:
        sock.close()
        raise
    return sock


def _connect_web(scheme: str, host: str, port: int, deadline: float) -> socket.socket:
    """To a web server, or to the proxy that the environment names for it and through it."""
    proxy = _proxy_for("https" if scheme == "wss" else "http", host, port)
    if proxy is None:
        sock = _connect(host, port, deadline - time.monotonic(), None)
    else:
        sock = _connect(proxy.hostname or "", proxy.port or 3128, deadline - time.monotonic(), None)
    try:
        if proxy is not None:
            _ask_proxy(sock, proxy, host, port, deadline)
        if scheme == "wss":
            sock.settimeout(max(deadline - time.monotonic(), 0.01))
            # What passes is inside TLS of the members' own, with certificates that they check: this layer only looks
            # like the web to what lies between.
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
            context.sslsocket_class = SecureSocket
            sock = context.wrap_socket(sock, server_hostname=host)
    except BaseException:
        sock.close()
        raise
    return sock


def _proxy_for(scheme: str, host: str, port: int) -> SplitResult | None:
    """The proxy of HTTP_PROXY, HTTPS_PROXY or ALL_PROXY, unless NO_PROXY names the host."""
    # Imported here: it brings a whole HTTP client along, which a worker on an open network does without.
    from urllib.request import getproxies_environment, proxy_bypass

    proxies = getproxies_environment()
    named = proxies.get(scheme) or proxies.get("all")
    if not named or proxy_bypass(f"{host}:{port}"):
        return None
    parts = urlsplit(named if "://" in named else f"http://{named}")
    if parts.scheme != "http" or not parts.hostname:
        raise LinkError(
            f"the proxy that the environment names ({parts.scheme}://{parts.hostname}) is none for HTTP",
            hint="set HTTPS_PROXY to http://host:port, or NO_PROXY to the relay's host",
        )
    return parts


def _ask_proxy(sock: socket.socket, proxy: SplitResult, host: str, port: int, deadline: float) -> None:
    target = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    lines = [f"CONNECT {target} HTTP/1.1", f"Host: {target}"]
    if proxy.username is not None:
        pair = f"{unquote(proxy.username)}:{unquote(proxy.password or '')}"
        lines.append(f"Proxy-Authorization: Basic {base64.b64encode(pair.encode()).decode()}")
    sock.sendall("\r\n".join([*lines, "", ""]).encode("latin-1"))
    head, _ = _read_head(sock, deadline)
    status = head.split(b"\r\n", 1)[0].decode("latin-1")
    if status.split(" ")[1:2] != ["200"]:
        raise LinkError(
            f"the proxy {proxy.hostname} does not connect to {target}: {status[:80]!r}",
            hint="ask who runs it, or set NO_PROXY to the relay's host",
        )


def _read_head(sock: socket.socket, deadline: float) -> tuple[bytes, bytes]:
    """The head of an answer, and what came after it."""
    data = b""
    while b"\r\n\r\n" not in data:
        sock.settimeout(max(deadline - time.monotonic(), 0.01))
        more = sock.recv(4096)
        data += more
        if not more or len(data) > MOST_HEAD_BYTES:
            raise LinkError("whoever answered does not speak HTTP", hint=_HINT)
    head, _, rest = data.partition(b"\r\n\r\n")
    return head, rest


def _pumped(sock: socket.socket, received: bytes) -> socket.socket:
    """One end of a pair, whose other end is moved to and from the WebSocket on `sock` until either ends."""
    ours, theirs = socket.socketpair()
    pump = _Pump(sock, ours)
    threading.Thread(target=pump.run, args=(received,), name="websocket", daemon=True).start()
    return theirs


class _Pump:
    """Moves bytes in one thread, which owns both sockets: TLS allows no two calls on a connection at a time. Of each
    direction one read is kept at most, so whoever is slow to take slows down who sends."""

    def __init__(self, sock: socket.socket, inside: socket.socket) -> None:
        self._sock = sock
        self._inside = inside
        self._frames = FrameDecoder(is_server=False)
        self._to_net = b""
        self._to_inside = b""
        self._wants_write = False

    def run(self, received: bytes) -> None:
        with self._sock, self._inside, selectors.DefaultSelector() as selector:
            self._sock.setblocking(False)
            self._inside.setblocking(False)
            with contextlib.suppress(OSError, LinkError):
                self._take_in(received)
                while self._turn(selector):
                    pass

    def _turn(self, selector: selectors.BaseSelector) -> bool:
        """Wait until something can be moved, and move it; False once either side has ended."""
        _watch(selector, self._sock, not self._to_inside, bool(self._to_net) or self._wants_write)
        _watch(selector, self._inside, not self._to_net, bool(self._to_inside))
        is_pending = isinstance(self._sock, ssl.SSLSocket) and self._sock.pending() and not self._to_inside
        selector.select(0 if is_pending else None)
        self._wants_write = False
        with contextlib.suppress(*_WOULD_BLOCK):
            while self._to_inside:
                self._to_inside = self._to_inside[self._inside.send(self._to_inside) :]
        try:
            while self._to_net:
                self._to_net = self._to_net[self._sock.send(self._to_net) :]
            if not self._to_inside:
                data = self._sock.recv(_BUFFER_BYTES)
                if not data or self._frames.is_closed:
                    return False
                self._take_in(data)
        except _WOULD_BLOCK as error:
            self._wants_write = isinstance(error, ssl.SSLWantWriteError)
        if not self._to_net:
            with contextlib.suppress(BlockingIOError):
                data = self._inside.recv(_BUFFER_BYTES)
                self._to_net += encode_frame(data, masks=True)
                return bool(data)
        return True

    def _take_in(self, data: bytes) -> None:
        self._to_inside += self._frames.feed(data)
        self._to_net += self._frames.take_replies()


def _watch(selector: selectors.BaseSelector, sock: socket.socket, reads: bool, writes: bool) -> None:
    wanted = (selectors.EVENT_READ if reads else 0) | (selectors.EVENT_WRITE if writes else 0)
    known = selector.get_map().get(sock.fileno())
    if known is None and wanted:
        selector.register(sock, wanted)
    elif known is not None and not wanted:
        selector.unregister(sock)
    elif known is not None and known.events != wanted:
        selector.modify(sock, wanted)
