"""How events about shards change the state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from msgspec.structs import replace

from shardcompute.control import events as happened
from shardcompute.control.policy import HealthPolicy
from shardcompute.control.sizes import place_bytes
from shardcompute.control.state import (
    ClusterState,
    Holding,
    Loading,
    Node,
    Refusal,
    Shard,
    ShardPlace,
    holds,
    place_on,
)
from shardcompute.control.transitions.state_updates import (
    claimed_bytes,
    interrupt,
    live_node,
    trim_standbys,
    with_chain,
    with_node,
)

_SEED_AGAIN_S = 600.0


def _progress(state: ClusterState, event: happened.ShardProgressed) -> ClusterState:
    node = live_node(state, event.node, event.incarnation)
    if node is None:
        return state
    node = _without_progress(node, happened.place_in(event))
    fraction = min(1.0, max(0.0, event.fraction))
    loading = (*node.loading, Loading(event.chain, event.start, event.stop, fraction, event.tensor))
    return _note_loading(with_node(state, replace(node, loading=loading)), event.chain)


def _load(state: ClusterState, event: happened.ShardLoaded) -> ClusterState:
    node = live_node(state, event.node, event.incarnation)
    if node is None or event.start >= event.stop:
        return state
    node = _without_progress(node, happened.place_in(event))
    node = _without_shard(node, happened.place_in(event))
    shard = Shard(event.chain, event.model, event.start, event.stop, event.size_bytes, event.tensor)
    node = replace(
        node,
        shards=(*node.shards, shard),
        cached=_with_holding(node.cached, Holding(event.model, event.start, event.stop)),
        refusals=tuple(refusal for refusal in node.refusals if refusal.model != event.model),
    )
    return _note_loading(with_node(state, node), event.chain)


def _fail(state: ClusterState, event: happened.ShardFailed) -> ClusterState:
    node = live_node(state, event.node, event.incarnation)
    if node is None:
        return state
    node = _without_progress(node, happened.place_in(event))
    node = _without_shard(node, happened.place_in(event))
    refused = _leave_alone(node, event.model, event.reason, state.health, event.now_s)
    if event.memory_bytes is not None:
        refused = _with_less_memory(state, refused, event, event.memory_bytes)
    state = trim_standbys(with_node(state, refused))
    state = _interrupt_at(state, event.node, happened.place_in(event), event.reason)
    return state if event.memory_bytes is None else _interrupt_unplaceable(state, event.node)


def _interrupt_unplaceable(state: ClusterState, node_id: str) -> ClusterState:
    """What was to be loaded on a node that offers less now, and does not fit any more, would be waited for in vain."""
    if claimed_bytes(state, node_id) <= state.nodes[node_id].room_bytes:
        return state
    for chain in state.live_chains():
        for stage in chain.stages:
            if node_id in stage.members and not holds(state, chain, stage, node_id):
                state = interrupt(state, chain, f"{node_id} has too little memory left", lost=node_id)
    return state


def _with_less_memory(
    state: ClusterState, node: Node, event: happened.ShardFailed, memory_bytes: int
) -> Node:
    """A node whose memory ran out offers less: so much less that these layers cannot be planned there again. That is
    enough for another plan, so that it is not left alone, unless it fails with what fits better, too."""
    requested = state.models.get(event.model)
    if requested is not None and event.stop <= requested.model.layer_count:
        size_bytes = place_bytes(requested.model, node.holding_of(requested.model), happened.place_in(event))
        others_bytes = node.process_bytes + sum(shard.size_bytes for shard in node.shards)
        memory_bytes = min(memory_bytes, others_bytes + size_bytes * 15 // 16)
    refusals = tuple(
        replace(each, until_s=event.now_s)
        if each.model == event.model and each.failures <= state.health.memory_failures
        else each
        for each in node.refusals
    )
    memory_bytes = max(0, min(node.memory_bytes, memory_bytes))
    return replace(node, memory_bytes=memory_bytes, memory_reason=event.reason, refusals=refusals)


def _stall(state: ClusterState, event: happened.StageStalled) -> ClusterState:
    """The shard stays where it is until it is unloaded, and nobody computes with it."""
    node, chain = live_node(state, event.node, event.incarnation), state.chains.get(event.chain)
    if node is None or chain is None or not chain.is_live or node.id not in chain.members:
        return state
    state = with_node(state, _leave_alone(node, chain.model, event.reason, state.health, event.now_s))
    return interrupt(state, chain, f"{node.name}: {event.reason}", lost=node.id)


def _leave_alone(node: Node, model: str, reason: str, health: HealthPolicy, now_s: float) -> Node:
    """A node that failed with a model is not given it again for a while, which doubles with each failure."""
    earlier = next((each.failures for each in node.refusals if each.model == model), 0)
    # The exponent is bounded so that a machine that fails for weeks cannot overflow the wait.
    wait_s = min(health.retry_limit_s, health.retry_after_s * 2 ** min(earlier, 32))
    refusal = Refusal(model, reason, earlier + 1, now_s + wait_s)
    others = tuple(each for each in node.refusals if each.model != model)
    return replace(node, refusals=(*others, refusal))


def _unload(state: ClusterState, event: happened.ShardUnloaded) -> ClusterState:
    node = live_node(state, event.node, event.incarnation)
    if node is None or not node.has_shard(*happened.place_in(event)):
        return state
    state = with_node(state, _without_shard(node, happened.place_in(event)))
    return _interrupt_at(state, event.node, happened.place_in(event), "its shard was unloaded")


def _interrupt_at(state: ClusterState, node: str, place: ShardPlace, reason: str) -> ClusterState:
    chain = state.chains.get(place[0])
    if chain is None:
        return state
    is_stage = any(node in each.members and place_on(chain, each, node) == place for each in chain.stages)
    return interrupt(state, chain, f"{node}: {reason}", lost=node) if is_stage else state


def _note_loading(state: ClusterState, chain_id: str) -> ClusterState:
    chain = state.chains.get(chain_id)
    if chain is None or chain.status != "planned":
        return state
    return with_chain(state, replace(chain, status="loading"))


def _without_shard(node: Node, place: ShardPlace) -> Node:
    return replace(node, shards=tuple(held for held in node.shards if held.place != place))


def _without_progress(node: Node, place: ShardPlace) -> Node:
    return replace(node, loading=tuple(each for each in node.loading if each.place != place))


def _with_holding(cached: tuple[Holding, ...], new: Holding) -> tuple[Holding, ...]:
    """The union of what was cached and a new range, as few ranges as possible."""
    start, stop, others = new.start, new.stop, []
    for held in cached:
        if held.model == new.model and held.start <= stop and held.stop >= start:
            start, stop = min(start, held.start), max(stop, held.stop)
        else:
            others.append(held)
    merged = Holding(new.model, start, stop)
    return tuple(sorted((*others, merged), key=lambda held: (held.model, held.start)))


def _choose_seed(state: ClusterState, event: happened.SeedChosen) -> ClusterState:
    node = live_node(state, event.node, event.incarnation)
    return state if node is None else with_node(state, replace(node, seed=event.seed, seed_problem=""))


def _note_seeded(state: ClusterState, event: happened.WeightsSeeded) -> ClusterState:
    node = live_node(state, event.node, event.incarnation)
    if node is None or event.start >= event.stop:
        return state
    cached = _with_holding(node.cached, Holding(event.model, event.start, event.stop))
    return with_node(state, replace(node, cached=cached))


def _fail_seeding(state: ClusterState, event: happened.SeedingFailed) -> ClusterState:
    """It is asked again after a while: its disk may have room then."""
    node = live_node(state, event.node, event.incarnation)
    if node is None:
        return state
    later_s = event.now_s + _SEED_AGAIN_S
    return with_node(state, replace(node, seed=None, seed_problem=event.reason, seed_after_s=later_s))


SHARDS: dict[type, Callable[[ClusterState, Any], ClusterState]] = {
    happened.ShardProgressed: _progress,
    happened.ShardLoaded: _load,
    happened.ShardFailed: _fail,
    happened.StageStalled: _stall,
    happened.ShardUnloaded: _unload,
    happened.SeedChosen: _choose_seed,
    happened.WeightsSeeded: _note_seeded,
    happened.SeedingFailed: _fail_seeding,
}
