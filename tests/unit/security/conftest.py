"""A cluster on disk: an authority and nodes with certificates."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from shardcompute.security import ClusterAuthority, Credentials, NodeIdentity, Role

MakeNode = Callable[..., Credentials]


@pytest.fixture
def now_s() -> float:
    """The real time: OpenSSL checks certificates against it."""
    return time.time()


@pytest.fixture
def authority(tmp_path: Path, now_s: float) -> ClusterAuthority:
    return ClusterAuthority.create(tmp_path / "authority", "home", now_s=now_s)


@pytest.fixture
def make_node(tmp_path: Path, authority: ClusterAuthority, now_s: float) -> MakeNode:
    """Makes a node in a folder of its own, with a certificate from `signer` (the cluster's authority)."""

    def make(
        folder: str, *roles: Role, signer: ClusterAuthority = authority, days: int = 7, at_s: float = now_s
    ) -> Credentials:
        identity = NodeIdentity.open(tmp_path / folder)
        certificate_pem = signer.issue(
            identity.certificate_request(),
            node_id=identity.node_id,
            roles=roles or (Role.WORKER,),
            now_s=at_s,
            days=days,
        )
        return Credentials(identity, certificate_pem, signer.certificate_pem)

    return make
