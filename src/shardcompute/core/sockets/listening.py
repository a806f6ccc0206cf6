"""Listening on one address, or on every address of this machine, over IPv6 and IPv4 alike."""

from __future__ import annotations

import socket


def listen(host: str, port: int, backlog: int = 128) -> socket.socket:
    """A listening socket; `::` takes callers over IPv4, too, where the system can. Raises OSError."""
    if ":" not in host:
        return socket.create_server((host, port), backlog=backlog)
    is_dual = host == "::" and socket.has_dualstack_ipv6()
    return socket.create_server((host, port), family=socket.AF_INET6, backlog=backlog, dualstack_ipv6=is_dual)


def any_host() -> str:
    """The address that means all of this machine, of both kinds where it has both."""
    return "::" if socket.has_dualstack_ipv6() else "0.0.0.0"
