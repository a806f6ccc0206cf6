"""Encoding of pictures beside the thread that computes: a tower takes seconds, and other sessions go on meanwhile.

A frame that brings pictures waits until a thread of its own has encoded them, and what else comes of the same sessions
waits behind it, in the order in which it came. The computing thread asks for what is ready.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Generic, TypeVar

log = logging.getLogger(__name__)
Item = TypeVar("Item")
Encode = Callable[[], None]


@dataclass(slots=True, eq=False)
class _WaitingItem(Generic[Item]):
    item: Item
    sessions: frozenset[int]
    encode: Encode | None
    """None: there is nothing to encode, or no more."""


class PictureEncoding(Generic[Item]):
    """Holds what waits. `wake` is called, from the thread that encodes, when `take_ready` has something to give."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._lock = threading.Lock()
        self._waiting: list[_WaitingItem[Item]] = []
        self._is_encoding = False

    def holds(self, item: Item, sessions: Collection[int], encode: Encode | None = None) -> bool:
        """Whether this has to wait: there is something to `encode` first, or something of these sessions waits."""
        with self._lock:
            if encode is None and not any(each.sessions & set(sessions) for each in self._waiting):
                return False
            self._waiting.append(_WaitingItem(item, frozenset(sessions), encode))
            if encode is not None and not self._is_encoding:
                self._is_encoding = True
                threading.Thread(target=self._run, name="pictures", daemon=True).start()
        return True

    def take_ready(self) -> list[Item]:
        """What waits no more, in the order in which it came."""
        ready: list[Item] = []
        blocked: set[int] = set()
        with self._lock:
            waiting, self._waiting = self._waiting, []
            for each in waiting:
                if each.encode is None and not each.sessions & blocked:
                    ready.append(each.item)
                else:
                    self._waiting.append(each)
                    blocked |= each.sessions
        return ready

    def _run(self) -> None:
        while True:
            with self._lock:
                each = next((each for each in self._waiting if each.encode is not None), None)
                if each is None or each.encode is None:
                    self._is_encoding = False
                    return
                encode = each.encode
            try:
                encode()
            except Exception as error:
                # The step that shows them meets the same, and says so to whoever waits for it.
                log.info("pictures could not be encoded ahead: %s", error)
            with self._lock:
                each.encode = None
            self._wake()
