"""Addresses of this machine: which of them others can use, and whether a port is still free."""

from __future__ import annotations

import contextlib
import ipaddress
from collections.abc import Iterable, Sequence

from shardcompute.core.errors import LinkError
from shardcompute.core.sockets.hosts import NEAR_HOSTS, bracketed
from shardcompute.node.rpc.whereabouts import address_towards, address_used_for

_NOBODY = (("2001:db8::1", 9), ("192.0.2.1", 9))
"""Addresses of IPv6 and IPv4 that are nobody's: by which of ours would they be reached?"""


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
    return reachable_hosts(host)[0]


def reachable_hosts(host: str) -> tuple[str, ...]:
    """The same, with each address that leads here, IPv6 first: `::` means both kinds."""
    if not is_any_address(host):
        return (bracketed(host),)
    kinds = _NOBODY if ":" in host else _NOBODY[1:]
    found = [own for own in (_own_address(*nobody) for nobody in kinds) if own]
    return tuple(map(bracketed, found)) or (near_host(host),)


def _own_address(nobody: str, port: int) -> str:
    """This machine's address of the same kind as `nobody`'s, towards the world or else in any of its networks."""
    from shardcompute.node.reach.own_addresses import interface_addresses

    own = address_used_for(nobody, port)
    if own is not None and not ipaddress.ip_address(own).is_link_local:
        return own
    version = ipaddress.ip_address(nobody).version
    return next((str(each) for each in interface_addresses() if each.version == version), "")


def node_addresses(
    coordinator_urls: Sequence[str], host: str | None, advertise: str | None
) -> tuple[str, str]:
    """Where a node listens and what it tells others, as given or else as its coordinator sees this machine."""
    own = _address_towards_any(coordinator_urls)
    listening = host or own
    return listening, advertise or (own if is_any_address(listening) else listening)


def near_host(host: str) -> str:
    """How commands on this machine reach a server on `host`, without a network where they can."""
    return bracketed(NEAR_HOSTS.get(host, host))


def _address_towards_any(urls: Sequence[str]) -> str:
    """Towards the first of these to which there is a way: a machine may have no IPv6, or nothing else."""
    for url in urls[:-1]:
        with contextlib.suppress(LinkError):
            return address_towards(url)
    return address_towards(urls[-1])


def check_ports(wanted: Iterable[tuple[str, int]]) -> None:
    """UsageError naming the port and who holds it, unless all of them can be had together."""
    import asyncio

    asyncio.run(_bind_all(list(wanted)))


async def _bind_all(wanted: list[tuple[str, int]]) -> None:
    from shardcompute.api.server import bind

    with contextlib.ExitStack() as stack:
        for host, port in wanted:
            stack.enter_context(await bind(host, port))
