"""Rate limit of downloads: how long to wait so that no more than so many bytes come in a second."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


class RateLimit:
    """Shared by all that fetch in a process. Up to one second's bytes may come at once."""

    def __init__(self, bytes_per_s: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._bytes_per_s = bytes_per_s
        self._clock = clock
        self._lock = threading.Lock()
        self._paid_until_s = clock() - 1.0

    def spend(self, count_bytes: int) -> float:
        """Count bytes that have come; the seconds to wait before the next are asked for."""
        with self._lock:
            now_s = self._clock()
            self._paid_until_s = max(self._paid_until_s, now_s - 1.0) + count_bytes / self._bytes_per_s
            return max(0.0, self._paid_until_s - now_s)
