"""Keepalive: an end that vanished without a word is noticed, and routers in between do not forget who is silent."""

from __future__ import annotations

import contextlib
import socket

_OPTIONS = (("TCP_NODELAY", 1), ("TCP_KEEPIDLE", 15), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3))
_GONE_MS = 30_000


def keep_alive(sock: socket.socket | None) -> None:
    """An end that vanished without a word is noticed after about half a minute."""
    if sock is None:
        return
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in (*_OPTIONS, ("TCP_USER_TIMEOUT", _GONE_MS)):
            option = getattr(socket, name, None)
            if option is not None:
                sock.setsockopt(socket.IPPROTO_TCP, option, value)
