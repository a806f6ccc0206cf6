"""Backup of a cluster: its authority, who was thrown out of it, and its journal with keys, tokens and models.

One private file that vouches for itself: whoever has it is the cluster. Models' files and history are not in it.
"""

from __future__ import annotations

import hashlib
import os
import time
import zlib
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import msgspec

from shardcompute.control import ClusterState
from shardcompute.core.errors import SourceError, UsageError
from shardcompute.core.units import count_of
from shardcompute.node.cluster import authority_folder
from shardcompute.node.coordinator.journal import (
    CLUSTER_NOTE,
    JOURNAL_FILE,
    Journal,
    JournalStore,
    bind_journal,
    open_journal,
    replay_journal,
)
from shardcompute.security import KeyBook, Revocations, TokenBook
from shardcompute.security.authority import AUTHORITY_FILE, ClusterAuthority
from shardcompute.security.private_files import create_private, open_private_folder, read_private
from shardcompute.security.revocations import load_revocations, save_revocations

_MAGIC = b"shardcompute backup 1\n"
_MOST_BYTES = 256 << 20
_BESIDE = ("", "-wal", "-shm")


class ClusterBackup(msgspec.Struct, frozen=True):
    """All that makes a cluster this cluster."""

    name: str
    made_at_s: float
    authority_pem: bytes
    revocations: bytes
    events: list[bytes]
    notes: dict[str, bytes]


@dataclass(frozen=True, slots=True)
class Restored:
    """What came of a restore, for people."""

    name: str
    has_journal: bool
    """Whether the journal was put in place; otherwise there was one of this cluster already, which stays."""
    contents: str


def open_file_journal(folder: Path) -> Journal:
    """The journal of the cluster in a folder; UsageError where there is no cluster, JournalError where it is lost."""
    authority = _authority_in(folder)
    return open_journal(folder, authority.fingerprint)


def write_backup(path: Path, folder: Path, journal: JournalStore) -> str:
    """Write a new file, which only its owner can read; what is in it, for people. The cluster may run meanwhile."""
    authority = _authority_in(folder)
    events, notes = [event for _, event in journal.numbered_events()], journal.read_notes()
    kept, noted = load_revocations(authority_folder(folder)), notes.get("revocations")
    revoked = (kept or Revocations()).merged(
        Revocations.from_bytes(noted) if noted is not None else Revocations()
    )
    pem = read_private(authority_folder(folder) / AUTHORITY_FILE)
    backup = ClusterBackup(authority.name, time.time(), pem, revoked.to_bytes(), events, notes)
    packed = zlib.compress(msgspec.msgpack.encode(backup))
    try:
        create_private(path, _MAGIC + hashlib.sha256(packed).digest() + packed)
    except FileExistsError as error:
        raise UsageError(f"{path} exists", hint="choose another name; nothing was written") from error
    return _contents(backup)


def read_backup(path: Path) -> ClusterBackup:
    """What is in a backup; SourceError unless all of it is whole and fits together. Nothing is changed."""
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise _no_backup(path, "it is far too large")
        content = path.read_bytes()
    except OSError as error:
        raise SourceError(
            f"{path} cannot be read: {error.strerror or error}", hint="name the file of `shardcompute backup`"
        ) from error
    head = len(_MAGIC)
    packed = content[head + 32 :]
    if not content.startswith(_MAGIC):
        raise _no_backup(path, "it does not begin like one")
    if hashlib.sha256(packed).digest() != content[head : head + 32]:
        raise _no_backup(path, "its checksum is wrong")
    try:
        unpacking = zlib.decompressobj()
        backup = msgspec.msgpack.decode(unpacking.decompress(packed, _MOST_BYTES), type=ClusterBackup)
        Revocations.from_bytes(backup.revocations)
        for name, kind in (("tokens", TokenBook), ("keys", KeyBook), ("revocations", Revocations)):
            if (note := backup.notes.get(name)) is not None:
                kind.from_bytes(note)
    except (ValueError, zlib.error, RecursionError, SourceError) as error:
        raise _no_backup(path, str(error)) from error
    return backup


def restore_authority(backup: ClusterBackup, folder: Path) -> str:
    """Put the authority in place, and with it who was thrown out; its fingerprint. UsageError where the folder belongs
    to another cluster. Who is known there to be out stays out."""
    open_private_folder(folder)
    place = authority_folder(folder)
    path = place / AUTHORITY_FILE
    try:
        create_private(path, backup.authority_pem)
    except FileExistsError:
        if read_private(path) != backup.authority_pem:
            raise UsageError(
                f"{folder} belongs to another cluster than the backup", hint="choose another --data-dir"
            ) from None
    try:
        authority = ClusterAuthority.load(place)
    except SourceError:
        path.unlink(missing_ok=True)
        raise
    revoked = (load_revocations(place) or Revocations()).merged(Revocations.from_bytes(backup.revocations))
    save_revocations(place, revoked)
    return authority.fingerprint


def restore_journal(backup: ClusterBackup, fingerprint: str, journal: JournalStore) -> Restored:
    """Write the backup's events and notes into a journal that has none. One of the same cluster is left as it is."""
    if journal.read_note(CLUSTER_NOTE) is not None or journal.numbered_events():
        return Restored(backup.name, has_journal=False, contents=_contents(backup))
    bind_journal(journal, fingerprint)
    journal.append(*backup.events)
    for name, value in backup.notes.items():
        if name != CLUSTER_NOTE:
            journal.write_note(name, value)
    replay_journal(journal, ClusterState())
    return Restored(backup.name, has_journal=True, contents=_contents(backup))


def restore_to_folder(backup: ClusterBackup, folder: Path, *, replaces: bool = False) -> Restored:
    """Into a cluster's folder. A journal that is there is put aside where it is to be replaced, and left otherwise."""
    fingerprint = restore_authority(backup, folder)
    path = folder / JOURNAL_FILE
    if replaces and path.exists():
        aside = path.with_name(f"journal.replaced-{time.strftime('%Y%m%d-%H%M%S')}.sqlite")
        for suffix in _BESIDE:
            if path.with_name(path.name + suffix).exists():
                os.replace(path.with_name(path.name + suffix), aside.with_name(aside.name + suffix))
    with closing(Journal(path)) as journal:
        return restore_journal(backup, fingerprint, journal)


def _authority_in(folder: Path) -> ClusterAuthority:
    try:
        return ClusterAuthority.load(authority_folder(folder))
    except FileNotFoundError:
        raise UsageError(f"there is no cluster in {folder}", hint="name its folder with --data-dir") from None


def _contents(backup: ClusterBackup) -> str:
    def size(name: str, kind: type[TokenBook] | type[KeyBook]) -> int:
        note = backup.notes.get(name)
        return 0 if note is None else len(kind.from_bytes(note).records)

    revoked = len(Revocations.from_bytes(backup.revocations).node_ids)
    return (
        f"{count_of(len(backup.events), 'event')}, {count_of(size('keys', KeyBook), 'API key')}, "
        f"{count_of(size('tokens', TokenBook), 'join token')}, {revoked} thrown out"
    )


def _no_backup(path: Path, why: str) -> SourceError:
    return SourceError(
        f"{path} is no backup that can be used: {why}", hint="use another copy of it; nothing was changed"
    )
