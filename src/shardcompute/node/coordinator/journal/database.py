"""The journal's file: events in their order and small notes (token book, key book, revocations), in SQLite.

A kill at any moment leaves all that was written. Notes must not be forgotten in a power cut either and are on the disk
when `write_note` returns; of events the last few may be lost then, never one from the middle. What SQLite raises
becomes `DiskFullError`, `JournalError` (it is damaged) or `SourceError`.
"""

from __future__ import annotations

import contextlib
import sqlite3
import threading
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

from shardcompute.core.errors import DiskFullError, JournalError, SourceError
from shardcompute.node.coordinator.journal.reserve import DiskReserve
from shardcompute.security.private_files import make_private

_SCHEMA = """
create table if not exists events (number integer primary key autoincrement, event blob not null);
create table if not exists notes (name text primary key, value blob not null);
create table if not exists format (version integer not null);
"""
_VERSION = 1
_BUSY_S = 0.2
# Room that SQLite keeps for its log of writes, also while that is empty.
_LOG_BYTES = 1 << 20
_WORTH_SHRINKING_BYTES = 1 << 20
_CODE_FULL = 13
_CODES_DAMAGED = (11, 26)


class Journal:
    """An open journal, a `JournalStore`. Methods may be called from any thread."""

    is_shared = False
    may_act = True

    def __init__(self, path: Path) -> None:
        self.path = path
        self.reserve: DiskReserve | None = DiskReserve(path.with_suffix(".reserve"))
        self._lock = threading.Lock()
        make_private(path)
        with self._naming_failures():
            self._connection = sqlite3.connect(
                path, check_same_thread=False, isolation_level=None, timeout=_BUSY_S
            )
            with contextlib.ExitStack() as on_error:
                on_error.callback(self._connection.close)
                self._check_pages()
                self._connection.execute("pragma journal_mode=wal")
                self._connection.execute("pragma synchronous=normal")
                self._connection.execute(f"pragma journal_size_limit={_LOG_BYTES}")
                self._connection.executescript(_SCHEMA)
                self._check_version()
                on_error.pop_all()

    @property
    def place(self) -> str:
        return str(self.path)

    def append(self, *events: bytes) -> None:
        """All of them or none."""
        with self._writing():
            self._connection.executemany(
                "insert into events (event) values (?)", [(event,) for event in events]
            )

    def events(self) -> Iterator[bytes]:
        for _, event in self.numbered_events():
            yield event

    def numbered_events(self) -> list[tuple[int, bytes]]:
        with self._lock, self._naming_failures():
            return self._connection.execute(
                "select number, cast(event as blob) from events order by number"
            ).fetchall()

    def compact(self, events: Sequence[bytes], *, keeping: Collection[int] = ()) -> None:
        """Replace all events by these, which give the same state; all or nothing. Those `keeping` names by their
        numbers stay as well."""
        with self._writing():
            if keeping:
                numbers = self._connection.execute("select number from events").fetchall()
                gone = [row for row in numbers if row[0] not in keeping]
                self._connection.executemany("delete from events where number = ?", gone)
            else:
                self._connection.execute("delete from events")
            self._connection.executemany(
                "insert into events (event) values (?)", [(event,) for event in events]
            )

    def shrink(self) -> None:
        """Give room that is no longer needed back to the disk, where that is worth the while."""
        with self._lock, self._naming_failures():
            pages, free, page_bytes = (
                int(self._connection.execute(f"pragma {name}").fetchone()[0])
                for name in ("page_count", "freelist_count", "page_size")
            )
            if free * 2 > pages and free * page_bytes > _WORTH_SHRINKING_BYTES:
                self._connection.execute("vacuum")
                self._connection.execute("pragma wal_checkpoint(truncate)")

    def read_note(self, name: str) -> bytes | None:
        with self._lock, self._naming_failures():
            row = self._connection.execute(
                "select cast(value as blob) from notes where name = ?", (name,)
            ).fetchone()
        return None if row is None else row[0]

    def read_notes(self) -> dict[str, bytes]:
        with self._lock, self._naming_failures():
            return dict(
                self._connection.execute(
                    "select name, cast(value as blob) from notes order by name"
                ).fetchall()
            )

    def write_note(self, name: str, value: bytes) -> None:
        """On the disk when this returns."""
        with self._writing(is_durable=True):
            self._connection.execute(
                "insert or replace into notes (name, value) values (?, ?)", (name, value)
            )

    def close(self) -> None:
        with self._lock:
            self._connection.close()

    @contextlib.contextmanager
    def _writing(self, *, is_durable: bool = False) -> Iterator[None]:
        with self._lock, self._naming_failures():
            if is_durable:
                self._connection.execute("pragma synchronous=full")
            try:
                self._connection.execute("begin immediate")
                yield
                self._connection.execute("commit")
            except BaseException:
                # SQLite has done so itself after some failures.
                if self._connection.in_transaction:
                    self._connection.execute("rollback")
                raise
            finally:
                if is_durable:
                    self._connection.execute("pragma synchronous=normal")

    @contextlib.contextmanager
    def _naming_failures(self) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, sqlite3.Warning) as error:
            raise failure_of(self.path, error) from error

    def _check_pages(self) -> None:
        found = self._connection.execute("pragma quick_check(1)").fetchone()
        if found is None or found[0] != "ok":
            raise damaged(self.path, "its pages do not fit together")

    def _check_version(self) -> None:
        row = self._connection.execute("select version from format").fetchone()
        if row is None:
            self._connection.execute("insert into format (version) values (?)", (_VERSION,))
        elif not isinstance(row[0], int) or row[0] < _VERSION:
            raise damaged(self.path, f"its version is {str(row[0])[:20]!r}")
        elif row[0] > _VERSION:
            raise SourceError(
                f"the journal {self.path} was written by a newer release", hint="upgrade this machine"
            )


def failure_of(path: Path, error: sqlite3.Error | sqlite3.Warning) -> SourceError:
    """What SQLite raised about this file, in words."""
    code = (getattr(error, "sqlite_errorcode", None) or 0) & 0xFF
    if code == _CODE_FULL or "full" in str(error):
        return DiskFullError(f"no room to write {path}", hint="free some disk space")
    is_use = isinstance(error, sqlite3.OperationalError | sqlite3.ProgrammingError)
    if is_use and code not in _CODES_DAMAGED:
        return SourceError(
            f"cannot use {path}: {error}",
            hint=f"check that this disk works and that {path.parent} can be written to",
        )
    return damaged(path, str(error))


def damaged(path: Path, why: str) -> JournalError:
    return JournalError(
        f"the journal {path} is damaged: {why}",
        hint=f"put back a copy of {path.name}, or start the cluster once with --recover-journal",
    )
