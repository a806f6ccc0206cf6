"""Quiet times: as long as nothing but heartbeats and times of steps comes in, questions of placement have the answers
that they had.

Asking them gathers all machines and links anew, for each chain and question; with a hundred machines that was most of
what an idle coordinator did. What was answered is kept for the state that it was asked of, until something changes on
which an answer depends, or a moment comes at which one may differ. Nothing is skipped that could differ: it is a
memory, and not a rule.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import inf
from operator import attrgetter

from shardcompute.control.actions import Action
from shardcompute.control.state import Chain, ClusterState, Node, Unrest

_BEATING = {
    "last_seen_s",
    "lease_until_s",
    "resident_bytes",
    "kv_used_bytes",
    "draft_heads",
    "measured_watts",
    "idle_watts",
    "seeded_bytes",
    "accusers",
    "status_reason",
    "stage_times",
}
"""Of a node: what heartbeats and steps change. Who is silent, and who has drifted, is asked at every look."""
_lasting_of_node = attrgetter(*(name for name in Node.__struct_fields__ if name not in _BEATING))
_lasting_of_chain = attrgetter(*(name for name in Chain.__struct_fields__ if name != "ring"))
_lasting_of_state = attrgetter(
    *(name for name in ClusterState.__struct_fields__ if name not in ("nodes", "chains", "demand"))
)
_CLOSE_S = 1e-3
"""A moment that is so near may be here already, or not yet: sums of times are rounded."""


@dataclass(frozen=True, slots=True)
class Rest:
    """A look at which nothing was decided."""

    state: ClusterState
    since_s: float
    until_s: float
    """When an answer may differ although nothing happens."""
    commands: tuple[Action, ...]

    def lasts(self, state: ClusterState, now_s: float) -> bool:
        return self.since_s <= now_s < self.until_s and is_like(self.state, state)


def rest(state: ClusterState, now_s: float, commands: Sequence[Action]) -> Rest:
    coming = (at_s for at_s in _moments(state) if at_s > now_s - _CLOSE_S)
    return Rest(state, now_s, min(coming, default=inf) - _CLOSE_S, tuple(commands))


def is_like(before: ClusterState, now: ClusterState) -> bool:
    """Whether placement is asked the same by both."""
    if before is now:
        return True
    if before.nodes.keys() != now.nodes.keys() or before.chains.keys() != now.chains.keys():
        return False
    nodes, chains = now.nodes, now.chains
    return (
        all(
            node is nodes[id] or _lasting_of_node(node) == _lasting_of_node(nodes[id])
            for id, node in before.nodes.items()
        )
        and all(
            chain is chains[id] or _lasting_of_chain(chain) == _lasting_of_chain(chains[id])
            for id, chain in before.chains.items()
        )
        and _lasting_of_state(before) == _lasting_of_state(now)
    )


def _moments(state: ClusterState) -> Iterator[float]:
    """Times at which an answer may differ: every one that is compared with the clock besides heartbeats."""
    for node in state.nodes.values():
        for refusal in node.refusals:
            yield refusal.until_s
        yield node.seed_after_s
    for chain in state.chains.values():
        yield chain.search_at_s
        for unrest in (chain.unrest, chain.driver_unrest):
            yield from _moments_of(unrest, state)
    for move in state.moves:
        yield move.planned_s + state.placing.budget_s
    for row in state.links.values():
        for link in row.values():
            if not link.is_open:
                yield link.probe_at_s


def _moments_of(unrest: Unrest, state: ClusterState) -> Iterator[float]:
    policy = state.placing
    yield unrest.since_s + policy.forgotten_after_s
    yield unrest.since_s + policy.least_lifetime_s * unrest.factor(policy, unrest.since_s)
