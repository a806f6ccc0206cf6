"""From the journal to the state that it tells of; a journal that has grown long is replaced by its outcome."""

from __future__ import annotations

import logging

from shardcompute.control import ClusterState, apply, decode_event, encode_event
from shardcompute.control.events import StateRemembered
from shardcompute.node.coordinator.journal import Journal

log = logging.getLogger(__name__)
_MOST_EVENTS = 5000


def replay_journal(
    journal: Journal, initial: ClusterState, *, most_events: int = _MOST_EVENTS
) -> ClusterState:
    """The state after all events. What cannot be read is skipped, and the journal then left as it is."""
    state, count, unread = initial, 0, 0
    for line in journal.events():
        count += 1
        try:
            state = apply(state, decode_event(line))
        except (ValueError, RecursionError) as error:
            if not unread:
                log.warning("event %d of the journal cannot be read: %s", count, error)
            unread += 1
    if count:
        log.info("%d events of the journal replayed, %d not understood", count, unread)
    if count > most_events and not unread:
        journal.compact([encode_event(StateRemembered(state))])
        log.info("the journal was replaced by its outcome")
    return state
