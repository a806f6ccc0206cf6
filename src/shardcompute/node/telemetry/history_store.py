"""History on disk: events, ended requests and usage of a cluster, in one SQLite file that outlives the process.

Bounded by rows, age and bytes: the oldest goes first. Nothing here is needed to serve: a file that cannot be read is
set aside, one that cannot be opened is replaced by memory, and a write that fails is the caller's to try again. No
prompt and no answer is ever among it. Numbers grow from entry to entry, also across restarts.
"""

from __future__ import annotations

import contextlib
import logging
import shutil
import sqlite3
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import msgspec

from shardcompute.core.closing import Closing
from shardcompute.core.errors import DiskFullError, ShardComputeError, SourceError
from shardcompute.node.telemetry.request_log import RequestView
from shardcompute.node.telemetry.usage import HOUR_S, UsageView
from shardcompute.security.private_files import make_private

log = logging.getLogger(__name__)
EventKind = Literal["cluster", "node", "layers", "chain", "model"]
EventTone = Literal["plain", "good", "warn", "bad"]
DAY_S = 86_400
_VERSION = 1
_PAGE_BYTES = 4096
FAR_S = 10**15 - 1
"""Later than anything; numbers of entries stay below it, too."""
_LONGEST_TEXT = 1000
_LONGEST_VIEW_BYTES = 16_384
_SCHEMA = """
create table if not exists events (
    number integer primary key, at_s real not null, kind text not null, tone text not null, text text not null,
    node text not null, model text not null, chain text not null);
create index if not exists events_by_time on events (at_s);
create table if not exists requests (
    number integer primary key autoincrement, ended_s real not null, view blob not null);
create index if not exists requests_by_time on requests (ended_s);
create table if not exists usage (
    start_s integer not null, key text not null, model text not null,
    requests integer not null, prompt_tokens integer not null, generated_tokens integer not null,
    primary key (start_s, key, model)) without rowid;
create table if not exists reporters (name text primary key, sequence integer not null);
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class EventView:
    """Something that happened in a cluster, in words; `node`, `model` and `chain` say of what, where it is of one."""

    number: int = 0
    """Its place in the history; 0 before it has one."""
    at_s: float = 0.0
    kind: EventKind
    tone: EventTone = "plain"
    text: str
    node: str = ""
    model: str = ""
    chain: str = ""


@dataclass(frozen=True, slots=True)
class HistoryLimits:
    """What is kept at most. `least_free_bytes`: below this much room on the disk nothing is written, so that the
    last of it is left for what the cluster cannot do without."""

    events: int = 50_000
    requests: int = 50_000
    usage: int = 200_000
    reporters: int = 1000
    days: int = 90
    usage_days: int = 400
    size_bytes: int = 96 << 20
    least_free_bytes: int = 64 << 20


@dataclass(frozen=True, slots=True)
class HistoryRange:
    """Entries of `[since_s, until_s)`, before the entry `before` where that is given, at most `limit`, newest first."""

    since_s: float = 0.0
    until_s: float = FAR_S
    before: int = 0
    limit: int = 200


class HistoryStore(Closing):
    """An open history. Methods may be called from any thread; those that write raise ShardComputeError."""

    def __init__(self, path: Path | None, limits: HistoryLimits | None = None) -> None:
        """`path` None: in memory, for as long as this process runs."""
        self._limits = limits or HistoryLimits()
        self._lock = threading.Lock()
        self.problem = ""
        """Why nothing is kept across restarts, where that is so."""
        self._path = path
        self._connection = self._open()

    def last_event_number(self) -> int:
        row = self._read("select max(number) from events")[0]
        return int(row[0] or 0)

    def events(self, wanted: HistoryRange) -> list[EventView]:
        rows = self._read(
            "select number, at_s, kind, tone, text, node, model, chain from events"
            " where at_s >= ? and at_s < ? and number < ? order by number desc limit ?",
            (wanted.since_s, wanted.until_s, wanted.before or FAR_S, wanted.limit),
        )
        names = ("number", "at_s", "kind", "tone", "text", "node", "model", "chain")
        return [EventView(**dict(zip(names, row, strict=True))) for row in rows]

    def requests(self, wanted: HistoryRange) -> list[tuple[int, RequestView]]:
        """With the number of each."""
        rows = self._read(
            "select number, view from requests"
            " where ended_s >= ? and ended_s < ? and number < ? order by number desc limit ?",
            (wanted.since_s, wanted.until_s, wanted.before or FAR_S, wanted.limit),
        )
        found = ((number, _decoded(content)) for number, content in rows)
        return [(number, view) for number, view in found if view is not None]

    def usage(self, wanted: HistoryRange, span_s: int = HOUR_S) -> list[UsageView]:
        """Sums of whole spans, newest first: as many spans as it takes to reach `limit` rows. `before` is a span's
        start here."""
        until_s = min(wanted.until_s, wanted.before or FAR_S)
        rows = self._read(
            "select start_s - start_s % ? as span, key, model, sum(requests), sum(prompt_tokens),"
            " sum(generated_tokens) from usage where span >= ? and start_s < ?"
            " group by span, key, model order by span desc, key, model limit ?",
            (span_s, wanted.since_s - wanted.since_s % span_s, until_s, wanted.limit + 10_000),
        )
        views = [
            UsageView(
                start_s=span, span_s=span_s, key=key, model=model,
                requests=requests, prompt_tokens=prompt, generated_tokens=generated,
            )
            for span, key, model, requests, prompt, generated in rows
        ]  # fmt: skip
        kept = views[: wanted.limit]
        return kept + [view for view in views[wanted.limit :] if kept and view.start_s == kept[-1].start_s]

    def last_reports(self) -> dict[str, int]:
        """By reporter, the number of its last report of usage that is in here."""
        return {name: int(sequence) for name, sequence in self._read("select name, sequence from reporters")}

    def write(
        self,
        events: Sequence[EventView],
        requests: Sequence[RequestView],
        usage: Iterable[UsageView],
        reports: Mapping[str, int] | None = None,
    ) -> None:
        """All of it, or nothing. `usage` is added to what is known of its hours; `reports` are the numbers, by
        reporter, of what in it came from elsewhere."""
        self._check_room()
        with self._lock, self._naming_failures(), self._transaction() as connection:
            connection.executemany(
                "insert or replace into events values (?, ?, ?, ?, ?, ?, ?, ?)",
                [
                    (e.number, e.at_s, e.kind, e.tone, e.text[:_LONGEST_TEXT], e.node, e.model, e.chain)
                    for e in events
                ],
            )
            connection.executemany(
                "insert into requests (ended_s, view) values (?, ?)",
                [(view.started_at_s + view.elapsed_s, _encoded(view)) for view in requests],
            )
            connection.executemany(
                "insert into usage values (?, ?, ?, ?, ?, ?) on conflict do update set"
                " requests = requests + excluded.requests,"
                " prompt_tokens = prompt_tokens + excluded.prompt_tokens,"
                " generated_tokens = generated_tokens + excluded.generated_tokens",
                [
                    (int(u.start_s), u.key, u.model, u.requests, u.prompt_tokens, u.generated_tokens)
                    for u in usage
                ],
            )
            connection.executemany(
                "insert or replace into reporters values (?, ?)", list((reports or {}).items())
            )

    def prune(self, now_s: float) -> None:
        """Forget what is too old or too much."""
        limits = self._limits
        with self._lock, self._naming_failures():
            with self._transaction() as connection:
                for table, column, most in (
                    ("events", "at_s", limits.events),
                    ("requests", "ended_s", limits.requests),
                ):
                    connection.execute(
                        f"delete from {table} where {column} < ?", (now_s - limits.days * DAY_S,)
                    )
                    _keep_newest(connection, table, most)
                connection.execute(
                    "delete from usage where start_s < ?", (now_s - limits.usage_days * DAY_S,)
                )
                connection.execute(
                    "delete from usage where start_s <= coalesce("
                    "(select start_s from usage order by start_s desc limit 1 offset ?), -1)",
                    (limits.usage,),
                )
                connection.execute(
                    "delete from reporters where rowid <= (select max(rowid) from reporters) - ?",
                    (limits.reporters,),
                )
            self._shrink()

    def close(self) -> None:
        with self._lock:
            self._connection.close()

    def size_bytes(self) -> int:
        """Of what is in use."""
        with self._lock:
            return self._used_bytes()

    def _used_bytes(self) -> int:
        pages, free = (
            self._connection.execute(f"pragma {name}").fetchone()[0]
            for name in ("page_count", "freelist_count")
        )
        return int(pages - free) * _PAGE_BYTES

    def _shrink(self) -> None:
        """Half of the requests, then of the events, until there is room for more; usage is small and goes by age."""
        for table in ("requests", "events", "requests", "events"):
            if self._used_bytes() <= self._limits.size_bytes * 3 // 4:
                break
            with self._transaction() as connection:
                count = connection.execute(f"select count(*) from {table}").fetchone()[0]
                _keep_newest(connection, table, count // 2)
        self._connection.execute("pragma incremental_vacuum").fetchall()

    def _read(self, statement: str, values: tuple[object, ...] = ()) -> list[tuple[Any, ...]]:
        with self._lock, self._naming_failures():
            return self._connection.execute(statement, values).fetchall()

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        self._connection.execute("begin immediate")
        try:
            yield self._connection
            self._connection.execute("commit")
        except BaseException:
            with contextlib.suppress(sqlite3.Error):
                self._connection.execute("rollback")
            raise

    def _check_room(self) -> None:
        if self._path is None or self.problem:
            return
        with contextlib.suppress(OSError):
            if shutil.disk_usage(self._path.parent).free < self._limits.least_free_bytes:
                raise DiskFullError(f"too little room to write {self._path}", hint="free some disk space")

    @contextlib.contextmanager
    def _naming_failures(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            if "full" in str(error):
                raise DiskFullError(f"no room to write {self._path}", hint="free some disk space") from error
            raise SourceError(f"cannot use {self._path}: {error}", hint="check the data folder") from error

    # Opening

    def _open(self) -> sqlite3.Connection:
        if self._path is None:
            return self._connect(":memory:")
        try:
            make_private(self._path)
            try:
                return self._connect(str(self._path))
            except sqlite3.DatabaseError as error:
                self._set_aside(error)
                make_private(self._path)
                return self._connect(str(self._path))
        except (OSError, sqlite3.Error, ShardComputeError) as error:
            self.problem = f"the history is kept in memory only: {error}"
            log.warning("%s", self.problem)
            return self._connect(":memory:")

    def _connect(self, name: str) -> sqlite3.Connection:
        connection = sqlite3.connect(name, check_same_thread=False, isolation_level=None)
        with contextlib.ExitStack() as on_error:
            on_error.callback(connection.close)
            (version,) = connection.execute("pragma user_version").fetchone()
            if version not in (0, _VERSION):
                raise sqlite3.DatabaseError(f"version {version} is not known here")
            connection.execute(f"pragma page_size = {_PAGE_BYTES}")
            connection.execute("pragma auto_vacuum = incremental")
            connection.execute("pragma journal_mode = wal")
            connection.execute("pragma synchronous = normal")
            connection.execute(f"pragma journal_size_limit = {4 << 20}")
            connection.execute(f"pragma max_page_count = {self._limits.size_bytes // _PAGE_BYTES}")
            connection.executescript(_SCHEMA)
            connection.execute(f"pragma user_version = {_VERSION}")
            # Reads each of them once: damage shows now, while it can be set aside.
            for table in ("events", "requests", "usage"):
                connection.execute(f"select count(*) from {table}").fetchone()
            on_error.pop_all()
        return connection

    def _set_aside(self, error: sqlite3.DatabaseError) -> None:
        assert self._path is not None
        aside = self._path.with_name(f"{self._path.name}.aside")
        log.warning(
            "the history %s cannot be read (%s): moved to %s, begun anew", self._path, error, aside.name
        )
        self._path.replace(aside)
        for suffix in ("-wal", "-shm"):
            self._path.with_name(f"{self._path.name}{suffix}").unlink(missing_ok=True)


def _keep_newest(connection: sqlite3.Connection, table: str, most: int) -> None:
    connection.execute(
        f"delete from {table} where number <= coalesce("
        f"(select number from {table} order by number desc limit 1 offset ?), -1)",
        (most,),
    )


def _encoded(view: RequestView) -> bytes:
    content = msgspec.json.encode(replace(view, error=view.error[:_LONGEST_TEXT]))
    if len(content) > _LONGEST_VIEW_BYTES:
        content = msgspec.json.encode(replace(view, error=view.error[:_LONGEST_TEXT], stages=()))
    return content


def _decoded(content: bytes) -> RequestView | None:
    """None for what another release wrote in another way."""
    try:
        return msgspec.json.decode(content, type=RequestView)
    except msgspec.DecodeError:
        return None
