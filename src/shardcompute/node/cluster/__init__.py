"""The first machine of a cluster: coordinator, join server, weights and drivers in one process.

A cluster lives in a folder: its authority, its journal, its tokens and keys. Starting again with the same folder
finds the same cluster; workers come back by themselves. One owner for each piece of that: `access` has the books of
who may join and call, `served_files` what models are served from, `orders` what was asked for, `addresses` where
coordinators are found; `cluster` wires them to the coordinator, the drivers and the network.
"""

from __future__ import annotations

from shardcompute.node.cluster.cluster import Cluster
from shardcompute.node.cluster.options import ClusterOptions
from shardcompute.node.cluster.orders import ServedOrder
from shardcompute.node.cluster.preparation import PreparedModel, prepare_model
from shardcompute.node.cluster.record import (
    authority_folder,
    check_journal,
    create_authority,
    find_authority,
)

__all__ = [
    "Cluster",
    "ClusterOptions",
    "PreparedModel",
    "ServedOrder",
    "authority_folder",
    "check_journal",
    "create_authority",
    "find_authority",
    "prepare_model",
]
