"""Addresses of a cluster's coordinators: where nodes find this one and, where there are several, the others."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from shardcompute.core.errors import StoreError
from shardcompute.node.coordinator.control_server import Lead
from shardcompute.node.coordinator.shared import (
    Candidate,
    CoordinatorList,
    KnownCoordinator,
    Leadership,
    read_coordinators,
    register_candidate,
)


class ClusterAddresses:
    """This coordinator's own, and those of the others as their store has them. Methods may be called from any
    thread."""

    def __init__(
        self, own: Candidate, leadership: Leadership | None, *, also: Sequence[Candidate] = ()
    ) -> None:
        """`also`: this one, by its other hosts."""
        self._own = own
        self._also = tuple(also)
        self._leadership = leadership
        self._listed: CoordinatorList | None = None
        self._known: tuple[KnownCoordinator, ...] = ()
        if leadership is not None:
            register_candidate(leadership.store, leadership.prefix, own)
            self._listed = CoordinatorList(leadership.store, leadership.prefix, own)
            self._listed.refresh()
            self._known = read_coordinators(leadership.store, leadership.prefix)

    def all(self) -> tuple[Candidate, ...]:
        """This one first."""
        listed = (self._own,) if self._listed is None else self._listed.all()
        return (*listed, *self._also)

    def refresh(self) -> bool:
        """Ask the store; whether there are others than before. As it was where the store does not answer."""
        with contextlib.suppress(StoreError):
            if self._listed is not None and self._leadership is not None:
                self._known = read_coordinators(self._leadership.store, self._leadership.prefix)
                return self._listed.refresh()
        return False

    def known(self) -> tuple[KnownCoordinator, ...]:
        """Who leads, waits and is away, as the store said last; nobody where there is no store."""
        return self._known

    def control_urls(self) -> tuple[str, ...]:
        return tuple(each.control_url for each in self.all())

    def join_addresses(self) -> tuple[str, ...]:
        return tuple(each.join_address for each in self.all())

    def lead(self) -> Lead:
        """What nodes are told of who leads."""
        if self._leadership is None:
            return Lead()
        return Lead(self._leadership.epoch, self.control_urls())
