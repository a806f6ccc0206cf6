"""Audit log: who changed what in a cluster, and what came of it; each entry holds the hash of the one before it.

Lines of JSON in files of the owner alone: the newest in `audit.jsonl`, older ones in `audit.1.jsonl` and so on, the
oldest dropped. Whoever changes, drops or inserts an entry breaks the chain; whoever cuts off its end is found out by
the head, which is kept beside it. (Whoever can write both can write a chain of their own: ship the lines elsewhere to
be safe from that.) Nothing secret is ever among it. A disk that refuses an entry stops nobody: it is written with the
next one.
"""

from __future__ import annotations

import hashlib
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from shardcompute.core.errors import ShardComputeError
from shardcompute.core.fields import shorten
from shardcompute.security.private_files import make_private, read_private, replace_private
from shardcompute.security.secrets import redact

log = logging.getLogger(__name__)
AUDIT_FILE = "audit.jsonl"
HEAD_FILE = "audit.head"
START = "0" * 64
_MOST_TEXT = 300
_MOST_FIELDS = 16
_MOST_WAITING = 1000
_REFUSALS_PER_MINUTE = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditEntry:
    """`who` is an API key's id, `local` (commands on the coordinator's machine), `page` (signed in by a link) or a
    node's id."""

    number: int
    at_s: float
    who: str
    action: str
    target: str
    result: str
    detail: dict[str, str]
    previous: str
    hash: str = ""


class _Head(msgspec.Struct, frozen=True):
    number: int
    hash: str


@dataclass(frozen=True, slots=True)
class AuditLimits:
    file_bytes: int = 4 << 20
    files: int = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditPage:
    """Entries, newest first. `next` is the `before` of the page after this one."""

    data: tuple[AuditEntry, ...]
    next: int | None = None
    checked: int = 0
    """How many entries were checked."""
    problem: str = ""
    """What is wrong with the chain; "" while it is whole."""


class AuditLog:
    """Methods may be called from any thread. `folder` None: kept in memory."""

    def __init__(
        self,
        folder: Path | None,
        limits: AuditLimits | None = None,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._folder = folder
        self._limits = limits or AuditLimits()
        self._wall_clock = wall_clock
        self._lock = threading.Lock()
        self._waiting: list[AuditEntry] = []
        self._remembered: deque[AuditEntry] = deque(maxlen=_MOST_WAITING)
        """Of a log without a folder."""
        self._refusals: deque[float] = deque()
        self._kept_back = 0
        last = next(self._newest_first(), None)
        head = self._head()
        # A log whose end was cut off goes on from its head, so that the gap stays to be seen.
        if head is not None and (last is None or head.number > last.number):
            self._number, self._hash = head.number, head.hash
        else:
            self._number, self._hash = (0, START) if last is None else (last.number, last.hash)

    def append(
        self,
        who: str,
        action: str,
        target: str = "",
        *,
        result: str = "done",
        detail: Mapping[str, object] | None = None,
    ) -> None:
        """On the disk when this returns, if the disk allows it. Refusals are bounded: anybody can cause them."""
        with self._lock:
            now_s = self._wall_clock()
            fields = {str(name)[:40]: _clean(value) for name, value in (detail or {}).items()}
            if result != "done" and not self._may_refuse(now_s):
                self._kept_back += 1
                return
            if self._kept_back:
                fields["refusals_not_listed"], self._kept_back = str(self._kept_back), 0
            entry = AuditEntry(
                number=self._number + 1,
                at_s=round(now_s, 3),
                who=_clean(who),
                action=_clean(action),
                target=_clean(target),
                result=_clean(result),
                detail=dict(list(fields.items())[:_MOST_FIELDS]),
                previous=self._hash,
            )
            entry = replace(entry, hash=hash_of(entry))
            self._number, self._hash = entry.number, entry.hash
            self._waiting = [*self._waiting, entry][-_MOST_WAITING:]
            self._write()

    def page(self, *, before: int = 0, limit: int = 200) -> AuditPage:
        """With what checking the whole chain has found."""
        with self._lock:
            checked, problem = self._check()
            found: list[AuditEntry] = []
            for entry in self._newest_first():
                if before and entry.number >= before:
                    continue
                found.append(entry)
                if len(found) == limit:
                    break
        more = found[-1].number if len(found) == limit and found[-1].number > 1 else None
        return AuditPage(data=tuple(found), next=more, checked=checked, problem=problem)

    # With the lock held

    def _check(self) -> tuple[int, str]:
        """How many entries fit together, and what does not."""
        if self._waiting:
            return 0, f"{len(self._waiting)} entries could not be written yet"
        later: AuditEntry | None = None
        count = 0
        for entry in self._newest_first():
            if hash_of(entry) != entry.hash:
                return count, f"entry {entry.number} was changed"
            if later is None:
                head = self._head() or _Head(0, START)
                if (head.number, head.hash) != (entry.number, entry.hash):
                    return count, f"entries after {entry.number} are missing: the last was {head.number}"
            elif later.previous != entry.hash or later.number != entry.number + 1:
                return count, f"entries between {entry.number} and {later.number} are missing or were changed"
            later, count = entry, count + 1
        if later is None and (kept := self._head()) is not None:
            return 0, f"all entries are missing: the last was {kept.number}"
        if later is not None and later.number > 1 and len(self._files()) < self._limits.files:
            return count, f"entries before {later.number} are missing"
        return count, ""

    def _may_refuse(self, now_s: float) -> bool:
        while self._refusals and self._refusals[0] <= now_s - 60.0:
            self._refusals.popleft()
        if len(self._refusals) >= _REFUSALS_PER_MINUTE:
            return False
        self._refusals.append(now_s)
        return True

    def _write(self) -> None:
        if self._folder is None:
            self._remembered.extend(self._waiting)
            self._waiting = []
            return
        path = self._folder / AUDIT_FILE
        try:
            self._rotate(path)
            make_private(path)
            with path.open("ab") as file:
                file.write(b"".join(msgspec.json.encode(each) + b"\n" for each in self._waiting))
                file.flush()
                os.fsync(file.fileno())
            last = self._waiting[-1]
            self._waiting = []
            replace_private(self._folder / HEAD_FILE, msgspec.json.encode(_Head(last.number, last.hash)))
        except (OSError, ShardComputeError) as error:
            log.error("the audit log cannot be written: %s", error)

    def _rotate(self, path: Path) -> None:
        if not path.exists() or path.stat().st_size < self._limits.file_bytes:
            return
        for number in range(self._limits.files - 1, 0, -1):
            older = path.with_name(f"audit.{number}.jsonl")
            newer = path if number == 1 else path.with_name(f"audit.{number - 1}.jsonl")
            if newer.exists():
                newer.replace(older)

    def _files(self) -> list[Path]:
        """Newest first."""
        if self._folder is None:
            return []
        names = [AUDIT_FILE, *(f"audit.{number}.jsonl" for number in range(1, self._limits.files))]
        return [path for name in names if (path := self._folder / name).exists()]

    def _newest_first(self) -> Iterator[AuditEntry]:
        if self._folder is None:
            yield from reversed(self._remembered)
        for path in self._files():
            for line in reversed(read_private(path).splitlines()):
                try:
                    yield msgspec.json.decode(line, type=AuditEntry)
                except msgspec.DecodeError:
                    # It breaks the chain, which is what `page` says.
                    log.warning("a line of %s cannot be read", path)

    def _head(self) -> _Head | None:
        if self._folder is None:
            return None if not self._remembered else _Head(self._number, self._hash)
        try:
            return msgspec.json.decode(read_private(self._folder / HEAD_FILE), type=_Head)
        except (FileNotFoundError, msgspec.DecodeError):
            return None


def hash_of(entry: AuditEntry) -> str:
    """SHA-256 of all of it but the hash itself, with the hash of the one before."""
    return hashlib.sha256(msgspec.json.encode(replace(entry, hash=""), order="sorted")).hexdigest()


def _clean(value: object) -> str:
    return shorten(redact(str(value)), _MOST_TEXT)
