"""Record of a cluster: its authority and its journal in their folder, and the notes that are kept beside events."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from shardcompute.core.errors import JournalError, SourceError
from shardcompute.node.cluster.options import ClusterOptions
from shardcompute.node.coordinator.journal import JournalStore, JournalWriter, open_journal
from shardcompute.node.coordinator.shared import Leadership, SharedJournal, check_owner
from shardcompute.security import ClusterAuthority
from shardcompute.security.private_files import open_private_folder

log = logging.getLogger(__name__)
Book = TypeVar("Book")


class ClusterNotes:
    """Notes of a journal, beside its events. `writer` is the one of the coordinator, once there is one."""

    def __init__(self, journal: JournalStore, writer: Callable[[], JournalWriter], *, recovers: bool) -> None:
        """`recovers`: go on without notes that are damaged."""
        self._journal = journal
        self._writer = writer
        self._recovers = recovers

    def read(self, name: str, decode: Callable[[bytes], Book], default: Book) -> Book:
        """One that is damaged is not taken for an empty one unless somebody decides so."""
        content = self._journal.read_note(name)
        try:
            return default if content is None else decode(content)
        except SourceError as error:
            if self._recovers:
                log.warning("%s; going on without, as asked", error.message)
                return default
            raise JournalError(
                f"in the journal {self._journal.place}: {error.message}",
                hint="put back a copy of it; or start once with --recover-journal, which "
                "forgets this part of it",
            ) from error

    def begin_with(self, name: str, content: bytes) -> None:
        """Write down what holds before there is a coordinator; raises where that cannot be done."""
        self._journal.write_note(name, content)

    def write(self, name: str, content: bytes) -> None:
        """Write down what is to take effect only then; raises where that cannot be done."""
        self._writer().write(name, lambda: self._journal.write_note(name, content))

    def keep(self, name: str, content: bytes) -> bool:
        """Write down what has taken effect already, now or as soon as that is possible; whether it is."""
        return self.keep_file(name, lambda: self._journal.write_note(name, content))

    def keep_file(self, name: str, write: Callable[[], None]) -> bool:
        """Like `keep`, for what is not in the journal."""
        return self._writer().keep(name, write)


def check_journal(options: ClusterOptions) -> None:
    """JournalError where the cluster's journal is missing or damaged, unless it is to be recovered. Starts nothing."""
    if not options.recovers_journal and authority_folder(options.folder).is_dir():
        open_record(options)[1].close()


def open_record(
    options: ClusterOptions, leadership: Leadership | None = None
) -> tuple[ClusterAuthority | None, JournalStore]:
    open_private_folder(options.folder)
    authority = find_authority(options.folder)
    fingerprint = None if authority is None else authority.fingerprint
    if leadership is not None:
        journal = SharedJournal(leadership.store, leadership.prefix, leadership)
        check_owner(journal, fingerprint)
        return authority, journal
    return authority, open_journal(options.folder, fingerprint, recovers=options.recovers_journal)


def authority_folder(folder: Path) -> Path:
    """Where in a cluster's folder its authority is."""
    return folder / "authority"


def find_authority(folder: Path) -> ClusterAuthority | None:
    """That of the cluster in a folder; None where there is none yet."""
    try:
        return ClusterAuthority.load(authority_folder(folder))
    except FileNotFoundError:
        return None


def create_authority(folder: Path, name: str) -> ClusterAuthority:
    return ClusterAuthority.create(authority_folder(folder), name, now_s=time.time())
