"""Event feed of a cluster for any number of readers: first the whole view, then what changes, as it happens.

A thread looks at the cluster when it is poked, and now and then, and tells readers what differs from the last
look. A reader that does not keep up loses its backlog and gets the newest view instead, so that what is kept for
it never grows.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from shardcompute.core.errors import QueueFullError
from shardcompute.node.admin.views import ClusterChange, ClusterView, changes_between

log = logging.getLogger(__name__)
News = ClusterView | ClusterChange
_LOOK_EVERY_S = 1.0


class Subscription:
    """One reader's news. `wake` is called, from any thread, when there is some."""

    def __init__(self, first: ClusterView, wake: Callable[[], None], capacity: int) -> None:
        self._wake = wake
        self._capacity = capacity
        self._lock = threading.Lock()
        self._pending: list[News] = [first]

    def offer(self, change: ClusterChange, view: ClusterView) -> None:
        with self._lock:
            is_behind = len(self._pending) >= self._capacity
            # A whole view that was not taken yet is as good as nothing once there is a newer one.
            is_stale = bool(self._pending) and isinstance(self._pending[0], ClusterView)
            self._pending = [view] if is_behind or is_stale else [*self._pending, change]
        self._wake()

    def take(self) -> list[News]:
        """What came since the last time, oldest first."""
        with self._lock:
            pending, self._pending = self._pending, []
        return pending


class Feed:
    """Readers and the thread that looks for them. Methods may be called from any thread."""

    def __init__(
        self,
        look: Callable[[], ClusterView],
        *,
        capacity: int = 32,
        most_readers: int = 64,
        pause_s: float = 0.2,
    ) -> None:
        self._look = look
        self._capacity = capacity
        self._most_readers = most_readers
        self._pause_s = pause_s
        self._lock = threading.Lock()
        self._readers: list[Subscription] = []
        self._last: ClusterView | None = None
        self._poked = threading.Event()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="cluster feed", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def subscribe(self, wake: Callable[[], None]) -> Subscription:
        with self._lock:
            if len(self._readers) >= self._most_readers:
                raise QueueFullError(
                    f"{self._most_readers} readers already follow this cluster", hint="close one of them"
                )
            reader = Subscription(self._publish(), wake, self._capacity)
            self._readers.append(reader)
        return reader

    def unsubscribe(self, reader: Subscription) -> None:
        """`wake` is not called after this."""
        with self._lock:
            if reader in self._readers:
                self._readers.remove(reader)

    def poke(self) -> None:
        """Something may have changed."""
        self._poked.set()

    def publish(self) -> None:
        """Look now."""
        with self._lock:
            if self._readers:
                self._publish()

    def close(self) -> None:
        self._closed.set()
        self._poked.set()
        if self._thread.is_alive():
            self._thread.join()

    def _publish(self) -> ClusterView:
        view = self._look()
        if self._last is not None:
            change = changes_between(self._last, view)
            if not change.is_empty:
                for reader in self._readers:
                    reader.offer(change, view)
        self._last = view
        return view

    def _run(self) -> None:
        while not self._closed.is_set():
            self._poked.wait(_LOOK_EVERY_S)
            self._poked.clear()
            try:
                self.publish()
            except Exception:
                # Readers get the next look; without this one failure would silence the feed for good.
                log.exception("the cluster could not be looked at")
            # Many changes in a row become one piece of news.
            self._closed.wait(self._pause_s)
