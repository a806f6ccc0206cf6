"""Whereabouts of a node: which address it has towards its coordinator, whether that changed, and whether it slept.

Laptops change networks and sleep. A link that was opened from an address that is gone, or before a sleep, may look open
for half a minute; whoever notices why dials anew at once, and says where the node is now.
"""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable
from typing import Protocol
from urllib.parse import urlsplit

from shardcompute.core.errors import LinkError

log = logging.getLogger(__name__)
SLEPT_S = 10.0
"""A pause that no busy machine makes between two heartbeats."""


class MovableEndpoint(Protocol):
    def move(self, host: str) -> None:
        """Listen at this address of the machine, and end all links that were open. LinkError where it cannot."""
        ...


class Whereabouts:
    """Watches over one node's place. `follows`: it listens where its coordinator sees it; else as its owner said, and
    only sleep is noticed. `clock` goes on while the machine sleeps."""

    def __init__(
        self,
        endpoint: MovableEndpoint,
        *,
        follows: bool,
        find_address: Callable[[str], str] | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._endpoint = endpoint
        self._find_address = (find_address or address_towards) if follows else None
        self._clock = clock
        self._address = ""
        self._looked_s = clock()

    def settle(self, url: str) -> bool:
        """Before the coordinator is dialled: be where it will see us. True where we were elsewhere: all links that were
        open have ended."""
        address = self._address_towards(url)
        has_moved = bool(address and self._address and address != self._address)
        if has_moved:
            log.info("this machine's address is %s now, and was %s", address, self._address)
            try:
                self._endpoint.move(address)
            except LinkError as error:
                log.warning("this node cannot be reached at its new address: %s", error)
                return False
        self._address = address or self._address
        self._looked_s = self._clock()
        return has_moved

    def look(self, url: str) -> str:
        """Why the coordinator is to be dialled anew; "" where all is as it was."""
        now_s, before_s = self._clock(), self._looked_s
        self._looked_s = now_s
        if now_s - before_s >= SLEPT_S:
            return f"this machine has slept for {now_s - before_s:.0f} s"
        address = self._address_towards(url)
        if address and self._address and address != self._address:
            return f"this machine's address is {address} now"
        return ""

    def _address_towards(self, url: str) -> str:
        """ "" while there is no way to the coordinator, as between two networks."""
        if self._find_address is None:
            return ""
        try:
            return self._find_address(url)
        except LinkError:
            return ""


def address_towards(url: str) -> str:
    """The address under which the machine behind `url` sees this one; nothing is sent. LinkError if unknown."""
    parts = urlsplit(url)
    try:
        found = socket.getaddrinfo(parts.hostname, parts.port, type=socket.SOCK_DGRAM)
    except OSError as error:
        raise LinkError(
            f"the coordinator's address {parts.hostname} is unknown: {error.strerror or error}",
            hint="check the network and its name server, or join with a new token",
        ) from error
    for _, _, _, _, address in found:
        used = address_used_for(str(address[0]), int(address[1]))
        if used is not None:
            return used
    raise LinkError(f"there is no way from here to {parts.hostname}", hint="check the network")


def address_used_for(host: str, port: int) -> str | None:
    """Asks the system which address it would use; sends nothing."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, port))
        except OSError:
            return None
        return str(probe.getsockname()[0])
