"""Visiting a cluster: a member that serves nobody and only dials, for as long as something of its own takes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from shardcompute.node.enrolment.stored import join_from
from shardcompute.node.rpc.commands import Peer
from shardcompute.node.rpc.endpoint import Endpoint
from shardcompute.security.names import Role
from shardcompute.security.tokens import parse_token
from shardcompute.wire import default_transports

_FOLDER_LETTERS = 16


@dataclass(frozen=True, slots=True)
class VisitedCluster:
    """A place in the cluster's network, and where its coordinator is."""

    endpoint: Endpoint
    control_url: str

    def coordinator(self) -> Peer:
        with self.endpoint.dial(self.control_url, "weights") as link:
            return Peer(link.peer, self.control_url)

    def close(self) -> None:
        self.endpoint.close()


def visit_cluster(token: str, folder: Path) -> VisitedCluster:
    """Join with a token for drivers; the identity is kept in this folder, by cluster."""
    invitation = parse_token(token)
    member = join_from(folder / invitation.fingerprint[:_FOLDER_LETTERS], invitation, Role.DRIVER)
    endpoint = Endpoint(member.credentials, "tcp://127.0.0.1:0", {}, transports=default_transports())
    endpoint.start()
    return VisitedCluster(endpoint, member.control_urls[0])
