"""Coordinators of a cluster: where nodes find each of them, whether it leads or waits to."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import msgspec

from shardcompute.node.coordinator.shared.key_value import KeyValueStore, Put

MOST_COORDINATORS = 8
"""As many as a join token can name."""


class Candidate(msgspec.Struct, frozen=True):
    """A coordinator, and where it listens when it leads."""

    node: str
    control_url: str
    join_address: str
    api_url: str = ""
    """Where clients find its API; "": nobody knows."""


def register_candidate(store: KeyValueStore, prefix: str, candidate: Candidate) -> None:
    """Let the others know of it. It stays known when it has ended: it may come back."""
    store.write([], [Put(f"{prefix}coordinators/{candidate.node}", msgspec.json.encode(candidate))])


def read_candidates(store: KeyValueStore, prefix: str) -> Iterator[Candidate]:
    """All that have registered, by name. StoreError where the store does not answer."""
    for _, content in store.read_all(f"{prefix}coordinators/"):
        with contextlib.suppress(ValueError, RecursionError):
            yield msgspec.json.decode(content, type=Candidate)


class CoordinatorList:
    """Where all coordinators of a cluster are found, as this one knows. Methods may be called from any thread."""

    def __init__(self, store: KeyValueStore, prefix: str, own: Candidate) -> None:
        self._store = store
        self._prefix = prefix
        self._own = own
        self._all: tuple[Candidate, ...] = (own,)

    def all(self) -> tuple[Candidate, ...]:
        """This one first, then the others by name."""
        return self._all

    def refresh(self) -> bool:
        """Ask the store; whether there are others than before. StoreError where it does not answer.

        Of several with one address, as after a new start with another key, one is enough.
        """
        found = {self._own.control_url: self._own}
        for candidate in read_candidates(self._store, self._prefix):
            found.setdefault(candidate.control_url, candidate)
        former, self._all = self._all, tuple(found.values())[:MOST_COORDINATORS]
        return self._all != former
