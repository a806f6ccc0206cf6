"""How events about nodes change the state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from msgspec.structs import replace

from shardcompute.control import events as happened
from shardcompute.control.samples import median, with_sample
from shardcompute.control.state import (
    ClusterState,
    GroupTime,
    LayerTime,
    Node,
    NodeDescription,
    NodeStatus,
    holds,
)
from shardcompute.control.transitions.link_transitions import begin_links_anew
from shardcompute.control.transitions.move_transitions import begin_moves_anew
from shardcompute.control.transitions.state_updates import (
    claimed_bytes,
    forget_left,
    forget_moves,
    interrupt,
    is_on_probation,
    live_node,
    trim_standbys,
    with_chain,
    with_node,
)


def next_incarnation(state: ClusterState, node_id: str) -> int:
    """The number to give to a node that dials in now."""
    node = state.nodes.get(node_id)
    return 1 if node is None else node.incarnation + 1


_KEPT_GROUPS = 8
_ANOTHER = 1.5
"""A machine that takes so many times as long, or as little, is not what it was."""


def _settled_status(node: Node) -> NodeStatus:
    """The status of a node that we have no reason to suspect."""
    if node.quarantine:
        return "quarantined"
    if node.is_at_rest:
        return "resting"
    if node.is_draining:
        return "draining"
    return "joining" if node.can_work and node.seconds_per_byte is None else "ready"


def _join(state: ClusterState, event: happened.NodeJoined) -> ClusterState:
    old = state.nodes.get(event.node)
    if old is not None and event.incarnation <= old.incarnation:
        return state
    described = {name: getattr(event, name) for name in NodeDescription.__struct_fields__}
    # What was measured on another device, or failed there, says nothing of this one.
    measured = old if old is not None and _is_same_device(old, event) else None
    probes = measured.probes if measured else ()
    if event.seconds_per_byte is not None:
        probes = with_sample(probes, event.seconds_per_byte)
    described["seconds_per_byte"] = median(probes)
    described["remembered"] = ()
    # A drained node whose control link flickers is still to be emptied, and then to leave.
    must_leave = old is not None and old.is_live and old.is_draining and not old.rest_reason
    if must_leave:
        described |= {"rest_reason": "", "is_at_rest": False}
    node = Node(
        **described,
        id=event.node,
        status="joining",
        last_seen_s=event.now_s,
        lease_until_s=event.now_s + state.health.lost_after_s,
        is_draining=must_leave or bool(event.rest_reason),
        layer_times=_with_remembered(measured.layer_times if measured else (), event.remembered),
        group_times=measured.group_times if measured else (),
        probes=probes,
        refusals=measured.refusals if measured else (),
        attested=event.attested,
        **_standing_of(old),
        is_on_probation=is_on_probation(state, event.node),
    )
    state = with_node(state, replace(node, status=_settled_status(node)))
    if node.can_work and (old is None or not old.is_live):
        state = forget_moves(state)
    state = _interrupt_at_rest(state, event.node)
    if old is not None and old.is_live and old.address != event.address:
        state = _interrupt_moved(state, event.node)
    return trim_standbys(_interrupt_unheld(state, event.node))


def _standing_of(old: Node | None) -> dict[str, Any]:
    """Whoever comes back is who it was."""
    if old is None:
        return {}
    return {name: getattr(old, name) for name in ("reputation", "audits", "audits_failed", "quarantine")}


def _interrupt_moved(state: ClusterState, node_id: str) -> ClusterState:
    """Links to where it was lead nowhere, whether or not that has been noticed: its chains are connected anew."""
    for chain in state.live_chains():
        if node_id in chain.nodes:
            state = interrupt(state, chain, f"{state.nodes[node_id].name} has another address")
    return state


def _interrupt_at_rest(state: ClusterState, node_id: str) -> ClusterState:
    """Whoever rests computes nothing: its chains go on elsewhere, or wait for it."""
    node = state.nodes[node_id]
    if not node.is_at_rest:
        return state
    for chain in state.live_chains():
        if node_id in chain.nodes:
            state = interrupt(state, chain, f"{node.name} rests: {node.rest_reason}")
    return _without_standbys_on(state, node_id)


def _is_same_device(a: NodeDescription, b: NodeDescription) -> bool:
    return (a.device, a.backend, a.device_label) == (b.device, b.backend, b.device_label)


def _with_remembered(
    known: tuple[LayerTime, ...], remembered: tuple[LayerTime, ...]
) -> tuple[LayerTime, ...]:
    """What is known here counts, and is newer; of models with names of its own the node says nothing new."""
    names = {time.model for time in known}
    shapes = [time.shape for time in known if time.shape is not None]
    new = [
        time
        for time in remembered
        if time.model not in names
        and time.shape is not None
        and not any(shape.is_like(time.shape) for shape in shapes)
    ]
    return tuple(sorted((*known, *new), key=lambda time: time.model))


def _interrupt_unheld(state: ClusterState, node_id: str) -> ClusterState:
    """A node that came back may have forgotten its shards or brought less memory."""
    is_overfull = claimed_bytes(state, node_id) > state.nodes[node_id].room_bytes
    for chain in state.live_chains():
        for stage in chain.stages:
            if node_id not in stage.members:
                continue
            is_forgotten = chain.connected_epoch == chain.epoch and not holds(state, chain, stage, node_id)
            if is_overfull or is_forgotten:
                state = interrupt(state, chain, f"{node_id} came back without its shard", lost=node_id)
    return state


def _see(state: ClusterState, event: happened.NodeSeen) -> ClusterState:
    return _see_many(state, happened.NodesSeen((event,)))


def _see_many(state: ClusterState, event: happened.NodesSeen) -> ClusterState:
    """One copy of the nodes for all: with thousands, a copy for each heartbeat is most of what there is to do."""
    heard = [each for each in event.seen if live_node(state, each.node, each.incarnation) is not None]
    if not heard:
        return state
    nodes, newest_s = dict(state.nodes), _newest_s(state)
    for each in heard:
        seen_s = max(nodes[each.node].last_seen_s, each.now_s)
        # Nobody at all was heard of for a while: that was our own line, and says nothing about any of them.
        if newest_s is not None and seen_s - newest_s >= state.health.suspect_after_s:
            nodes = dict(_renew_leases(replace(state, nodes=nodes), seen_s).nodes)
        nodes[each.node] = _seen(nodes[each.node], each, seen_s, state.health.lost_after_s)
        newest_s = None if newest_s is None else max(newest_s, seen_s)
    return replace(state, nodes=nodes)


def _newest_s(state: ClusterState) -> float | None:
    """When anybody was last heard of; None where one alone may be silent for reasons of its own."""
    times = [node.last_seen_s for node in state.nodes.values() if node.is_live]
    return max(times) if len(times) > 1 else None


def _seen(node: Node, event: happened.NodeSeen, seen_s: float, lost_after_s: float) -> Node:
    return replace(
        node,
        status=_settled_status(node),
        status_reason=node.quarantine,
        accusers=(),
        resident_bytes=event.resident_bytes or node.resident_bytes,
        kv_used_bytes=event.kv_used_bytes,
        draft_heads=event.draft_heads,
        measured_watts=event.busy_watts or node.measured_watts,
        idle_watts=event.idle_watts or node.idle_watts,
        seeded_bytes=event.seeded_bytes,
        last_seen_s=seen_s,
        lease_until_s=seen_s + lost_after_s,
    )


def _renew_leases(state: ClusterState, now_s: float) -> ClusterState:
    """Those who are heard of a moment later than the first are not to be lost for that."""
    until_s = now_s + state.health.lost_after_s
    nodes = {
        id: replace(node, lease_until_s=max(node.lease_until_s, until_s)) if node.is_live else node
        for id, node in state.nodes.items()
    }
    return replace(state, nodes=nodes)


def _measure_node(state: ClusterState, event: happened.NodeMeasured) -> ClusterState:
    node = live_node(state, event.node, event.incarnation)
    if node is None:
        return state
    if event.seconds_per_byte is not None and event.seconds_per_byte > 0:
        probes = with_sample(node.probes, event.seconds_per_byte)
        node = replace(node, seconds_per_byte=median(probes), probes=probes)
    if event.overhead_s is not None and event.overhead_s >= 0:
        node = replace(node, overhead_s=event.overhead_s)
    if event.chain:
        return with_node(state, _with_group_time(state, node, event))
    if event.model is not None and event.layer_s is not None and event.layer_s > 0:
        times = {time.model: time for time in node.layer_times}
        known = times.get(event.model, LayerTime(event.model, 0.0, shape=event.shape))
        if known.shape != event.shape:  # the same name in another form
            known = LayerTime(event.model, 0.0, shape=event.shape)
        times[event.model] = _with_layer_time(known, event, event.layer_s)
        if event.is_served and _is_another(known.seconds, event.layer_s):
            state = forget_left(state)
        node = replace(node, layer_times=tuple(times[model] for model in sorted(times)))
    if node.status == "joining":
        node = replace(node, status=_settled_status(node))
    return with_node(state, node)


def _is_another(before_s: float, now_s: float) -> bool:
    return before_s > 0 and not 1 / _ANOTHER <= now_s / before_s <= _ANOTHER


def _with_group_time(state: ClusterState, node: Node, event: happened.NodeMeasured) -> Node:
    """What a group that the node leads takes: it says nothing of the node alone."""
    chain = state.chains.get(event.chain)
    led = [stage for stage in chain.stages if stage.ranks and stage.node == node.id] if chain else []
    if not led or chain is None or event.layer_s is None or event.layer_s <= 0:
        return node
    stage = led[0]
    time = GroupTime(chain.model, stage.members, stage.exchange, event.layer_s, event.shape)
    others = [
        each
        for each in node.group_times
        if (each.model, each.members, each.exchange) != (time.model, time.members, time.exchange)
    ]
    return replace(node, group_times=(*others, time)[-_KEPT_GROUPS:])


def _with_layer_time(known: LayerTime, event: happened.NodeMeasured, layer_s: float) -> LayerTime:
    common = {
        "batch_s": event.batch_layer_s or known.batch_s,
        "prefill_s": event.prefill_layer_s or known.prefill_s,
        "measured_at_s": event.measured_at_s,
    }
    if event.is_served:
        loaded_s = known.loaded_s or layer_s
        return replace(known, seconds=layer_s, samples=(), loaded_s=loaded_s, is_served=True, **common)
    samples = with_sample(known.samples, layer_s)
    seconds = median(samples) or layer_s
    return replace(known, seconds=seconds, samples=samples, loaded_s=seconds, is_served=False, **common)


def _regain(state: ClusterState, event: happened.MemoryRegained) -> ClusterState:
    """How often chains have moved is not forgotten for it: memory that comes and goes must move nothing again and
    again."""
    node = live_node(state, event.node, event.incarnation)
    if node is None:
        return state
    memory_bytes = max(node.memory_bytes, event.memory_bytes)
    reason = "" if event.is_all else node.memory_reason
    return with_node(state, replace(node, memory_bytes=memory_bytes, memory_reason=reason))


def _suspect(state: ClusterState, event: happened.NodeSuspected) -> ClusterState:
    node = live_node(state, event.node, event.incarnation)
    if node is None:
        return state
    return with_node(state, replace(node, status="suspected", status_reason=event.reason))


def _drain(state: ClusterState, event: happened.NodeDrained) -> ClusterState:
    node = live_node(state, event.node)
    if node is None:
        return state
    node = replace(node, is_draining=True, rest_reason="", is_at_rest=False)
    status = node.status if node.status == "suspected" else _settled_status(node)
    return forget_moves(with_node(state, replace(node, status=status)))


def _rest(state: ClusterState, event: happened.NodeRested) -> ClusterState:
    node = live_node(state, event.node, event.incarnation)
    if node is None or (node.is_draining and not node.rest_reason):
        return state  # it is to leave anyway
    rests = bool(event.reason)
    node = replace(node, rest_reason=event.reason, is_at_rest=rests and event.is_at_rest, is_draining=rests)
    status = node.status if node.status == "suspected" else _settled_status(node)
    state = with_node(state, replace(node, status=status))
    return forget_moves(_interrupt_at_rest(state, node.id))


def _lose(state: ClusterState, event: happened.NodeLost) -> ClusterState:
    node = live_node(state, event.node, event.incarnation)
    if node is not None and node.is_draining and not _is_in_use(state, node.id):
        # It was told to go and went, before its answer was heard.
        return _part(state, event.node, event.incarnation, "gone", "left")
    return _part(state, event.node, event.incarnation, "lost", event.reason)


def _is_in_use(state: ClusterState, node_id: str) -> bool:
    return any(node_id in chain.members for chain in state.live_chains())


def _leave(state: ClusterState, event: happened.NodeLeft) -> ClusterState:
    return _part(state, event.node, event.incarnation, "gone", "left")


def _part(
    state: ClusterState, node_id: str, incarnation: int, status: NodeStatus, reason: str
) -> ClusterState:
    node = live_node(state, node_id, incarnation)
    if node is None:
        return state
    parted = replace(
        node, status=status, status_reason=reason, shards=(), loading=(), accusers=(), stage_times=()
    )
    state = with_node(state, parted)
    for chain in state.live_chains():
        if node_id in chain.members:
            lost = node_id if status == "lost" else ""
            state = interrupt(state, chain, f"{node.name} is {status}: {reason}", lost=lost)
    state = _without_standbys_on(state, node_id)
    return forget_moves(state) if node.can_work else state


def _without_standbys_on(state: ClusterState, node_id: str) -> ClusterState:
    chains = {
        id: replace(chain, standbys=tuple(each for each in chain.standbys if node_id not in each.members))
        for id, chain in state.chains.items()
    }
    return replace(state, chains=chains)


def _restart(state: ClusterState, event: happened.CoordinatorStarted) -> ClusterState:
    nodes = {
        id: replace(
            node,
            status="suspected",
            status_reason="the coordinator restarted",
            last_seen_s=event.now_s,
            lease_until_s=event.now_s + state.health.restart_grace_s,
            accusers=(),
        )
        if node.is_live
        else node
        for id, node in state.nodes.items()
    }
    state = begin_links_anew(replace(state, nodes=nodes, audits={}), event.now_s)
    state = begin_moves_anew(state, event.now_s)
    for chain in state.live_chains():
        # Other machines measure anew now as well: what is there is kept for a while.
        began = replace(
            chain,
            used_stages=(),
            lost=(),
            ring=None,
            host_failures=(),
            # Of the drivers in coordinators only ours is left: another machine may have led before.
            drivers=tuple(
                each for each in chain.drivers if each.session_namespace or each.driver == state.driver
            ),
            unrest=replace(chain.unrest, since_s=event.now_s),
            driver_unrest=replace(chain.driver_unrest, since_s=event.now_s),
        )
        state = with_chain(state, began)
        state = interrupt(state, state.chains[chain.id], "the coordinator restarted")
    return state


def _renew(state: ClusterState, event: happened.LeasesRenewed) -> ClusterState:
    return _renew_leases(state, event.now_s + state.health.restart_grace_s - state.health.lost_after_s)


MEMBERSHIP: dict[type, Callable[[ClusterState, Any], ClusterState]] = {
    happened.CoordinatorStarted: _restart,
    happened.LeasesRenewed: _renew,
    happened.NodeJoined: _join,
    happened.NodeSeen: _see,
    happened.NodesSeen: _see_many,
    happened.NodeMeasured: _measure_node,
    happened.MemoryRegained: _regain,
    happened.NodeSuspected: _suspect,
    happened.NodeLost: _lose,
    happened.NodeDrained: _drain,
    happened.NodeRested: _rest,
    happened.NodeLeft: _leave,
}
