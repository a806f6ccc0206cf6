"""How events about audits change the state: reputations, and who computes nothing for others any more."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from msgspec.structs import replace

from shardcompute.control import events as happened
from shardcompute.control.driver_placement import HOME
from shardcompute.control.state import AuditShard, ClusterState, Node
from shardcompute.control.transitions.state_updates import (
    forget_moves,
    interrupt,
    is_on_probation,
    with_chain,
    with_node,
)
from shardcompute.trust.pools import admitted, after_finding, suspends
from shardcompute.trust.reputation import NEW, after_audit, is_expelled


def _begin(state: ClusterState, event: happened.AuditBegun) -> ClusterState:
    if event.chain in state.chains or event.node not in state.nodes or event.start >= event.stop:
        return state
    shard = AuditShard(event.node, event.start, event.stop)
    return replace(state, audits={**state.audits, event.chain: shard})


def _end(state: ClusterState, event: happened.AuditEnded) -> ClusterState:
    if event.chain not in state.audits:
        return state
    return replace(state, audits={key: each for key, each in state.audits.items() if key != event.chain})


def _settle(state: ClusterState, event: happened.AuditSettled) -> ClusterState:
    """Also of a node that is away: it is who it was when it comes back."""
    is_suspended = suspends(state.pool.get(event.node), event.finding)
    state = _judge_stranger(state, event)
    node = state.nodes.get(event.node)
    if node is None:
        return state
    node = replace(
        node,
        reputation=after_audit(node.reputation, event.finding),
        audits=node.audits + 1,
        audits_failed=node.audits_failed + (event.finding != "passed"),
    )
    is_out = is_suspended or is_expelled(node.reputation)
    if event.finding == "passed" or not is_out or node.quarantine:
        return with_node(state, node)
    return _expel(state, node, f"an audit {_IN_WORDS[event.finding]}: {event.reason}")


_IN_WORDS = {
    "failed": "failed",
    "withheld": "could not be made",
    "disputed": "ended in a dispute",
}


def _expel(state: ClusterState, node: Node, reason: str) -> ClusterState:
    """It leaves all chains at once. What others hold of their sessions came of what it sent: all is computed again."""
    status = "quarantined" if node.is_live else node.status
    state = with_node(state, replace(node, quarantine=reason, status=status, status_reason=reason))
    for chain in state.live_chains():
        kept = tuple(each for each in chain.standbys if node.id not in each.members)
        host = HOME if chain.driver_host == node.id else chain.driver_host
        chain = replace(chain, standbys=kept, driver_host=host)
        if node.id in chain.members:
            chain = replace(chain, used_stages=(), target=None)
            state = interrupt(with_chain(state, chain), chain, f"{node.name} is in quarantine: {reason}")
        else:
            state = with_chain(state, chain)
    return forget_moves(state)


def _admit(state: ClusterState, event: happened.StrangerAdmitted) -> ClusterState:
    pool = admitted(state.pool, event.node, event.network, event.at_s)
    return _mark(replace(state, pool=pool), event.node)


def _judge_stranger(state: ClusterState, event: happened.AuditSettled) -> ClusterState:
    member = state.pool.get(event.node)
    if member is None:
        return state
    judged = after_finding(member, state.pooling, event.finding, event.windows, event.reason, event.at_s)
    state = _mark(replace(state, pool={**state.pool, event.node: judged}), event.node)
    # With a record it may be asked for other layers than before.
    return forget_moves(state) if judged.standing != member.standing else state


def _mark(state: ClusterState, node_id: str) -> ClusterState:
    node = state.nodes.get(node_id)
    if node is None:
        return state
    return with_node(state, replace(node, is_on_probation=is_on_probation(state, node_id)))


def _pardon(state: ClusterState, event: happened.NodePardoned) -> ClusterState:
    node = state.nodes.get(event.node)
    if node is None or not node.quarantine:
        return state
    node = replace(node, quarantine="", reputation=NEW, status_reason="")
    if node.status == "quarantined":
        # Its next heartbeat says how it is.
        node = replace(node, status="joining" if node.seconds_per_byte is None else "ready")
    return forget_moves(with_node(state, node))


AUDITS: dict[type, Callable[[ClusterState, Any], ClusterState]] = {
    happened.AuditBegun: _begin,
    happened.AuditEnded: _end,
    happened.AuditSettled: _settle,
    happened.NodePardoned: _pardon,
    happened.StrangerAdmitted: _admit,
}
