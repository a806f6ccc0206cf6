"""Log lines that a stranger can cause: one of each kind for each stranger in a while, so that none fills the disk.

    refused = RateLimitedLog(logging.getLogger(__name__))
    refused.info(host, "connection from %s dropped: %s", host, reason)

Lines of one message are one kind. What was kept back is counted and told with the next line. At most `most_keys`
are remembered, the latest ones.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable


class RateLimitedLog:
    """May be used from any thread."""

    def __init__(
        self,
        log: logging.Logger,
        *,
        every_s: float = 60.0,
        most_keys: int = 1024,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._log = log
        self._every_s = every_s
        self._most_keys = most_keys
        self._clock = clock
        self._lock = threading.Lock()
        self._told: OrderedDict[tuple[str, str], tuple[float, int]] = OrderedDict()

    def info(self, key: str, message: str, *args: object) -> None:
        self._tell(key, logging.INFO, message, args)

    def warning(self, key: str, message: str, *args: object) -> None:
        self._tell(key, logging.WARNING, message, args)

    def error(self, key: str, message: str, *args: object, exc_info: bool = False) -> None:
        self._tell(key, logging.ERROR, message, args, exc_info=exc_info)

    def _tell(
        self, key: str, level: int, message: str, args: tuple[object, ...], *, exc_info: bool = False
    ) -> None:
        now_s = self._clock()
        with self._lock:
            told_s, kept_back = self._told.get((key, message), (float("-inf"), 0))
            is_due = now_s - told_s >= self._every_s
            self._told[key, message] = (now_s, 0) if is_due else (told_s, kept_back + 1)
            self._told.move_to_end((key, message))
            while len(self._told) > self._most_keys:
                self._told.popitem(last=False)
        if not is_due:
            return
        if kept_back:
            message, args = f"{message} (and %d like it before)", (*args, kept_back)
        self._log.log(level, message, *args, exc_info=exc_info, stacklevel=3)
