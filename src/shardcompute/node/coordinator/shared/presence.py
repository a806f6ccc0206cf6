"""Presence of coordinators: which of them leads, which wait to, since when, and which are away.

Who waits says so under a key that is gone when it is; who leads has the leader's key (see `leadership`).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeVar

import msgspec

from shardcompute.core.errors import StoreError
from shardcompute.node.coordinator.shared.coordinators import MOST_COORDINATORS, Candidate, read_candidates
from shardcompute.node.coordinator.shared.key_value import KeyValueStore, Put
from shardcompute.node.coordinator.shared.leadership import LeaderNote, leader_key

CoordinatorStatus = Literal["leads", "waits", "away"]
WAITING_TTL_S = 6.0
"""So long after its last sign of life a coordinator counts as waiting."""
_RENEWALS = 3
_ORDER: tuple[CoordinatorStatus, ...] = ("leads", "waits", "away")
Note = TypeVar("Note")


class WaitingNote(msgspec.Struct, frozen=True):
    """What stands under the key of a coordinator that waits."""

    node: str
    since_s: float


@dataclass(frozen=True, slots=True)
class KnownCoordinator:
    """A coordinator and what it does now, since when (in seconds since 1970; 0: nobody knows)."""

    node: str
    api_url: str
    status: CoordinatorStatus
    since_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Standing:
    """How things are for a coordinator that waits: who leads, None where nobody does or `problem` says why nobody
    knows."""

    leader: KnownCoordinator | None = None
    problem: str = ""


class WaitingPlace:
    """One coordinator's word that it waits. StoreError where the store does not answer."""

    def __init__(
        self,
        store: KeyValueStore,
        prefix: str,
        node: str,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._store = store
        self._key = f"{prefix}waiting/{node}"
        self._note = msgspec.json.encode(WaitingNote(node, wall_clock()))
        self._clock = clock
        self._lease = 0
        self._renew_at_s = 0.0

    def show(self) -> None:
        """Say it, or say it again when that is due; may be called often."""
        now_s = self._clock()
        if self._lease and now_s < self._renew_at_s:
            return
        if not self._lease or self._store.keep_alive(self._lease) <= 0:
            grant = self._store.grant(WAITING_TTL_S)
            self._store.write([], [Put(self._key, self._note, grant.lease)])
            self._lease = grant.lease
        self._renew_at_s = now_s + WAITING_TTL_S / _RENEWALS

    def leave(self) -> None:
        """It waits no longer."""
        lease, self._lease = self._lease, 0
        if lease:
            with contextlib.suppress(StoreError):
                self._store.revoke(lease)


def read_coordinators(store: KeyValueStore, prefix: str) -> tuple[KnownCoordinator, ...]:
    """All that are known: who leads, then who waits, the longest first, then who is away. StoreError where the store
    does not answer. Of several with one address, as after a new start with another key, the one that is there."""
    leader = _decode(store.read(leader_key(prefix)), LeaderNote)
    notes = (_decode(content, WaitingNote) for _, content in store.read_all(f"{prefix}waiting/"))
    waiting = {note.node: note.since_s for note in notes if note is not None}
    known = [_known(each, leader, waiting) for each in read_candidates(store, prefix)]
    known.sort(key=lambda each: (_ORDER.index(each[1].status), each[1].since_s, each[1].node))
    found: dict[str, KnownCoordinator] = {}
    for control_url, coordinator in known:
        found.setdefault(control_url, coordinator)
    return tuple(found.values())[:MOST_COORDINATORS]


def read_leader(store: KeyValueStore, prefix: str) -> KnownCoordinator | None:
    """Who leads, None where nobody does; StoreError where the store does not answer."""
    return next((each for each in read_coordinators(store, prefix) if each.status == "leads"), None)


def _known(
    candidate: Candidate, leader: LeaderNote | None, waiting: dict[str, float]
) -> tuple[str, KnownCoordinator]:
    node, status, since_s = candidate.node, _ORDER[-1], 0.0
    if leader is not None and leader.node == node:
        status, since_s = "leads", leader.since_s
    elif node in waiting:
        status, since_s = "waits", waiting[node]
    return candidate.control_url, KnownCoordinator(node, candidate.api_url, status, since_s)


def _decode(content: bytes | None, kind: type[Note]) -> Note | None:
    with contextlib.suppress(ValueError, RecursionError):
        return None if content is None else msgspec.json.decode(content, type=kind)
    return None
