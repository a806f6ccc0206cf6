"""Who is suspected and who is lost, from silence and from broken links; time comes in as `now_s`.

Silence first makes a node suspected (no new work, nothing moves), then lost (its stages are replaced; where
nobody can replace them, `decisions` leaves it more time). A reset control link, or two neighbours that cannot
reach a node, make it suspected at once; a heartbeat clears it. A node that is lost must join anew.
"""

from __future__ import annotations

from shardcompute.control.events import NodeLost, NodeSuspected
from shardcompute.control.policy import HealthPolicy
from shardcompute.control.state import COORDINATOR, ClusterState, Node


def next_health_events(state: ClusterState, now_s: float) -> list[NodeSuspected | NodeLost]:
    """What must be said about nodes at this time; empty when nothing changed."""
    found: list[NodeSuspected | NodeLost] = []
    for id in sorted(state.nodes):
        node = state.nodes[id]
        if not node.is_live:
            continue
        if node.status != "suspected":
            reason = suspicion(node, state.health, now_s)
            if reason:
                found.append(NodeSuspected(id, node.incarnation, reason, now_s))
        elif now_s >= node.lease_until_s:
            reason = node.status_reason or "silent"
            found.append(NodeLost(id, node.incarnation, reason, now_s))
    return found


def suspicion(node: Node, policy: HealthPolicy, now_s: float) -> str:
    """Why this node is to be suspected; empty when it is not."""
    if COORDINATOR in node.accusers:
        return "its control link was reset"
    if len(node.accusers) >= policy.accusers:
        return f"{len(node.accusers)} neighbours cannot reach it"
    if now_s - node.last_seen_s >= policy.suspect_after_s:
        return "no heartbeat"
    return ""


def needs_rejoin(state: ClusterState, node_id: str, incarnation: int) -> bool:
    """True when a heartbeat of this life means nothing to us: tell the node to join anew."""
    node = state.nodes.get(node_id)
    return node is None or not node.is_live or node.incarnation != incarnation
