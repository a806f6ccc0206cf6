"""Journal: the coordinator's memory, every event that matters in the order in which it happened.

Owns the file, what is done when it is missing or damaged, and what waits to be written where the disk is full. May
call `control`, to replay, and `security`'s private files; decides nothing about the cluster.
"""

from __future__ import annotations

from shardcompute.node.coordinator.journal.database import Journal
from shardcompute.node.coordinator.journal.recovery import (
    CLUSTER_NOTE,
    JOURNAL_FILE,
    bind_journal,
    open_journal,
)
from shardcompute.node.coordinator.journal.replay import Replayed, replay_journal
from shardcompute.node.coordinator.journal.reserve import DiskReserve
from shardcompute.node.coordinator.journal.store import JournalStore
from shardcompute.node.coordinator.journal.writer import JournalWriter, RecordStatus

__all__ = [
    "CLUSTER_NOTE",
    "JOURNAL_FILE",
    "DiskReserve",
    "Journal",
    "JournalStore",
    "JournalWriter",
    "RecordStatus",
    "Replayed",
    "bind_journal",
    "open_journal",
    "replay_journal",
]
