"""The coordinator's memory: every event that matters, in the order in which it happened, in SQLite.

An event is on disk before anything follows from it, so a kill at any moment leaves a journal that replays to the
state the cluster was told about; one that has grown long is then replaced by its outcome. Small values (token book,
key book, revocations) live beside it.
"""

from __future__ import annotations

import contextlib
import logging
import sqlite3
import threading
from collections.abc import Iterator
from pathlib import Path

from shardcompute.control import ClusterState, apply, decode_event, encode_event
from shardcompute.control.events import StateRemembered
from shardcompute.core.errors import CorruptModelError, DiskFullError, SourceError

log = logging.getLogger(__name__)
_SCHEMA = """
create table if not exists events (number integer primary key autoincrement, event blob not null);
create table if not exists notes (name text primary key, value blob not null);
create table if not exists format (version integer not null);
"""
_VERSION = 1
_MOST_EVENTS = 5000


class Journal:
    """An open journal. Methods may be called from any thread."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with self._naming_failures():
            self._connection = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
            with contextlib.ExitStack() as on_error:
                on_error.callback(self._connection.close)
                self._connection.execute("pragma journal_mode=wal")
                self._connection.execute("pragma synchronous=normal")
                self._connection.executescript(_SCHEMA)
                self._check_version()
                on_error.pop_all()

    def append(self, event: bytes) -> None:
        self._write("insert into events (event) values (?)", (event,))

    def events(self) -> Iterator[bytes]:
        with self._lock, self._naming_failures():
            rows = self._connection.execute(
                "select cast(event as blob) from events order by number"
            ).fetchall()
        for (event,) in rows:
            yield event

    def compact(self, events: list[bytes]) -> None:
        """Replace all events by these, which give the same state; all or nothing."""
        with self._lock, self._naming_failures():
            self._connection.execute("begin immediate")
            try:
                self._connection.execute("delete from events")
                self._connection.executemany(
                    "insert into events (event) values (?)", [(event,) for event in events]
                )
                self._connection.execute("commit")
            except BaseException:
                self._connection.execute("rollback")
                raise

    def read_note(self, name: str) -> bytes | None:
        with self._lock, self._naming_failures():
            row = self._connection.execute(
                "select cast(value as blob) from notes where name = ?", (name,)
            ).fetchone()
        return None if row is None else row[0]

    def write_note(self, name: str, value: bytes) -> None:
        self._write("insert or replace into notes (name, value) values (?, ?)", (name, value))

    def close(self) -> None:
        with self._lock:
            self._connection.close()

    def _write(self, statement: str, values: tuple[object, ...]) -> None:
        with self._lock, self._naming_failures():
            self._connection.execute(statement, values)

    @contextlib.contextmanager
    def _naming_failures(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.OperationalError as error:
            if "full" in str(error):
                raise DiskFullError(f"no room to write {self._path}", hint="free some disk space") from error
            raise SourceError(f"cannot use {self._path}: {error}", hint="check the data folder") from error
        except sqlite3.DatabaseError as error:
            raise CorruptModelError(
                f"the journal {self._path} cannot be read: {error}",
                hint="move it away to start with an empty cluster; workers re-join with new tokens",
            ) from error

    def _check_version(self) -> None:
        row = self._connection.execute("select version from format").fetchone()
        if row is None:
            self._connection.execute("insert into format (version) values (?)", (_VERSION,))
        elif row[0] > _VERSION:
            raise SourceError(
                f"the journal {self._path} was written by a newer release", hint="upgrade this machine"
            )


def replay_journal(
    journal: Journal, initial: ClusterState, *, most_events: int = _MOST_EVENTS
) -> ClusterState:
    """The state after all events. What cannot be read is skipped, and the journal then left as it is."""
    state, count, unread = initial, 0, 0
    for line in journal.events():
        count += 1
        try:
            state = apply(state, decode_event(line))
        except (ValueError, RecursionError) as error:
            if not unread:
                log.warning("event %d of the journal cannot be read: %s", count, error)
            unread += 1
    if count:
        log.info("%d events of the journal replayed, %d not understood", count, unread)
    if count > most_events and not unread:
        journal.compact([encode_event(StateRemembered(state))])
        log.info("the journal was replaced by its outcome")
    return state
