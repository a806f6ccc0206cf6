"""Effects: what was decided under a lock and is done outside of it, now or later."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TypeAlias

log = logging.getLogger(__name__)
Effect: TypeAlias = Callable[[], None]
CallLater: TypeAlias = Callable[[float, Effect], Callable[[], None]]
"""Has something done after so many seconds; what it returns calls that off."""


class EffectQueue:
    """Does things in the order in which they were put, one thread at a time: whoever comes while nobody is at it.

    An effect may put others, and `run` what is there: they come after it. One that fails is logged; the others go on.
    """

    def __init__(self) -> None:
        self._pending: deque[Effect] = deque()
        self._turn = threading.Lock()

    def put(self, effect: Effect) -> None:
        """Nothing is done yet: call it under the lock that orders decisions, and `run` after it is released."""
        self._pending.append(effect)

    def run(self) -> None:
        """Do what is there, unless another thread is at it, which then does that too. Never waits for it."""
        # Looked at again after each turn: what was put at its very end found somebody at it.
        while self._pending and self._turn.acquire(blocking=False):
            try:
                self._run_all()
            finally:
                self._turn.release()

    def flush(self) -> None:
        """Do what is there, after what another thread may be doing. Not for effects themselves."""
        with self._turn:
            self._run_all()
        self.run()

    def _run_all(self) -> None:
        while self._pending:
            try:
                self._pending.popleft()()
            except Exception:
                log.exception("what was decided could not be done")


def start_timer(delay_s: float, effect: Effect) -> Callable[[], None]:
    """A `CallLater` by a thread that waits."""
    timer = threading.Timer(delay_s, effect)
    timer.daemon = True
    timer.start()
    return timer.cancel


class Countdown:
    """Tells `on_over` that the time is up, unless it is stopped before. Being told may come late: whoever is, looks
    whether this is still the countdown that it waits for."""

    def __init__(
        self, seconds: float, on_over: Callable[[Countdown], None], call_later: CallLater = start_timer
    ) -> None:
        self._begin = partial(call_later, seconds, partial(on_over, self))
        self._cancel: Callable[[], None] | None = None

    def start(self) -> None:
        self._cancel = self._begin()

    def stop(self) -> None:
        if self._cancel is not None:
            self._cancel()
