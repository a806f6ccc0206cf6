"""A cluster in the hash table: its coordinator says where it is, members look that up by their authority."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from shardcompute.core.closing import Closing
from shardcompute.core.errors import AuthError, ShardComputeError
from shardcompute.core.sockets.listening import any_host
from shardcompute.node.discovery.again import Search
from shardcompute.node.discovery.dht.node import Address
from shardcompute.node.discovery.dht.records import SignedRecord, Whereabout, fitted, record_key
from shardcompute.node.discovery.dht.udp import DhtSocket, parse_bootstrap
from shardcompute.relay.tunnel import door_url

log = logging.getLogger(__name__)
PUBLISH_EVERY_S = 1800.0
CHANGED_S = 15.0
"""So soon news of other addresses are published."""


class Publisher(Closing):
    """Keeps a cluster's record in the hash table as long as it is open, and publishes it anew when `whereabout`
    changes. `sign` makes a record of that with this sequence."""

    def __init__(
        self,
        table: DhtSocket,
        sign: Callable[[Whereabout, int], SignedRecord],
        whereabout: Callable[[], Whereabout],
        bootstrap: Sequence[str],
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._table = table
        self._sign = sign
        self._whereabout = whereabout
        self._bootstrap = bootstrap
        self._clock = clock
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="dht publisher", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closing.set()
        self._thread.join()

    def publish(self) -> int:
        """Say where the cluster is; how many nodes keep that. The time is the sequence: it grows over restarts."""
        if not self._table.node.known_nodes:
            self._table.node.bootstrap(parse_bootstrap(self._bootstrap))
        record = self._sign(fitted(self._whereabout()), int(self._clock() * 1000))
        return self._table.node.publish(record)

    def _run(self) -> None:
        said, at_s = None, 0.0
        while not self._closing.is_set():
            now = self._whereabout()
            if now != said or time.monotonic() - at_s >= PUBLISH_EVERY_S:
                try:
                    count = self.publish()
                    log.info("%d nodes of the hash table say where this cluster is", count)
                    said, at_s = (now, time.monotonic()) if count else (None, 0.0)
                except ShardComputeError as error:
                    log.warning("this cluster is not published: %s", error)
            self._closing.wait(CHANGED_S)


def search_table(authority_pem: str, bootstrap: Sequence[str]) -> Search:
    """Where the coordinator of the cluster with this authority is, as the hash table's nodes have kept it: its own
    addresses, and the relays that lead to it."""

    def search() -> list[str]:
        found = look_up(authority_pem, bootstrap)
        return [*found.coordinators, *map(door_url, found.relays)]

    return search


def search_holders(authority_pem: str, bootstrap: Sequence[str]) -> Search:
    """Nodes of the cluster that hold weights, as the hash table's nodes have kept it. Only a certificate proves that
    one is there, and only hashes that its weights are right."""
    return lambda: list(look_up(authority_pem, bootstrap).holders)


def look_up(authority_pem: str, bootstrap: Sequence[str]) -> Whereabout:
    """What the cluster with this authority says last of where it is; nothing where no record of it is found."""
    public = authority_key(authority_pem)
    addresses: list[Address] = parse_bootstrap(bootstrap)
    if not addresses:
        return Whereabout()
    with DhtSocket(any_host(), 0) as table:
        table.node.bootstrap(addresses)
        record = table.node.lookup(record_key(public))
    return Whereabout() if record is None else record.read()


def authority_key(authority_pem: str) -> bytes:
    key = x509.load_pem_x509_certificate(authority_pem.encode()).public_key()
    if not isinstance(key, Ed25519PublicKey):
        raise AuthError("The authority's key is of another kind", hint="join the cluster again")
    return key.public_bytes_raw()
