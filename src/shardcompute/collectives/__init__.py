"""Collectives: all-reduce and its kin between ranks that compute one thing together.

Owns process groups, their algorithms and topologies, the order of sums, and the frames in which arrays travel. Gets
its connections from `wire`, with identities proven there, or leaves them to `torch.distributed`. May call `wire` and
`core`; knows no model and no node.
"""

from __future__ import annotations

from shardcompute.collectives.fabric_group import FabricGroup, World
from shardcompute.collectives.fabrics.inproc import InprocHub
from shardcompute.collectives.group import Array, Group, GroupStats, even_counts
from shardcompute.collectives.threads import run_ranks, thread_groups
from shardcompute.collectives.topology import AUTO, Algorithm, Grid, TopologyChoice, parse_topology

__all__ = [
    "AUTO",
    "Algorithm",
    "Array",
    "FabricGroup",
    "Grid",
    "Group",
    "GroupStats",
    "InprocHub",
    "TopologyChoice",
    "World",
    "even_counts",
    "parse_topology",
    "run_ranks",
    "thread_groups",
]
