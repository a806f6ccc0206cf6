"""Finding the coordinator again, when it is at none of the addresses that a member knows.

What is found are addresses to try; only a certificate of the cluster's authority, in the role of coordinator, proves
that it is there. So a liar can make a member knock at wrong doors, a few at a time, and nothing more.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

from shardcompute.core.errors import ShardComputeError

log = logging.getLogger(__name__)
NEARBY_S = 3.0
LEAST_PAUSE_S = 15.0
Search = Callable[[], Sequence[str]]


class PacedSearch:
    """Asks every way in turn, and not more often than every `LEAST_PAUSE_S`."""

    def __init__(self, searches: Sequence[Search], clock: Callable[[], float] = time.monotonic) -> None:
        self._searches = list(searches)
        self._clock = clock
        self._asked_s: float | None = None

    def __call__(self) -> list[str]:
        now_s = self._clock()
        if self._asked_s is not None and now_s - self._asked_s < LEAST_PAUSE_S:
            return []
        self._asked_s = now_s
        found: dict[str, None] = {}
        for search in self._searches:
            try:
                found |= dict.fromkeys(search())
            except ShardComputeError as error:
                log.info("%s", error.message)
        return list(found)


def coordinator_finder(fingerprint: str, authority_pem: str, dht: Sequence[str]) -> PacedSearch:
    """For a member of the cluster with this authority: looks nearby, and in the hash table where one is named."""

    def search_dht() -> Sequence[str]:
        from shardcompute.node.discovery.dht.publishing import search_table

        return search_table(authority_pem, dht)()

    nearby = search_nearby(fingerprint)
    return PacedSearch([nearby, search_dht] if dht else [nearby])


def holder_finder(authority_pem: str, dht: Sequence[str]) -> PacedSearch:
    """For a member of the cluster with this authority: who holds weights, as the hash table says where one is named."""

    def search_dht() -> Sequence[str]:
        from shardcompute.node.discovery.dht.publishing import search_holders

        return search_holders(authority_pem, dht)()

    return PacedSearch([search_dht] if dht else [])


def search_nearby(fingerprint: str) -> Search:
    """In this network, for the cluster with this authority. Finds nothing where `zeroconf` is not installed."""

    def search() -> list[str]:
        from shardcompute.node.discovery.nearby import find_nearby

        found = find_nearby(NEARBY_S, is_wanted=lambda cluster: cluster.is_of(fingerprint), first_only=True)
        return [url for cluster in found for url in cluster.control_urls]

    return search
