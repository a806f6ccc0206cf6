"""Replay: the state that a journal's events lead to, and how long the journal has become."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from shardcompute.control import ClusterState, apply, decode_event
from shardcompute.node.coordinator.journal.store import JournalStore

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Replayed:
    """The state after all events. Those that this release cannot read were skipped; `unread` are their numbers."""

    state: ClusterState
    event_count: int
    size_bytes: int
    unread: frozenset[int] = frozenset()


def replay_journal(journal: JournalStore, initial: ClusterState) -> Replayed:
    state, size_bytes = initial, 0
    unread: set[int] = set()
    events = journal.numbered_events()
    for number, line in events:
        size_bytes += len(line)
        try:
            state = apply(state, decode_event(line))
        except (ValueError, RecursionError) as error:
            if not unread:
                log.warning("event %d of the journal cannot be read: %s", number, error)
            unread.add(number)
    if events:
        log.info("%d events of the journal replayed, %d not understood", len(events), len(unread))
    return Replayed(state, len(events), size_bytes, frozenset(unread))
