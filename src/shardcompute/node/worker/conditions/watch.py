"""Watch over the conditions of work: looks at the machine in a thread, and tells a worker to rest or to work."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Protocol

from shardcompute.node.worker.conditions.machine import OthersLoad, idle_s, is_metered, is_on_mains
from shardcompute.node.worker.conditions.policy import Reading, WorkConditions, WorkJudgement, unsaid

log = logging.getLogger(__name__)
LOOK_S = 5.0
RELIEF_S = 60.0
"""So long others have to take over before a worker that must rest stops."""
_METERED_EVERY = 6
"""Looks between two questions that start a program."""


class RestingWorker(Protocol):
    """Methods may be called from any thread."""

    @property
    def is_idle(self) -> bool:
        """Whether it holds nothing, and fetches nothing."""
        ...

    def rest(self, reason: str, *, is_at_rest: bool) -> None:
        """Say why it must not work; `is_at_rest`: it does not any more. "": it may."""
        ...


class ConditionWatch:
    """Decides for one worker. `read` says how the machine is; `step` is one look, which the thread takes every
    `LOOK_S`."""

    def __init__(
        self,
        conditions: WorkConditions,
        worker: RestingWorker,
        read: Callable[[], Reading] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._conditions = conditions
        self._worker = worker
        self._read = read or MachineReader(conditions).read
        self._clock = clock
        self._judgement = WorkJudgement()
        self._resting_since_s: float | None = None
        self._is_at_rest = False
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="conditions", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Look no more. A question to the system that does not end is left alone."""
        self._closing.set()

    def step(self) -> None:
        now_s = self._clock()
        before = self._judgement.reason
        self._judgement = self._judgement.after(self._conditions, self._read(), now_s)
        reason = self._judgement.reason
        if not reason:
            if before:
                log.info("may work again")
                self._resting_since_s, self._is_at_rest = None, False
                self._worker.rest("", is_at_rest=False)
            return
        if self._resting_since_s is None:
            self._resting_since_s = now_s
        is_over = self._worker.is_idle or now_s - self._resting_since_s >= RELIEF_S
        is_at_rest = self._is_at_rest or is_over
        if reason != before or is_at_rest != self._is_at_rest:
            log.info("rests: %s%s", reason, "" if is_at_rest else "; until others have taken over it goes on")
            self._is_at_rest = is_at_rest
            self._worker.rest(reason, is_at_rest=is_at_rest)

    def _run(self) -> None:
        while not self._closing.is_set():
            try:
                self.step()
            except Exception:
                log.exception("the conditions of work could not be looked at")
            self._closing.wait(LOOK_S)


class MachineReader:
    """Reads of this machine what conditions ask for, and no more."""

    def __init__(self, conditions: WorkConditions) -> None:
        self._conditions = conditions
        self._load = OthersLoad()
        self._looks = 0
        self._is_metered: bool | None = None

    def read(self) -> Reading:
        wanted = self._conditions
        if wanted.not_metered and self._looks % _METERED_EVERY == 0:
            self._is_metered = is_metered()
        self._looks += 1
        return Reading(
            is_on_mains=is_on_mains() if wanted.only_on_mains else None,
            is_metered=self._is_metered,
            idle_s=idle_s() if wanted.only_when_idle else None,
            others_load=self._load.look() if wanted.only_when_idle else None,
        )


def unsaid_here(conditions: WorkConditions) -> list[str]:
    """See `policy.unsaid`, of this machine."""
    return unsaid(conditions, MachineReader(conditions).read()) if conditions.has_any else []
