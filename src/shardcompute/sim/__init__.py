"""Network emulation: machines, lines and distances on one computer, and faults that befall them.

Owns topologies, the conditions in force, and two emulators with one interface: `namespaces` (real TCP, root on Linux)
and `links` (shaped inside our own transport, anywhere). May call `wire` for links and `core`; knows nothing of nodes.
"""

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
