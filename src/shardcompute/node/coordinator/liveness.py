"""Liveness of a node whose control link has just ended: whether its process is still there.

A machine whose process has died refuses connections at the port where that listened; one that is alive accepts
them, and one that is cut off, frozen or switched off does not answer at all. So a refusal where a node has answered
before proves its end, at once and without waiting for heartbeats to stay away. Nothing else proves anything.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from shardcompute.core.errors import LinkError
from shardcompute.node.coordinator.coordinator_port import Background, start_thread
from shardcompute.wire import Link

_TRIES = 3
_PAUSE_S = 0.03
Dial = Callable[[str, str], Link]
"""A link to an address, where this node is expected."""


class LivenessProbe:
    """Where nodes can be reached. Methods may be called from any thread and return at once."""

    def __init__(
        self,
        dial: Dial,
        background: Background = start_thread,
        pause: Callable[[float], object] = time.sleep,
    ) -> None:
        self._dial = dial
        self._background = background
        self._pause = pause
        self._lock = threading.Lock()
        self._open: dict[str, str] = {}

    def learn(self, node: str, url: str) -> None:
        """See whether the node can be reached where it says."""
        self._background(lambda: self._learn(node, url))

    def check(self, node: str, url: str, on_ended: Callable[[], None]) -> None:
        """Call `on_ended`, in the background, if a node that could be reached there listens no more."""
        with self._lock:
            is_known = self._open.get(node) == url
        if is_known:
            self._background(lambda: self._check(node, url, on_ended))

    def _learn(self, node: str, url: str) -> None:
        if self._answers(node, url):
            with self._lock:
                self._open[node] = url

    def _check(self, node: str, url: str, on_ended: Callable[[], None]) -> None:
        for number in range(_TRIES):
            if number:
                # A connection that was under way when the process died is reset, not refused.
                self._pause(_PAUSE_S)
            answer = self._answers(node, url)
            if answer is False:
                on_ended()
            if answer is not None:
                return

    def _answers(self, node: str, url: str) -> bool | None:
        """False where nobody listens, None where that cannot be told."""
        try:
            self._dial(url, node).close()
        except LinkError as error:
            return False if isinstance(error.__cause__, ConnectionRefusedError) else None
        return True
