"""Addresses of this machine: which of them others can use, and whether a port is still free."""

from __future__ import annotations

import contextlib
import ipaddress
from collections.abc import Iterable

from shardcompute.node.rpc.whereabouts import address_towards, address_used_for

_NOBODY = ("192.0.2.1", 9)


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def is_address(host: str) -> bool:
    """Whether `host` is an IP address and no name."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def is_any_address(host: str) -> bool:
    """Whether listening on `host` means listening on every address of this machine."""
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False


def reachable_host(host: str) -> str:
    """What others can use to reach a server on `host`, where that means any address of this machine."""
    if not is_any_address(host):
        return f"[{host}]" if ":" in host else host
    return address_used_for(*_NOBODY) or "127.0.0.1"


def node_addresses(coordinator_url: str, host: str | None, advertise: str | None) -> tuple[str, str]:
    """Where a node listens and what it tells others, as given or else as its coordinator sees this machine."""
    own = address_towards(coordinator_url)
    listening = host or own
    return listening, advertise or (own if is_any_address(listening) else listening)


def near_host(host: str) -> str:
    """How commands on this machine reach a server on `host`, without a network where they can."""
    return "127.0.0.1" if is_any_address(host) else reachable_host(host)


def check_ports(wanted: Iterable[tuple[str, int]]) -> None:
    """UsageError naming the port and who holds it, unless all of them can be had together."""
    import asyncio

    asyncio.run(_bind_all(list(wanted)))


async def _bind_all(wanted: list[tuple[str, int]]) -> None:
    from shardcompute.api.server import bind

    with contextlib.ExitStack() as stack:
        for host, port in wanted:
            stack.enter_context(await bind(host, port))
