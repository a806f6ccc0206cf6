"""Entering a cluster for a while: as a driver that serves nobody, to ask its workers for something of one's own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardcompute.core.settings import load_settings

if TYPE_CHECKING:
    from shardcompute.cluster_client import ClusterClient
    from shardcompute.node.admin.views import NodeView
    from shardcompute.node.enrolment.visiting import VisitedCluster

_TOKEN_LIFE_S = 300.0


def enter_cluster(client: ClusterClient, purpose: str) -> VisitedCluster:
    """Join with a token that is made for it; the identity is kept under the name of the purpose."""
    from shardcompute.node.enrolment.visiting import visit_cluster

    token = client.create_token(expires_s=_TOKEN_LIFE_S, max_uses=1, role="driver").token
    return visit_cluster(token, load_settings().data_dir / purpose)


def ready_workers(client: ClusterClient) -> list[NodeView]:
    """Those that are there and may work, always in the same order."""
    return sorted((each for each in client.state().nodes if _is_ready(each)), key=lambda each: each.id)


def _is_ready(node: NodeView) -> bool:
    return node.role == "worker" and node.status == "ready" and not node.is_draining and not node.rest_reason
