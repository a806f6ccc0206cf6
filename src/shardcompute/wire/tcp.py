"""Links over TCP: `tcp://host:port`, with TLS where the options carry a context.

A node of the same user on the same machine is reached through a Unix socket beside its port (`local_sockets`).

A listener has one thread that accepts. TLS and introductions of each connection run in a thread of their own
with a deadline, so that a slow or silent peer delays nobody. Connections beyond `max_pending` wait in the
system's queue until one is through, or has had its moment and must make room.
"""

from __future__ import annotations

import contextlib
import logging
import selectors
import socket
import sys
import threading
import time
from collections import deque
from dataclasses import dataclass
from urllib.parse import urlsplit

from shardcompute.core.closing import Closing
from shardcompute.core.errors import LinkClosedError, LinkError, UsageError
from shardcompute.core.rate_limited_log import RateLimitedLog
from shardcompute.core.sockets.connecting import connect
from shardcompute.core.sockets.hosts import bracketed, plain_address
from shardcompute.core.sockets.listening import listen
from shardcompute.wire.links import DEFAULT_OPTIONS, Admit, LinkOptions
from shardcompute.wire.local_sockets import LocalSocket, LocalSockets, check_peer_user
from shardcompute.wire.messages import Hello
from shardcompute.wire.socket_link import SocketLink, answer_link, open_link, shut_down, wrap_answering

_log = logging.getLogger(__name__)
_BACKLOG = 128
_RETRY_S = 0.1
_HERE = "a process on this machine"
# An honest peer is through by then, unless this machine is very busy.
_MOMENT_S = 0.5
# A peer that vanished without a word is noticed after about half a minute, idle or not.
_TCP_OPTIONS = (
    ("TCP_NODELAY", 1),
    ("TCP_KEEPIDLE", 15),
    ("TCP_KEEPALIVE", 15),
    ("TCP_KEEPINTVL", 5),
    ("TCP_KEEPCNT", 3),
    ("TCP_USER_TIMEOUT", 30_000),
)
# Linux sends again ever later on a line that is silent, so that links would sleep on for as long as a blackout was.
# Small frames are sent again at a steady pace at first, and all of them at least once a second (since Linux 6.15).
_LINUX_OPTIONS = ((16, 1), (44, 1000))
"""TCP_THIN_LINEAR_TIMEOUTS and TCP_RTO_MAX_MS, which Python has no names for."""


class TcpTransport:
    """`local`: the sockets through which nodes of this machine reach each other, where both show certificates."""

    def __init__(self, local: LocalSockets | None = None) -> None:
        self._local = local

    def dial(self, url: str, ours: Hello, options: LinkOptions = DEFAULT_OPTIONS) -> SocketLink:
        host, port = split_address(url)
        if self._local is not None and options.tls is not None and options.node:
            near = self._local.connect(options.node, port, options.handshake_timeout_s)
            if near is not None:
                return open_link(near, url, options.server_name or host, ours, options, is_local=True)
        try:
            sock = connect(host, port, options.handshake_timeout_s)
        except OSError as error:
            raise LinkError(
                f"{url} cannot be reached: {error.strerror or error}",
                hint="check that the node is running and that no firewall is in the way",
            ) from error
        tune_socket(sock, options.congestion)
        return open_link(sock, url, options.server_name or host, ours, options)

    def listen(
        self, url: str, ours: Hello, options: LinkOptions = DEFAULT_OPTIONS, admit: Admit | None = None
    ) -> TcpListener:
        host, port = split_address(url)
        try:
            sock = listen(host, port, _BACKLOG)
        except OSError as error:
            raise LinkError(
                f"{url} cannot be listened at: {error.strerror or error}",
                hint="choose an address of this machine and a free port (0 lets the system choose)",
            ) from error
        near: LocalSocket | None = None
        if self._local is not None and options.tls is not None:
            near = self._local.listen(ours.node, sock.getsockname()[1])
        return TcpListener(sock, ours, options, admit, near)


@dataclass(slots=True)
class _Pending:
    """A connection that is not introduced yet; None once its fate is decided."""

    sock: socket.socket | None
    began_s: float

    def hang_up(self) -> None:
        if self.sock is not None:
            shut_down(self.sock)


class TcpListener(Closing):
    def __init__(
        self,
        sock: socket.socket,
        ours: Hello,
        options: LinkOptions,
        admit: Admit | None,
        near: LocalSocket | None = None,
    ) -> None:
        self.address = join_address(*sock.getsockname()[:2])
        self._sock = sock
        self._near = near
        self._ours = ours
        self._options = options
        self._admit = admit
        self._limited_log = RateLimitedLog(_log)
        self._slots = threading.Semaphore(options.max_pending)
        self._changed = threading.Condition()
        self._is_closed = False
        self._ready: deque[SocketLink] = deque()
        self._pending: dict[threading.Thread, _Pending] = {}
        self._wake, self._woken = socket.socketpair()
        for listening in self._listening():
            listening.setblocking(False)
        self._acceptor = threading.Thread(target=self._run, name=f"accept {self.address}", daemon=True)
        self._acceptor.start()

    def accept(self, timeout_s: float | None = None) -> SocketLink:
        with self._changed:
            if not self._changed.wait_for(lambda: self._is_closed or self._ready, timeout_s):
                raise TimeoutError(f"nobody dialled {self.address}")
            if self._is_closed:
                raise LinkClosedError(f"the listener at {self.address} is closed")
            link = self._ready.popleft()
        self._slots.release()
        return link

    def close(self) -> None:
        with self._changed:
            if self._is_closed:
                return
            self._is_closed = True
            waiting = list(self._ready)
            self._ready.clear()
            for pending in self._pending.values():
                pending.hang_up()
            self._changed.notify_all()
        self._wake.close()
        self._slots.release()
        for link in waiting:
            link.close()
        self._acceptor.join()
        with self._changed:
            threads = list(self._pending)
        for thread in threads:
            thread.join()

    def _run(self) -> None:
        """Receive connections and give each its own thread, until closed."""
        with contextlib.ExitStack() as opened:
            if self._near is not None:
                opened.callback(self._near.close)
            opened.enter_context(self._sock)
            opened.enter_context(self._woken)
            selector = opened.enter_context(selectors.DefaultSelector())
            for each in (*self._listening(), self._woken):
                selector.register(each, selectors.EVENT_READ, each)
            while True:
                for key, _ in selector.select():
                    wait_s = 0.0
                    while not self._slots.acquire(timeout=wait_s):
                        wait_s = self._make_room()
                    if self._is_closed:
                        return
                    if key.data is self._woken or not self._accept_one(key.data):
                        self._slots.release()

    def _listening(self) -> list[socket.socket]:
        return [self._sock] if self._near is None else [self._sock, self._near.sock]

    def _make_room(self) -> float:
        """Let go of the longest pending connection if it has had its moment; how long to wait for a slot."""
        with self._changed:
            oldest = next((each for each in self._pending.values() if each.sock is not None), None)
            left_s = _MOMENT_S if oldest is None else oldest.began_s + _MOMENT_S - time.monotonic()
            if oldest is not None and left_s <= 0:
                oldest.hang_up()
            return left_s if left_s > 0 else _MOMENT_S

    def _accept_one(self, listening: socket.socket) -> bool:
        """True if a connection was handed to a thread, which then owns the slot."""
        is_local = listening is not self._sock
        try:
            sock, remote = listening.accept()
        except BlockingIOError:
            return False
        except OSError as error:
            self._limited_log.warning(
                self.address, "cannot accept connections at %s: %s", self.address, error
            )
            with self._changed:
                self._changed.wait_for(lambda: self._is_closed, _RETRY_S)
            return False
        address = _HERE if is_local else join_address(plain_address(remote[0]), remote[1])
        try:
            if is_local:
                check_peer_user(sock)
            else:
                tune_socket(sock, self._options.congestion)
            sock = wrap_answering(sock, self._options)
        except (OSError, ValueError) as error:
            who = _HERE if is_local else plain_address(remote[0])
            self._limited_log.info(who, "connection from %s dropped: %s", address, error)
            sock.close()
            return False
        thread = threading.Thread(
            target=self._greet, args=(sock, address, is_local), name=f"greet {address}", daemon=True
        )
        with self._changed:
            pending = self._pending[thread] = _Pending(sock, time.monotonic())
            if self._is_closed:
                pending.hang_up()
        thread.start()
        return True

    def _greet(self, sock: socket.socket, address: str, is_local: bool) -> None:
        link: SocketLink | None = None
        try:
            link = answer_link(sock, address, self._ours, self._options, self._admit, is_local=is_local)
        except LinkError as error:
            who = _HERE if is_local else split_address(address)[0]
            self._limited_log.info(who, "connection from %s dropped: %s", address, error)
        except Exception:
            _log.exception("connection from %s dropped", address)
        thread = threading.current_thread()
        with self._changed:
            # From here on the socket is left alone: it is about to be somebody else's, or closed.
            self._pending[thread].sock = None
            is_ready = link is not None and not self._is_closed
            if link is not None and is_ready:
                self._ready.append(link)
                self._changed.notify_all()
        if link is not None and is_local and not is_ready:
            link.close()
        if is_local or not is_ready:
            # A local link has a handle of its own.
            sock.close()
        if not is_ready:
            self._slots.release()
        with self._changed:
            del self._pending[thread]


def tune_socket(sock: socket.socket, congestion: str | None) -> None:
    """No delay for small frames, keepalive, quick returns from blackouts, and the congestion control asked for, as far
    as the system allows it."""
    with contextlib.suppress(OSError):  # on some systems of a peer that has gone
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _TCP_OPTIONS:
        option = getattr(socket, name, None)
        if option is not None:
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.IPPROTO_TCP, option, value)
    if sys.platform.startswith("linux"):
        for number, value in _LINUX_OPTIONS:
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.IPPROTO_TCP, number, value)
    if congestion is not None and hasattr(socket, "TCP_CONGESTION"):
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, congestion.encode("ascii", "replace"))


def split_address(url: str) -> tuple[str, int]:
    """Host and port of `tcp://host:port`; `UsageError` for anything else."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port = None, None
    if not host or port is None:
        raise UsageError(f"{url!r} is no address to link to", hint="write tcp://host:port")
    return host, port


def join_address(host: str, port: int) -> str:
    """`tcp://host:port`, with brackets around an IPv6 address."""
    return f"tcp://{bracketed(host)}:{port}"
