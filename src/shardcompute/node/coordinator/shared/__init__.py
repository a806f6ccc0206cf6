"""Shared journal: what several coordinators of one cluster have in common, in a store that outlives each of them.

Owns the store's protocol, its client, the leader's lease and epoch, and the journal that only the leader may write.
May call `core` and the journal's own types; decides nothing about the cluster.
"""

from __future__ import annotations

from shardcompute.node.coordinator.shared.coordinators import Candidate, CoordinatorList, register_candidate
from shardcompute.node.coordinator.shared.etcd import EtcdClient
from shardcompute.node.coordinator.shared.key_value import KeyValueStore
from shardcompute.node.coordinator.shared.leadership import Leadership, LeaseKeeper
from shardcompute.node.coordinator.shared.presence import (
    KnownCoordinator,
    Standing,
    WaitingPlace,
    read_coordinators,
    read_leader,
)
from shardcompute.node.coordinator.shared.shared_journal import SharedJournal, check_owner, cluster_prefix

__all__ = [
    "Candidate",
    "CoordinatorList",
    "EtcdClient",
    "KeyValueStore",
    "KnownCoordinator",
    "Leadership",
    "LeaseKeeper",
    "SharedJournal",
    "Standing",
    "WaitingPlace",
    "check_owner",
    "cluster_prefix",
    "read_coordinators",
    "read_leader",
    "register_candidate",
]
