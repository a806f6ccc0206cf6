"""Hosts as people and URLs write them: addresses of both kinds, with and without brackets."""

from __future__ import annotations

import ipaddress

NEAR_HOSTS = {"0.0.0.0": "127.0.0.1", "::": "::1"}
"""By which this machine reaches itself where it listens on every address."""


def plain_address(host: str) -> str:
    """An address as people write it: a caller over IPv4 has a name of its own at a socket of both kinds."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return host


def with_host(url: str, host: str) -> str:
    """A URL that names every address of its machine, with the host by which that was reached instead."""
    named = bracketed(host)
    return url.replace("//0.0.0.0:", f"//{named}:").replace("//[::]:", f"//{named}:")


def bracketed(host: str) -> str:
    """As it stands before a port: an IPv6 address has brackets."""
    return f"[{host}]" if ":" in host and not host.startswith("[") else host
