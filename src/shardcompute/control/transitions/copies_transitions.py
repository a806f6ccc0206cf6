"""How demand for a model, and the copies of it that are wanted for that, change the state (see `watch.copies`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from msgspec.structs import replace

from shardcompute.control import events as happened
from shardcompute.control.state import ClusterState, Demand


def _change_copies(state: ClusterState, event: happened.CopiesWanted) -> ClusterState:
    known = state.models.get(event.model)
    if known is None or event.extra_chains < 0:
        return state
    changed = replace(
        known,
        extra_chains=event.extra_chains,
        leaving_chain=event.leaving,
        copies_reason=event.reason,
        copies_s=event.now_s,
    )
    return replace(state, models={**state.models, event.model: changed})


def _see_demand(state: ClusterState, event: happened.DemandSeen) -> ClusterState:
    requested = state.models.get(event.model)
    if requested is None or any(count < 0 for count in event.sessions.values()):
        return state
    chains = {chain.id for chain in state.live_chains(event.model)}
    sessions: Mapping[str, int] = {id: count for id, count in event.sessions.items() if id in chains}
    total = sum(sessions.values())
    each, copies = state.placing.sessions_per_chain, max(1, len(chains))
    known = state.demand.get(event.model) or Demand()
    is_crowded, is_calm = total > each * copies, total <= each * (copies - 1) // 2
    demand = Demand(
        sessions=dict(sessions),
        seen_s=event.now_s,
        crowded_s=(known.crowded_s or event.now_s) if is_crowded else 0.0,
        calm_s=(known.calm_s or event.now_s) if is_calm else 0.0,
    )
    return replace(state, demand={**state.demand, event.model: demand})


COPIES: dict[type, Callable[[ClusterState, Any], ClusterState]] = {
    happened.CopiesWanted: _change_copies,
    happened.DemandSeen: _see_demand,
}
