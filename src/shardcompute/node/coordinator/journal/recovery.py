"""Recovery of a journal that is missing, cut short or damaged: nothing is forgotten unless somebody decides so.

A journal belongs to the cluster whose authority's fingerprint it holds. Where there is an authority and no journal of
its own, what happened is lost, and starting as if nothing had would forget keys, tokens and models: that is said
(`JournalError`) until somebody asks to recover. Then events are kept up to the first that cannot be read, and all
notes that can; the damaged file is put aside.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import sqlite3
import struct
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from shardcompute.core.errors import JournalError, SourceError
from shardcompute.core.units import count_of
from shardcompute.node.coordinator.journal.database import Journal
from shardcompute.node.coordinator.journal.store import JournalStore

log = logging.getLogger(__name__)
JOURNAL_FILE = "journal.sqlite"
CLUSTER_NOTE = "cluster"
_MOST_BYTES = 1 << 30
_BESIDE = ("", "-wal", "-shm")
"""SQLite's files beside a database."""


def open_journal(folder: Path, fingerprint: str | None, *, recovers: bool = False) -> Journal:
    """The journal of the cluster in `folder`, whose authority has this fingerprint; None: there is none yet.

    JournalError where it is missing, empty or damaged, unless whoever starts the cluster `recovers` what is left.
    """
    path = folder / JOURNAL_FILE
    if fingerprint is not None and not path.exists():
        _decide(f"the cluster in {folder} has lost its journal: {JOURNAL_FILE} is missing", recovers)
    try:
        journal = Journal(path)
    except JournalError as error:
        _decide(error.message, recovers)
        _recover(path)
        journal = Journal(path)
    with contextlib.ExitStack() as on_error:
        on_error.callback(journal.close)
        _check_owner(journal, fingerprint, recovers)
        on_error.pop_all()
    return journal


def bind_journal(journal: JournalStore, fingerprint: str) -> None:
    """The journal belongs to the cluster with this authority from now on."""
    if journal.read_note(CLUSTER_NOTE) is None:
        journal.write_note(CLUSTER_NOTE, fingerprint.encode())


def _check_owner(journal: Journal, fingerprint: str | None, recovers: bool) -> None:
    owner, path = journal.read_note(CLUSTER_NOTE), journal.path
    if owner is None:
        if fingerprint is not None and not journal.numbered_events():
            _decide(f"the cluster in {path.parent} has lost its journal: {path.name} is empty", recovers)
    elif fingerprint is None:
        raise SourceError(
            f"{path} is the journal of a cluster whose authority is missing",
            hint=f"put the folder {path.parent / 'authority'} back from a copy; or move {path.name} away to begin a "
            "new cluster, which every machine has to join again",
        )
    elif owner != fingerprint.encode():
        raise SourceError(
            f"{path} is the journal of another cluster than the authority beside it",
            hint="put back the journal and the authority of the same cluster",
        )


def _decide(what: str, recovers: bool) -> None:
    if not recovers:
        raise JournalError(
            what,
            hint=f"put back a copy of {JOURNAL_FILE}; or start once with --recover-journal, which keeps what can still "
            "be read. Machines keep their certificates and come back by themselves, and those that were thrown out "
            "stay out; join tokens, API keys and models that cannot be read are forgotten",
        )
    log.warning("%s; going on with what is left, as asked", what)


@dataclass(slots=True)
class _Salvage:
    """What can still be read of a damaged journal."""

    events: list[bytes] = field(default_factory=list)
    notes: dict[str, bytes] = field(default_factory=dict)


def _recover(path: Path) -> None:
    """Write what can be read into a new file, and put the damaged one aside."""
    try:
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=".recovery-") as place:
            salvage = _read_copy(path, Path(place))
            fresh = Path(place) / "fresh"
            with contextlib.closing(Journal(fresh)) as journal:
                journal.append(*salvage.events)
                for name, value in salvage.notes.items():
                    journal.write_note(name, value)
            aside = path.with_name(f"journal.damaged-{time.strftime('%Y%m%d-%H%M%S')}.sqlite")
            for suffix in _BESIDE:
                with contextlib.suppress(FileNotFoundError):
                    path.with_name(path.name + suffix).rename(aside.with_name(aside.name + suffix))
            fresh.rename(path)
    except OSError as error:
        raise SourceError(
            f"the journal {path} cannot be recovered: {error.strerror or error}",
            hint=f"check the free space, and that {path.parent} can be written to",
        ) from error
    notes = ", ".join(sorted(salvage.notes)) or "none"
    log.warning(
        "the damaged journal was put aside as %s; kept from it: %s, and of the notes: %s",
        aside,
        count_of(len(salvage.events), "event"),
        notes,
    )


def _read_copy(path: Path, place: Path) -> _Salvage:
    """Read a copy: SQLite may write into what it opens."""
    for suffix in _BESIDE:
        with contextlib.suppress(FileNotFoundError):
            shutil.copyfile(path.with_name(path.name + suffix), place / f"damaged{suffix}")
    _fill_up(place / "damaged")
    salvage = _Salvage()
    with contextlib.closing(sqlite3.connect(place / "damaged")) as connection:
        for _, event in _rows(connection, "select number, cast(event as blob) from events order by number"):
            salvage.events.append(event)
        for name, value in _rows(connection, "select name, cast(value as blob) from notes"):
            salvage.notes[str(name)] = value
    return salvage


def _fill_up(path: Path) -> None:
    """Let a file that was cut short be as long as its first page says: SQLite reads nothing of it otherwise."""
    with path.open("r+b") as file:
        page_bytes, pages = struct.unpack(">16xH10xI", (file.read(32) + bytes(32))[:32])
        size_bytes = (page_bytes if page_bytes > 1 else 1 << 16) * pages
        if file.seek(0, os.SEEK_END) < size_bytes <= _MOST_BYTES:
            file.truncate(size_bytes)


def _rows(connection: sqlite3.Connection, query: str) -> Iterator[tuple[object, bytes]]:
    """Rows up to the first that cannot be read."""
    try:
        for row in connection.execute(query):
            if not isinstance(row[1], bytes):
                break
            yield row
    except (sqlite3.Error, sqlite3.Warning) as error:
        log.warning("the journal can be read up to here only: %s", error)
