"""Candidacy of a coordinator: it shares a store with others, knows the cluster's authority, and leads when nobody else
does."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from shardcompute.core.errors import StoreError, UsageError
from shardcompute.core.sockets.hosts import bracketed
from shardcompute.node.cluster import ClusterOptions, create_authority, find_authority
from shardcompute.node.coordinator.journal import CLUSTER_NOTE
from shardcompute.node.coordinator.shared import (
    Candidate,
    KeyValueStore,
    KnownCoordinator,
    Leadership,
    LeaseKeeper,
    SharedJournal,
    Standing,
    WaitingPlace,
    check_owner,
    cluster_prefix,
    read_leader,
    register_candidate,
)
from shardcompute.node.coordinator.shared.key_value import Delete
from shardcompute.node.process.backup import ClusterBackup, Restored, restore_authority, restore_journal
from shardcompute.security.identity import NodeIdentity
from shardcompute.security.names import check_cluster_name
from shardcompute.security.private_files import open_private_folder
from shardcompute.wire import join_address

log = logging.getLogger(__name__)
_LOOK_S = 0.2
Say = Callable[[str], None]
Hear = Callable[[Standing], None]


class Candidacy:
    """One coordinator of several. SourceError where the store belongs to another cluster, StoreError where it does not
    answer. The store stays its opener's."""

    def __init__(self, options: ClusterOptions, store: KeyValueStore) -> None:
        if not options.port or not options.join_port:
            raise UsageError(
                "a coordinator among several is found by its ports, which must not change",
                hint="name them with --cluster-port and --join-port",
            )
        open_private_folder(options.folder)
        authority = find_authority(options.folder)
        self.cluster = options.name if authority is None else authority.name
        self._store, self._prefix = store, cluster_prefix(check_cluster_name(self.cluster))
        fingerprint = None if authority is None else authority.fingerprint
        check_owner(SharedJournal(store, self._prefix), fingerprint)
        if authority is None:
            create_authority(options.folder, self.cluster)
        host = options.advertise or options.host
        self.node = NodeIdentity.open(options.folder / "coordinator").node_id
        join = f"{bracketed(host)}:{options.join_port}"
        own = Candidate(self.node, join_address(host, options.port), join, options.api_url)
        register_candidate(store, self._prefix, own)

    @contextmanager
    def leading(
        self, say: Say, pause: Callable[[float], object] = time.sleep, hear: Hear = lambda standing: None
    ) -> Iterator[Leadership]:
        """Wait until nobody else leads, then lead as long as the block lasts, unless another is faster after a pause.

        What is waited for is said, and `hear` is told how things stand as long as that lasts. Whoever ends the block
        in order lets another lead at once.
        """
        leadership = Leadership(self._store, self._prefix, self.node)
        place = WaitingPlace(self._store, self._prefix, self.node)
        try:
            self._wait(leadership, place, say, pause, hear)
        finally:
            place.leave()
        keeper = LeaseKeeper(leadership)
        try:
            yield leadership
        finally:
            keeper.close()
            leadership.resign()

    def _wait(
        self,
        leadership: Leadership,
        place: WaitingPlace,
        say: Say,
        pause: Callable[[float], object],
        hear: Hear,
    ) -> None:
        said, seen = "", None
        leader: KnownCoordinator | None = None
        while True:
            try:
                if leadership.try_to_lead():
                    return
                place.show()
                note = leadership.leader()
                if note != seen:
                    leader = read_leader(self._store, self._prefix)
                    seen = None if leader is None else note
                news = "" if leader is None else f"{leader.node} leads; this one takes over when it is gone"
                hear(Standing(leader))
            except StoreError as error:
                news = f"waiting for the store: {error.message}"
                hear(Standing(problem=error.message))
            if news and news != said:
                say(news)
                log.info("%s", news)
                said = news
            pause(_LOOK_S)


def read_shared(folder: Path, store: KeyValueStore) -> SharedJournal:
    """The journal that the coordinator in a folder shares with others, to be read. SourceError where it is not its
    cluster's."""
    authority = find_authority(folder)
    if authority is None:
        raise UsageError(f"there is no cluster in {folder}", hint="name its folder with --data-dir")
    journal = SharedJournal(store, cluster_prefix(authority.name))
    check_owner(journal, authority.fingerprint)
    return journal


def restore_shared(
    backup: ClusterBackup, folder: Path, store: KeyValueStore, *, replaces: bool = False
) -> Restored:
    """Put a backup's authority into a folder and its journal into the store. A journal of this cluster stays there,
    unless it is to be replaced, which takes that no coordinator leads."""
    fingerprint = restore_authority(backup, folder)
    prefix = cluster_prefix(backup.name)
    journal = SharedJournal(store, prefix)
    check_owner(journal, fingerprint)
    if journal.read_note(CLUSTER_NOTE) is not None and not replaces:
        return restore_journal(backup, fingerprint, journal)
    leadership = Leadership(store, prefix, NodeIdentity.open(folder / "coordinator").node_id)
    if not leadership.try_to_lead():
        raise UsageError(
            f"a coordinator of {backup.name} runs by {store.name}", hint="stop all of them, then restore"
        )
    try:
        for name in ("events", "notes") if replaces else ():
            store.write([leadership.condition], [Delete(f"{prefix}{name}/", f"{prefix}{name}0")])
        return restore_journal(backup, fingerprint, SharedJournal(store, prefix, leadership))
    finally:
        leadership.resign()
