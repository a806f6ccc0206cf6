"""TCP simultaneous open: two nodes behind routers dial each other at once, from ports that a relay has seen.

A router that keeps one outer port for an inner one (most homes') lets an answer through to a port that has just dialled
its sender. Each side learns its outer address from a relay, to which it goes from the very port that it punches with;
then both dial until their segments cross.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import os
import selectors
import socket
import time
from collections.abc import Callable

from shardcompute.core.errors import LinkError
from shardcompute.relay.client import RelayDoor
from shardcompute.relay.tunnel import bound_socket
from shardcompute.wire import join_address
from shardcompute.wire.tcp import split_address

_TRY_S = 1.2
_PAUSE_S = 0.04
_UNDER_WAY = (errno.EINPROGRESS, errno.EWOULDBLOCK, getattr(errno, "WSAEWOULDBLOCK", errno.EWOULDBLOCK))


class PunchPort:
    """A port of this machine and how a relay sees it. Closing it lets the router forget."""

    def __init__(self, relay_url: str, timeout_s: float, *, is_ipv6: bool = False) -> None:
        """`is_ipv6`: go there over that. Raises `LinkError` where the relay cannot be asked."""
        host = "::" if is_ipv6 else "0.0.0.0"
        self._door = RelayDoor(relay_url, timeout_s, source=(host, 0))
        self._family = socket.AF_INET6 if host == "::" else socket.AF_INET
        self._source = (host, self._door.local[1])
        self.seen = join_address(*self._door.seen)
        self.took_s = self._door.took_s

    def connect(
        self,
        target: str,
        deadline: float,
        is_wanted: Callable[[], bool] = lambda: True,
        *,
        listens: bool = False,
    ) -> socket.socket:
        """A connection to where the other side's port was seen, while it does the same; `LinkError` at `deadline`, or
        once nobody wants it any more. `listens`: on one side, also take what comes between two tries."""
        address, last = split_address(target), "nothing came through"
        with contextlib.ExitStack() as opened:
            listener = opened.enter_context(self._listener()) if listens else None
            while (left_s := deadline - time.monotonic()) > 0 and is_wanted():
                sock = bound_socket(self._family, self._source)
                try:
                    sock.setblocking(False)
                    problem = sock.connect_ex(address)
                    if problem in _UNDER_WAY:
                        problem = _wait_connected(sock, listener, min(_TRY_S, left_s))
                    if problem == 0:
                        sock.setblocking(True)
                        return sock
                    last = os.strerror(problem)
                except BaseException:
                    sock.close()
                    raise
                sock.close()
                came = _accept_from(listener, address[0], _PAUSE_S)
                if came is not None:
                    return came
        raise LinkError(f"no connection at the same time as {target}: {last}")

    def _listener(self) -> socket.socket:
        sock = bound_socket(self._family, self._source)
        try:
            sock.listen(4)
            sock.setblocking(False)
        except BaseException:
            sock.close()
            raise
        return sock

    def close(self) -> None:
        self._door.close()

    def __enter__(self) -> PunchPort:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _wait_connected(sock: socket.socket, listener: socket.socket | None, patience_s: float) -> int:
    """0 once connected, else the number of what went wrong, or that somebody waits at the listener."""
    with selectors.DefaultSelector() as selector:
        selector.register(sock, selectors.EVENT_WRITE)
        if listener is not None:
            selector.register(listener, selectors.EVENT_READ)
        ready = {key.fileobj for key, _ in selector.select(patience_s)}
    if sock not in ready:
        return errno.ETIMEDOUT
    return sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)


def _accept_from(listener: socket.socket | None, host: str, pause_s: float) -> socket.socket | None:
    """Whoever came from `host`, at once or in a moment; strangers are sent away."""
    if listener is None:
        time.sleep(pause_s)
        return None
    with selectors.DefaultSelector() as selector:
        selector.register(listener, selectors.EVENT_READ)
        if not selector.select(pause_s):
            return None
    try:
        sock, peer = listener.accept()
    except OSError:
        return None
    if ipaddress.ip_address(peer[0]) != ipaddress.ip_address(host):
        sock.close()
        return None
    sock.setblocking(True)
    return sock
