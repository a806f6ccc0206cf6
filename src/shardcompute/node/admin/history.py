"""History of a cluster: hears what happens, and has it written to disk behind everybody's back.

States, ended requests and usage are put into bounded queues, which costs their senders nothing; a thread turns states
into words (`milestones`) and writes all of it now and then. What cannot be written is kept for the next try, the
oldest of too much is dropped and counted, and nobody else ever notices.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Generic, TypeVar

from shardcompute.control.state import ClusterState
from shardcompute.core.closing import Closing
from shardcompute.core.errors import ShardComputeError
from shardcompute.node.admin.milestones import milestones
from shardcompute.node.admin.views import RECENT_EVENTS
from shardcompute.node.telemetry.history_store import (
    EventView,
    HistoryLimits,
    HistoryRange,
    HistoryStore,
)
from shardcompute.node.telemetry.request_log import RequestLog, RequestView
from shardcompute.node.telemetry.usage import HOUR_S, UsageView, add_usage
from shardcompute.version import VERSION

log = logging.getLogger(__name__)
Entry = TypeVar("Entry")
_WRITE_EVERY_S = 1.0
_RETRY_S = 10.0
_PRUNE_EVERY_S = 600.0
_MOST_PENDING = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryPage(Generic[Entry]):
    """Entries, newest first. `next` is where the page after this one begins: ask for it with `before`."""

    data: tuple[Entry, ...]
    next: int | None = None
    problem: str = ""
    """Why the history is not being written, or not kept; "" while it is."""


class ClusterHistory(Closing):
    """One cluster's. Methods may be called from any thread; `saw` and `ended` never wait for a disk."""

    def __init__(
        self,
        path: Path | None,
        state: ClusterState,
        requests: RequestLog,
        *,
        limits: HistoryLimits | None = None,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        """`path` None: kept in memory."""
        self._store = HistoryStore(path, limits)
        self._usage = requests.usage
        self._wall_clock = wall_clock
        self._lock = threading.RLock()
        """For what is put into words; nobody waits for a disk under it."""
        self._writing = threading.RLock()
        """For what is to be written."""
        self._latest = state
        self._heard: deque[tuple[float, ClusterState | EventView]] = deque(maxlen=_MOST_PENDING)
        self._ended: deque[RequestView] = deque(maxlen=_MOST_PENDING)
        self._worded: list[EventView] = []
        self._events: list[EventView] = []
        self._requests: list[RequestView] = []
        self._unsaved: dict[tuple[float, str, str], UsageView] = {}
        self._reports: dict[str, int] = self._last_reports()
        self._new_reports: dict[str, int] = {}
        self._number = self._before = self._last_number()
        self._recent: deque[EventView] = deque(reversed(self._newest()), maxlen=RECENT_EVENTS)
        self._listeners: list[Callable[[EventView], None]] = []
        self._failure = ""
        self._pruned_s = float("-inf")
        self._work = threading.Event()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="history", daemon=True)
        requests.listen(self.ended)
        self.tell(EventView(kind="cluster", text=f"the coordinator started ({VERSION})"))

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Write what is there."""
        self.tell(EventView(kind="cluster", text="the coordinator stopped"))
        self._closed.set()
        self._work.set()
        if self._thread.is_alive():
            self._thread.join()
        self.flush()
        self._store.close()

    # What happens

    def listen(self, listener: Callable[[EventView], None]) -> None:
        """Call `listener` with each event since the start, in the history's thread."""
        with self._lock:
            self._listeners.append(listener)
            for event in self._recent:
                if event.number > self._before:
                    listener(event)

    def saw(self, state: ClusterState) -> None:
        self._heard.append((self._wall_clock(), state))
        self._work.set()

    def ended(self, view: RequestView) -> None:
        self._ended.append(view)
        self._work.set()

    def tell(self, event: EventView) -> None:
        """Something that no state shows."""
        self._heard.append((self._wall_clock(), event))
        self._work.set()

    def count_report(self, reporter: str, sequence: int, usage: Iterable[UsageView]) -> None:
        """Usage that was counted elsewhere; a report that came before, also before a restart, counts once."""
        with self._writing:
            if sequence <= self._reports.get(reporter, 0):
                return
            self._reports[reporter] = self._new_reports[reporter] = sequence
            self._usage.merge(usage)
            self.flush()

    # To see

    def recent(self) -> tuple[EventView, ...]:
        """The last events, oldest first."""
        with self._lock:
            self._word()
            return tuple(self._recent)

    def events(self, wanted: HistoryRange) -> HistoryPage[EventView]:
        self.flush()
        found = self._store.events(wanted)
        return HistoryPage(
            data=tuple(found),
            next=found[-1].number if len(found) == wanted.limit else None,
            problem=self._problem(),
        )

    def requests(self, wanted: HistoryRange) -> HistoryPage[RequestView]:
        self.flush()
        found = self._store.requests(wanted)
        return HistoryPage(
            data=tuple(view for _, view in found),
            next=found[-1][0] if len(found) == wanted.limit else None,
            problem=self._problem(),
        )

    def usage(self, wanted: HistoryRange, span_s: int = HOUR_S) -> HistoryPage[UsageView]:
        self.flush()
        found = self._store.usage(wanted, span_s)
        is_full = len(found) >= wanted.limit
        return HistoryPage(
            data=tuple(found), next=int(found[-1].start_s) if is_full else None, problem=self._problem()
        )

    def _problem(self) -> str:
        return self._store.problem or self._failure

    # In the history's thread, or that of whoever wants to see it

    def flush(self) -> None:
        """Put what happened into words, and write it."""
        with self._writing:
            with self._lock:
                self._word()
                worded, self._worded = self._worded, []
            self._events += worded
            self._write()

    def _run(self) -> None:
        due_s = float("inf")
        while not self._closed.is_set():
            self._work.wait(min(_PRUNE_EVERY_S, max(0.0, due_s - time.monotonic())))
            is_new = self._work.is_set()
            self._work.clear()
            if is_new and due_s == float("inf"):
                # Those who listen hear it at once; many entries in a row become one write.
                due_s = time.monotonic() + _WRITE_EVERY_S
            try:
                with self._lock:
                    self._word()
                if time.monotonic() >= due_s:
                    self.flush()
                    due_s = time.monotonic() + _RETRY_S if self._failure else float("inf")
            except Exception:
                # Without this one failure would end the history for good.
                log.exception("the history could not be written")

    def _word(self) -> None:
        for _ in range(len(self._heard)):
            at_s, heard = self._heard.popleft()
            events = [heard] if isinstance(heard, EventView) else milestones(self._latest, heard)
            self._latest = self._latest if isinstance(heard, EventView) else heard
            for event in events:
                self._keep(replace(event, number=self._number + 1, at_s=at_s))

    def _keep(self, event: EventView) -> None:
        self._number = event.number
        self._worded.append(event)
        self._recent.append(event)
        for listener in self._listeners:
            listener(event)

    def _write(self) -> None:
        self._gather()
        if not (self._events or self._requests or self._unsaved):
            return
        try:
            self._store.write(self._events, self._requests, self._unsaved.values(), self._new_reports)
        except ShardComputeError as error:
            if not self._failure:
                log.warning("the history is not being written: %s", error)
            self._failure = f"the history is not being written: {error.message}"
            # It may be full itself.
            self._prune()
            return
        if self._failure:
            log.info("the history is being written again")
        self._failure = ""
        self._events, self._requests, self._unsaved, self._new_reports = [], [], {}, {}
        if abs(self._wall_clock() - self._pruned_s) > _PRUNE_EVERY_S:
            self._prune()

    def _gather(self) -> None:
        """Add what came since to what could not be written yet, within bounds."""
        self._requests += [self._ended.popleft() for _ in range(len(self._ended))]
        self._requests, self._events = self._requests[-_MOST_PENDING:], self._events[-_MOST_PENDING:]
        self._keep_unsaved(self._usage.take_increments())

    def _prune(self) -> None:
        self._pruned_s = self._wall_clock()
        try:
            self._store.prune(self._pruned_s)
        except ShardComputeError as error:
            log.debug("the history could not be shortened: %s", error)

    def _keep_unsaved(self, increments: Iterable[UsageView]) -> None:
        for each in increments:
            place = (each.start_s, each.key, each.model)
            known = self._unsaved.get(place)
            self._unsaved[place] = each if known is None else add_usage(known, each)
        for place in sorted(self._unsaved)[: max(0, len(self._unsaved) - _MOST_PENDING)]:
            del self._unsaved[place]

    def _last_number(self) -> int:
        try:
            return self._store.last_event_number()
        except ShardComputeError:
            return 0

    def _last_reports(self) -> dict[str, int]:
        try:
            return self._store.last_reports()
        except ShardComputeError:
            return {}

    def _newest(self) -> list[EventView]:
        try:
            return self._store.events(HistoryRange(limit=RECENT_EVENTS))
        except ShardComputeError:
            return []
