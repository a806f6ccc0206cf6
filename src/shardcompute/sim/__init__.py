"""Emulated networks: machines, lines and distances on one computer, and what befalls them."""

from __future__ import annotations

from shardcompute.sim.conditions import Change, Conditions, apply_change, initial_conditions
from shardcompute.sim.network import EmulatedNetwork, Emulator, open_network, why_no_namespaces
from shardcompute.sim.topology import (
    Region,
    Topology,
    load_topology,
    parse_topology,
    ring_topology,
    topology_names,
)

__all__ = [
    "Change",
    "Conditions",
    "EmulatedNetwork",
    "Emulator",
    "Region",
    "Topology",
    "apply_change",
    "initial_conditions",
    "load_topology",
    "open_network",
    "parse_topology",
    "ring_topology",
    "topology_names",
    "why_no_namespaces",
]
