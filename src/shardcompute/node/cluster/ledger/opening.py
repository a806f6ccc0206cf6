"""Opening the ledger in a cluster's folder: where it cannot be gone on with, the cluster starts all the same."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Collection
from pathlib import Path

from shardcompute.core.errors import SourceError
from shardcompute.node.cluster.ledger.file import LEDGER_FILE, LedgerFile
from shardcompute.node.cluster.ledger.keeper import LedgerKeeper
from shardcompute.node.cluster.ledger.meters import ReadMeters
from shardcompute.security import ClusterAuthority
from shardcompute.security.authority import is_signed_by_authority
from shardcompute.trust.draws import SECRET_BYTES, commit_secret
from shardcompute.trust.ledger import LedgerHeader

log = logging.getLogger(__name__)


def draw_secret() -> bytes:
    """By which audits are drawn."""
    return secrets.token_bytes(SECRET_BYTES)


def open_ledger(
    folder: Path,
    authority: ClusterAuthority,
    node: str,
    revoked: Callable[[], Collection[str]],
    read_meters: ReadMeters,
    secret: bytes,
) -> LedgerKeeper:
    """That of the coordinator `node`; `secret`: by which audits are drawn, empty where there are none."""
    header = LedgerHeader(cluster=authority.name, log=node, authority=authority.certificate_pem)
    file, problem = None, ""
    try:
        file = LedgerFile(folder / LEDGER_FILE, header, authority.sign, is_signed_by_authority, time.time)
    except SourceError as error:
        log.error("the cluster goes on without its ledger: %s", error)
        problem = error.message
    draw = commit_secret(secret).hex() if secret else ""
    return LedgerKeeper(file, authority.certificate_pem, revoked, read_meters, draw=draw, problem=problem)
