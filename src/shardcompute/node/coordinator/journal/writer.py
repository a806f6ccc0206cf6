"""Journal writer: puts on record what has been applied, in order, and does not stop a cluster whose disk is full.

What cannot be written waits in memory, a bounded part of it as events and beyond that as the state that they led to;
it is tried again until it is on record, before anything newer. `status` says so meanwhile. A journal that has grown
is replaced by its outcome while the cluster runs.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass

from shardcompute.core.errors import DiskFullError, JournalError, NotLeadingError, SourceError, StoreError
from shardcompute.core.units import count_of
from shardcompute.node.coordinator.journal.replay import Replayed
from shardcompute.node.coordinator.journal.reserve import DiskReserve
from shardcompute.node.coordinator.journal.store import JournalStore

log = logging.getLogger(__name__)
_RETRY_S = 1.0
_AGAIN_S = 30.0
_MOST_EVENTS = 5000
_MOST_BYTES = 4 << 20
_MOST_WAITING = 2000
_MOST_WAITING_BYTES = 1 << 20
# A journal that holds little but its own beginning is not worth writing anew.
_GROWN = 4
_NO_LEASE = "its lease could not be renewed"
Write = Callable[[], None]


@dataclass(frozen=True, slots=True)
class RecordStatus:
    """How far the record is behind what has happened."""

    waiting: int = 0
    """Events and notes that are not on record yet."""
    reason: str = ""
    """Why, where something waits."""
    has_reserve: bool = True
    """Whether there is room left for what must be written on a full disk."""
    is_paused: bool = False
    """Whether the store that coordinators share is out of reach, so that nothing may be changed."""

    @property
    def warnings(self) -> tuple[str, ...]:
        """For people; empty when all is well."""
        if self.is_paused:
            waits = f"; {count_of(self.waiting, 'change')} so far" if self.waiting else ""
            return (
                f"the store of the coordinators does not let this one lead ({self.reason or _NO_LEASE}): answers go "
                f"on, and changes of the cluster wait until it does{waits}",
            )
        if self.waiting:
            are = "is" if self.waiting == 1 else "are"
            return (
                f"{count_of(self.waiting, 'change')} of the cluster {are} not on record ({self.reason}): the cluster "
                "goes on, and would forget this if it were stopped now; it is tried again every second",
            )
        if not self.has_reserve:
            return ("the coordinator's disk is nearly full: free some space",)
        return ()


class JournalWriter:
    """`append` and `turn` belong to the coordinator's thread; `keep` and `status` may be called from any.

    `snapshot` gives the newest state as an event; it is called in the coordinator's thread alone.
    """

    def __init__(
        self,
        journal: JournalStore,
        replayed: Replayed,
        snapshot: Callable[[], bytes],
        *,
        reserve: DiskReserve | None,
        clock: Callable[[], float],
        most_events: int = _MOST_EVENTS,
        most_bytes: int = _MOST_BYTES,
    ) -> None:
        self._journal = journal
        self._snapshot = snapshot
        self._reserve = reserve
        self._clock = clock
        self._most_events = most_events
        self._most_bytes = most_bytes
        self._lock = threading.Lock()
        self._unread = replayed.unread
        self._events = replayed.event_count - len(replayed.unread)
        self._bytes = replayed.size_bytes
        self._limit_bytes = most_bytes
        self._compact_at_s = 0.0
        self._waiting: list[bytes] = []
        self._waiting_bytes = 0
        self._waiting_count = 0
        self._wants_snapshot = False
        self._is_behind = False
        self._notes: dict[str, Write] = {}
        self._listeners: list[Callable[[RecordStatus], None]] = []
        self._retry_at_s = 0.0
        self._reserve_at_s = clock() + _AGAIN_S
        self._status = RecordStatus(has_reserve=reserve is None or reserve.hold())

    @property
    def status(self) -> RecordStatus:
        return self._status

    @property
    def may_act(self) -> bool:
        """Whether what is decided may be done: where others may go on from this journal, only what is on record."""
        return not self._journal.is_shared or (self._journal.may_act and not self._waiting_count)

    def listen(self, listener: Callable[[RecordStatus], None]) -> None:
        """Call `listener`, from any thread, when the record falls behind and when it has caught up; it may not wait."""
        self._listeners.append(listener)

    def append(self, event: bytes) -> None:
        """Record an event that has been applied."""
        with self._lock:
            self._waiting_count += 1
            if not self._wants_snapshot:
                self._waiting.append(event)
                self._waiting_bytes += len(event)
            if self._status.waiting and self._clock() < self._retry_at_s:
                self._bound_waiting()
                self._tell()
            else:
                self._write_all()

    def keep(self, name: str, write: Write) -> bool:
        """Have something written that must not be forgotten, now or as soon as that is possible; a later one of the
        same name takes its place. Whether it is on record."""
        with self._lock:
            self._notes[name] = write
            self._write_notes()
            self._tell()
            return name not in self._notes

    def write(self, name: str, write: Write) -> None:
        """Write something that takes effect only if this succeeds, in place of what waits under that name."""
        with self._lock:
            write()
            self._notes.pop(name, None)
            self._tell()

    def turn(self) -> None:
        """Called often: writes what waits, and holds room for bad times."""
        with self._lock:
            if self._status.waiting:
                if self._clock() >= self._retry_at_s:
                    self._write_all()
            elif self._clock() >= self._reserve_at_s:
                self._reserve_at_s = self._clock() + _AGAIN_S
                if self._reserve is not None:
                    self._reserve.hold()
                self._tell()
            if self._status.is_paused is self._journal.may_act:
                self._tell()

    def close(self) -> None:
        """A last attempt."""
        with self._lock:
            if self._status.waiting:
                self._write_all()
            if self._status.waiting:
                log.error("stopping, although %s", self._status.warnings[0])

    # With the lock held

    def _write_all(self) -> None:
        self._write_notes()
        if self._wants_snapshot:
            self._try(self._compact)
        elif self._is_grown() and self._clock() >= self._compact_at_s:
            self._compact_at_s = self._clock() + _AGAIN_S
            with contextlib.suppress(SourceError):
                self._compact()
        if self._waiting and self._try(lambda: self._journal.append(*self._waiting)):
            self._events += len(self._waiting)
            self._bytes += self._waiting_bytes
            self._forget_waiting()
        self._bound_waiting()
        self._tell()

    def _is_grown(self) -> bool:
        return self._events > self._most_events or self._bytes > self._limit_bytes

    def _compact(self) -> None:
        """Put the state as it is now in place of all events, also of those that wait."""
        snapshot = self._snapshot()
        self._journal.compact([snapshot], keeping=self._unread)
        log.info("the journal was replaced by its outcome: %d bytes for %d", len(snapshot), self._bytes)
        self._events, self._bytes = 1, len(snapshot)
        self._limit_bytes = max(self._most_bytes, _GROWN * len(snapshot))
        self._compact_at_s = 0.0
        self._forget_waiting()
        with contextlib.suppress(SourceError):
            self._journal.shrink()

    def _write_notes(self) -> None:
        for name, write in list(self._notes.items()):
            if self._try(write):
                del self._notes[name]

    def _try(self, write: Write) -> bool:
        try:
            write()
            return True
        except SourceError as error:
            failure = error
        if not isinstance(failure, JournalError) and self._reserve is not None and self._reserve.release():
            log.warning("the disk is full: using the space that was reserved for the journal")
            try:
                write()
                return True
            except SourceError as error:
                failure = error
        self._retry_at_s = self._clock() + _RETRY_S
        if not self._status.reason:
            log.error("not on record: %s; the cluster goes on, and this is tried again", failure)
        self._status = self._status_with(max(1, self._status.waiting), _reason(failure))
        return False

    def _status_with(self, waiting: int, reason: str) -> RecordStatus:
        has_reserve = self._reserve is None or self._reserve.is_held
        return RecordStatus(waiting, reason, has_reserve, is_paused=not self._journal.may_act)

    def _bound_waiting(self) -> None:
        if len(self._waiting) > _MOST_WAITING or self._waiting_bytes > _MOST_WAITING_BYTES:
            self._waiting, self._waiting_bytes, self._wants_snapshot = [], 0, True

    def _forget_waiting(self) -> None:
        self._waiting, self._waiting_bytes, self._waiting_count = [], 0, 0
        self._wants_snapshot = False

    def _tell(self) -> None:
        waiting = self._waiting_count + len(self._notes)
        self._status = self._status_with(waiting, self._status.reason if waiting else "")
        is_behind = bool(waiting) or self._status.is_paused
        if is_behind is self._is_behind:
            return
        self._is_behind = is_behind
        if not is_behind:
            log.warning("all that has happened is on record again")
            self._reserve_at_s = self._clock()
        for listener in self._listeners:
            listener(self._status)


def _reason(failure: SourceError) -> str:
    """For everybody: which file it was is in the log."""
    if isinstance(failure, DiskFullError):
        return "the coordinator's disk is full"
    if isinstance(failure, JournalError):
        return "the coordinator's journal is damaged"
    if isinstance(failure, StoreError):
        return "it does not answer"
    if isinstance(failure, NotLeadingError):
        return "another coordinator leads"
    return "the coordinator's disk refuses it"
