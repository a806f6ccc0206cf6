"""The control plane as pure functions: what happened, what we believe, what to do next.

    state = apply(state, event)               the only way the state changes
    actions = next_actions(state, now_s)      decisions to record, then commands to carry out

No sockets, no asyncio, no tensors, no clock: the coordinator's shell brings events and time and does the rest.
"""

from __future__ import annotations

from shardcompute.control.actions import Action, Record
from shardcompute.control.events import Event, decode_event, encode_event, is_journalled
from shardcompute.control.explain import explain_plan, report_models
from shardcompute.control.health import needs_rejoin
from shardcompute.control.placement.capacities import NodeCapacity, Request
from shardcompute.control.placement.place import Placement, Unplaceable, place, place_chains
from shardcompute.control.placement.replacement import Replacement, replace_stage
from shardcompute.control.planning import next_actions
from shardcompute.control.policy import HealthPolicy, PlacementPolicy
from shardcompute.control.state import COORDINATOR, ClusterState, Model
from shardcompute.control.transitions.apply import apply
from shardcompute.control.transitions.memorable import memorable
from shardcompute.control.transitions.node_transitions import next_incarnation

__all__ = [
    "COORDINATOR",
    "Action",
    "ClusterState",
    "Event",
    "HealthPolicy",
    "Model",
    "NodeCapacity",
    "Placement",
    "PlacementPolicy",
    "Record",
    "Replacement",
    "Request",
    "Unplaceable",
    "apply",
    "decode_event",
    "encode_event",
    "explain_plan",
    "is_journalled",
    "memorable",
    "needs_rejoin",
    "next_actions",
    "next_incarnation",
    "place",
    "place_chains",
    "replace_stage",
    "report_models",
]
