"""Incident counters for operators: how many of what are in which state, and what went wrong so far.

Incidents are counted from one state to the next, from the start of the process on. A label is made for every
status there is, so that a count of nothing is a zero and not a gap.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import get_args

from shardcompute.control.state import ChainStatus, ClusterState, NodeStatus
from shardcompute.node.admin.drafters import view_drafters
from shardcompute.node.admin.view_builder import view_links, view_nodes
from shardcompute.node.admin.views import LinkView, NodeView
from shardcompute.trust.canaries import DriftEstimate


@dataclass(frozen=True, slots=True)
class Incidents:
    """Counts since the start; those of chains by model."""

    lost_nodes: int = 0
    failovers: Mapping[str, int] = field(default_factory=dict)
    """A chain in use could no longer work as it was."""
    replans: Mapping[str, int] = field(default_factory=dict)
    """A chain got a new shape."""


@dataclass(frozen=True, slots=True)
class ClusterHealth:
    nodes: tuple[NodeView, ...]
    links: tuple[LinkView, ...]
    nodes_by_status: Mapping[str, int]
    chains_by_status: Mapping[tuple[str, str], int]
    """By model and status; retired ones are not counted."""
    wanted_chains: Mapping[str, int]
    incidents: Incidents
    weights_sent_bytes: Mapping[str, int]
    """By the node that they went to."""
    unrecorded: int = 0
    """Changes that the journal does not hold yet."""
    drifts: Mapping[str, DriftEstimate] = field(default_factory=dict)
    """By node, of which canaries were asked."""
    drifting_chains: int = 0
    drafters: Mapping[tuple[str, str], str] = field(default_factory=dict)
    """By chain and drafter, whether it is at work."""


class IncidentLog:
    """Hears every state of a cluster, in order and from one thread; `counts` may be called from any."""

    def __init__(self, state: ClusterState) -> None:
        self._lock = threading.Lock()
        self._latest = state
        self._lost_nodes = 0
        self._failovers: Counter[str] = Counter()
        self._replans: Counter[str] = Counter()

    def saw(self, state: ClusterState) -> None:
        with self._lock:
            before, self._latest = self._latest, state
            for id, node in state.nodes.items():
                former = before.nodes.get(id)
                self._lost_nodes += node.status == "lost" and (former is None or former.status != "lost")
            for id, chain in state.chains.items():
                was = before.chains.get(id)
                if was is None:
                    continue
                self._replans[chain.model] += max(0, chain.epoch - was.epoch)
                self._failovers[chain.model] += chain.is_interrupted and was.status == "ready"

    def counts(self) -> Incidents:
        with self._lock:
            return Incidents(self._lost_nodes, dict(self._failovers), dict(self._replans))


def view_health(
    state: ClusterState,
    incidents: Incidents,
    weights_sent_bytes: Mapping[str, int],
    now_s: float,
    unrecorded: int = 0,
) -> ClusterHealth:
    nodes_by_status = dict.fromkeys(get_args(NodeStatus), 0)
    for node in state.nodes.values():
        nodes_by_status[node.status] += 1
    wanted = {name: each.wanted_chains for name, each in state.models.items() if each.is_wanted}
    models = {*wanted, *(chain.model for chain in state.live_chains())}
    statuses = [status for status in get_args(ChainStatus) if status != "retired"]
    chains = {(model, status): 0 for model in sorted(models) for status in statuses}
    for chain in state.live_chains():
        chains[chain.model, chain.status] += 1
    return ClusterHealth(
        nodes=tuple(node for node in view_nodes(state, now_s) if node.status not in ("lost", "gone")),
        links=view_links(state),
        nodes_by_status=nodes_by_status,
        chains_by_status=chains,
        wanted_chains=wanted,
        incidents=incidents,
        weights_sent_bytes=weights_sent_bytes,
        unrecorded=unrecorded,
        drafters={
            (chain.id, each.drafter): each.state
            for chain in state.live_chains()
            for each in view_drafters(state, chain)
        },
    )
