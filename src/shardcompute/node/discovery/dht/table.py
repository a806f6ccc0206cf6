"""Routing table: the nodes of the hash table that one knows, more of those that are near.

Buckets by distance, eight nodes each. Who has answered longest stays: newcomers take the place of those that did not
answer lately, so that nobody who makes up many ids pushes out who is there. At most two of a bucket have one host.
"""

from __future__ import annotations

from dataclasses import dataclass

from shardcompute.node.discovery.dht.messages import ID_BYTES, Contact

BUCKET = 8
_MOST_PER_HOST = 2
_MOST_FAILURES = 2


def distance(a: bytes, b: bytes) -> int:
    return int.from_bytes(a, "big") ^ int.from_bytes(b, "big")


@dataclass(slots=True)
class _Known:
    contact: Contact
    failures: int = 0


class RoutingTable:
    """Of the node `own`; not for several threads at once."""

    def __init__(self, own: bytes, *, most_per_host: int = _MOST_PER_HOST) -> None:
        self._own = own
        self._most_per_host = most_per_host
        self._buckets: list[dict[bytes, _Known]] = [{} for _ in range(8 * ID_BYTES)]

    def __len__(self) -> int:
        return sum(map(len, self._buckets))

    def heard(self, contact: Contact) -> None:
        """This node has answered from this address."""
        if contact.node_id == self._own:
            return
        bucket = self._bucket(contact.node_id)
        known = bucket.get(contact.node_id)
        if known is not None:
            # An id that somebody else has taken up at another address must not be carried there while it answers here.
            if known.contact == contact or known.failures:
                bucket[contact.node_id] = _Known(contact)
            return
        if sum(each.contact.host == contact.host for each in bucket.values()) >= self._most_per_host:
            return
        if len(bucket) >= BUCKET:
            worst = max(bucket.values(), key=lambda each: each.failures)
            if not worst.failures:
                return
            del bucket[worst.contact.node_id]
        bucket[contact.node_id] = _Known(contact)

    def has(self, contact: Contact) -> bool:
        known = self._bucket(contact.node_id).get(contact.node_id)
        return known is not None and known.contact == contact

    def failed(self, node_id: bytes) -> None:
        """It did not answer."""
        bucket = self._bucket(node_id)
        known = bucket.get(node_id)
        if known is not None:
            known.failures += 1
            if known.failures > _MOST_FAILURES:
                del bucket[node_id]

    def nearest(self, target: bytes, count: int = BUCKET) -> list[Contact]:
        everybody = (known.contact for bucket in self._buckets for known in bucket.values())
        return sorted(everybody, key=lambda each: distance(each.node_id, target))[:count]

    def _bucket(self, node_id: bytes) -> dict[bytes, _Known]:
        return self._buckets[max(0, distance(self._own, node_id).bit_length() - 1)]
