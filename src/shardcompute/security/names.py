"""Names of nodes, roles and clusters in certificates and tokens.

A node id is derived from the node's public key, so that nobody can choose one: `n` and the first 20 base32
characters (100 bits) of the key's SHA-256. A certificate names its owner with one URI,
`shardcompute://<cluster>/<node id>?role=<role>,<role>`, in exactly one spelling.
"""

from __future__ import annotations

import base64
import enum
import hashlib
import re
from collections.abc import Collection

from shardcompute.core.errors import AuthError, UsageError

_ID_CHARACTERS = 20
_CLUSTER = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,38}[a-z0-9])?")
_NODE_URI = re.compile(r"shardcompute://([a-z0-9-]{1,40})/(n[a-z2-7]{20})\?role=([a-z]+(?:,[a-z]+){0,7})")


class Role(enum.StrEnum):
    """What a node may do in its cluster."""

    COORDINATOR = "coordinator"
    DRIVER = "driver"
    WORKER = "worker"


def node_id_of(public_key: bytes) -> str:
    """The id that belongs to a raw Ed25519 public key."""
    digest = hashlib.sha256(public_key).digest()
    return "n" + base64.b32encode(digest).decode().lower()[:_ID_CHARACTERS]


def check_cluster_name(name: str) -> str:
    """The name itself; `UsageError` unless it is 1 to 40 of a-z, 0-9 and inner dashes."""
    if not _CLUSTER.fullmatch(name):
        raise UsageError(
            f"{name[:60]!r} cannot be the name of a cluster",
            hint="use 1 to 40 lower-case letters, digits and dashes, such as home or lab-2",
        )
    return name


def node_uri(cluster: str, node_id: str, roles: Collection[Role]) -> str:
    return f"shardcompute://{cluster}/{node_id}?role={','.join(sorted(roles))}"


def parse_node_uri(uri: str) -> tuple[str, str, frozenset[Role]]:
    """(cluster, node id, roles) of a certificate's URI; `AuthError` for anything but our own spelling."""
    match = _NODE_URI.fullmatch(uri)
    try:
        if match is not None:
            cluster, node_id, names = match.groups()
            roles = frozenset(Role(name) for name in names.split(","))
            if node_uri(cluster, node_id, roles) == uri:
                return cluster, node_id, roles
    except ValueError:
        pass
    raise AuthError(
        f"The certificate names its owner in a way this version does not know: {uri[:120]!r}",
        hint="run the same version of ShardCompute on all nodes",
    )
