"""Layers on their way into the memory of machines, for whoever watches a cluster come up."""

from __future__ import annotations

from shardcompute.control.state import ClusterState
from shardcompute.node.admin.milestones import name_layers, place_of

_STEPS = 4
"""How often a load is told of on its way."""


def progress_lines(before: ClusterState, after: ClusterState) -> list[str]:
    """Loads that have come another quarter further between two looks."""
    lines = []
    for node in sorted(after.nodes.values(), key=lambda node: (node.name, node.id)):
        former = before.nodes.get(node.id)
        known = {} if former is None else {place_of(load): load.fraction for load in former.loading}
        for load in node.loading:
            last = known.get(place_of(load))
            if last is not None and int(load.fraction * _STEPS) > int(last * _STEPS):
                done = "fetched, loading" if load.fraction >= 1 else f"{load.fraction:.0%} fetched"
                lines.append(f"{node.name} {name_layers(load.start, load.stop)}: {done}")
    return lines


def activity(state: ClusterState) -> str:
    """What is going on now, in one line; "" when nothing is."""
    loads = [
        f"{node.name} {name_layers(load.start, load.stop)}: {load.fraction:.0%}"
        for node in sorted(state.nodes.values(), key=lambda node: (node.name, node.id))
        if node.is_live
        for load in node.loading
    ]
    return ", ".join(loads)
