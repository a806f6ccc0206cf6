"""Security of a cluster: identities, certificates, TLS, join tokens, API keys, revocations.

Owns the cluster's authority, who may act in which role, and files that hold secrets. Books and lists are values
without a clock; whoever keeps them gives the time. May call `core` alone, and logs no secret.
"""

from __future__ import annotations

from shardcompute.security.api_keys import KeyBook, KeyLimits, KeyRecord, KeyRole, KeySummary
from shardcompute.security.authority import ClusterAuthority
from shardcompute.security.bootstrap import (
    JOIN_HELLO,
    answer_join,
    check_coordinator,
    join_greeting,
    open_join,
    pinned_authority,
)
from shardcompute.security.certificates import PeerIdentity, check_peer, needs_renewal, read_peer
from shardcompute.security.credentials import Credentials
from shardcompute.security.identity import NodeIdentity, verify_signature
from shardcompute.security.names import Role, check_cluster_name, node_id_of
from shardcompute.security.revocations import Revocations
from shardcompute.security.secrets import RedactSecrets, redact
from shardcompute.security.tls import (
    client_context,
    join_client_context,
    join_server_context,
    peer_identity,
    server_context,
)
from shardcompute.security.token_book import TokenBook, TokenRecord, TokenSummary
from shardcompute.security.tokens import JoinToken, parse_token

__all__ = [
    "JOIN_HELLO",
    "ClusterAuthority",
    "Credentials",
    "JoinToken",
    "KeyBook",
    "KeyLimits",
    "KeyRecord",
    "KeyRole",
    "KeySummary",
    "NodeIdentity",
    "PeerIdentity",
    "RedactSecrets",
    "Revocations",
    "Role",
    "TokenBook",
    "TokenRecord",
    "TokenSummary",
    "answer_join",
    "check_cluster_name",
    "check_coordinator",
    "check_peer",
    "client_context",
    "join_client_context",
    "join_greeting",
    "join_server_context",
    "needs_renewal",
    "node_id_of",
    "open_join",
    "parse_token",
    "peer_identity",
    "pinned_authority",
    "read_peer",
    "redact",
    "server_context",
    "verify_signature",
]
