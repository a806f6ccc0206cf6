"""Addresses under which this machine may be dialled, whoever is on the same network, IPv6 first."""

from __future__ import annotations

import ipaddress
import socket

from shardcompute.node.reach.offers import MOST_ADDRESSES
from shardcompute.wire import join_address


def own_addresses(host: str, port: int, advertised: str = "") -> tuple[str, ...]:
    """URLs of a port that listens on `host`: what is advertised, then each address of this machine if it listens on
    all of them."""
    urls = [advertised] if advertised else []
    try:
        listened = ipaddress.ip_address(host)
    except ValueError:
        listened = None
    if listened is None or not listened.is_unspecified:
        urls.append(join_address(host, port))
    else:
        found = [each for each in interface_addresses() if listened.version == 6 or each.version == 4]
        urls += [join_address(str(each), port) for each in sorted(found, key=_order)]
    return tuple(dict.fromkeys(urls))[:MOST_ADDRESSES]


def _order(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> tuple[int, bool]:
    """IPv6 before IPv4, what the world can route before what only a home can."""
    return -address.version, address.is_private


def interface_addresses() -> list[ipaddress.IPv4Address | ipaddress.IPv6Address]:
    """All that others can dial: no loopback, and none that one line alone knows."""
    import psutil

    found = []
    for each in (each for card in psutil.net_if_addrs().values() for each in card):
        if each.family in (socket.AF_INET, socket.AF_INET6):
            # An address of one line only ("%eth0") means nothing to others.
            address = ipaddress.ip_address(each.address.partition("%")[0])
            if not (address.is_loopback or address.is_link_local or address.is_multicast):
                found.append(address)
    return found
