"""Revocation list: nodes that were removed although their certificates have not run out.

The coordinator keeps the list and sends it to every node, which checks peers against it after each handshake
and closes open links to those on it. The list only grows: a machine that may come back makes a new identity. It lies
beside the authority, so that whoever can let machines in knows whom not to.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from shardcompute.core.errors import SourceError
from shardcompute.security.private_files import read_private, replace_private
from shardcompute.security.stored import Stored, read_stored, write_stored

REVOCATIONS_FILE = "revocations"


@dataclass(frozen=True, slots=True)
class Revocations:
    """The ids of nodes that were removed."""

    node_ids: frozenset[str] = frozenset()

    def with_node(self, node_id: str) -> Revocations:
        return Revocations(self.node_ids | {node_id})

    def merged(self, other: Revocations) -> Revocations:
        """Everything that either list revokes, so that an old list never readmits anyone."""
        return Revocations(self.node_ids | other.node_ids)

    def covers(self, node_id: str) -> bool:
        return node_id in self.node_ids

    def to_bytes(self) -> bytes:
        return write_stored(_StoredRevocations(1, self.node_ids))

    @classmethod
    def from_bytes(cls, content: bytes) -> Revocations:
        stored = read_stored(content, _StoredRevocations, "The list of revoked nodes")
        return cls(stored.node_ids)


class _StoredRevocations(Stored, frozen=True):
    node_ids: frozenset[str]


def load_revocations(folder: Path) -> Revocations | None:
    """The list beside the authority in `folder`, None if there is none; `SourceError` if it is damaged."""
    path = folder / REVOCATIONS_FILE
    try:
        return Revocations.from_bytes(read_private(path))
    except FileNotFoundError:
        return None
    except SourceError as error:
        raise SourceError(
            f"{path}: {error.message}",
            hint="restore it from a copy; without one delete it, and the list in the journal counts alone",
        ) from error


def save_revocations(folder: Path, revocations: Revocations) -> None:
    """On the disk when this returns, whole or not at all."""
    replace_private(folder / REVOCATIONS_FILE, revocations.to_bytes())
