"""Coordinators of a cluster: where nodes find each of them, whether it leads or waits to."""

from __future__ import annotations

import contextlib

import msgspec

from shardcompute.node.coordinator.shared.key_value import KeyValueStore, Put

MOST_COORDINATORS = 8
"""As many as a join token can name."""


class Candidate(msgspec.Struct, frozen=True):
    """A coordinator, and where it listens when it leads."""

    node: str
    control_url: str
    join_address: str


def register_candidate(store: KeyValueStore, prefix: str, candidate: Candidate) -> None:
    """Let the others know of it. It stays known when it has ended: it may come back."""
    store.write([], [Put(f"{prefix}coordinators/{candidate.node}", msgspec.json.encode(candidate))])


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
        for _, content in self._store.read_all(f"{self._prefix}coordinators/"):
            with contextlib.suppress(ValueError):
                candidate = msgspec.json.decode(content, type=Candidate)
                found.setdefault(candidate.control_url, candidate)
        former, self._all = self._all, tuple(found.values())[:MOST_COORDINATORS]
        return self._all != former
