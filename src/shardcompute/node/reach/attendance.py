"""Attendance: a coordinator waits at relays elsewhere for members that cannot dial it, and for machines that join.

It dials out to them, as members do. So a coordinator behind a router is reached through any relay that both know, by
the same doors as through the relay in its own process.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
from collections.abc import Callable, Mapping, Sequence

from shardcompute.core.closing import Closing
from shardcompute.core.errors import LinkError
from shardcompute.core.rate_limited_log import RateLimitedLog
from shardcompute.relay.client import RelayDoor, RelayPass

log = logging.getLogger(__name__)
_PLACES = {"links": 3, "join": 1}
"""So many can come at the same moment."""
_DOOR_S = 5.0
_ATTEND_S = 900.0
"""Then it comes anew, with a ticket that is good for longer."""
_AGAIN_S = (0.5, 2.0, 5.0, 15.0)
Serve = Callable[[socket.socket], None]
"""Takes a connection with somebody at the other end who has shown nothing yet; it is theirs to close."""


class RelayAttendance(Closing):
    """At each of these relays, by one of its doors, for as long as it is open. `current` is the pass to show."""

    def __init__(
        self,
        relays: Sequence[Sequence[str]],
        current: Callable[[], RelayPass],
        entries: Mapping[str, Serve],
    ) -> None:
        self._current = current
        self._entries = entries
        self._closing = threading.Event()
        self._lock = threading.Lock()
        self._doors: set[RelayDoor] = set()
        self._limited_log = RateLimitedLog(log)
        self._threads = [
            threading.Thread(target=self._keep, args=(doors, entry), name=f"at {doors[0]}", daemon=True)
            for doors in relays
            for entry in entries
            for _ in range(_PLACES[entry])
        ]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        self._closing.set()
        with self._lock:
            for door in self._doors:
                door.hang_up()
        for thread in self._threads:
            thread.join()

    def _keep(self, doors: Sequence[str], entry: str) -> None:
        attempt = 0
        while not self._closing.is_set():
            try:
                sock = self._await_visitor(doors[attempt % len(doors)], entry)
                attempt = 0
            except LinkError as error:
                if not self._closing.is_set():
                    self._limited_log.info(
                        doors[0], "nobody can come through %s: %s", doors[0], error.message
                    )
                self._closing.wait(_AGAIN_S[min(attempt, len(_AGAIN_S) - 1)])
                attempt += 1
                continue
            if sock is not None:
                name = f"{entry} through {doors[0]}"
                threading.Thread(target=self._serve, args=(entry, sock), name=name, daemon=True).start()

    def _await_visitor(self, url: str, entry: str) -> socket.socket | None:
        """None: nobody is waited for any more."""
        with RelayDoor(url, _DOOR_S) as door:
            with self._lock:
                if self._closing.is_set():
                    return None
                self._doors.add(door)
            try:
                return door.attend(self._current(), entry, _ATTEND_S)
            finally:
                with self._lock:
                    self._doors.discard(door)

    def _serve(self, entry: str, sock: socket.socket) -> None:
        try:
            self._entries[entry](sock)
        except (LinkError, OSError) as error:
            self._limited_log.info(entry, "whoever came through a relay has gone: %s", error)
            with contextlib.suppress(OSError):
                sock.close()
