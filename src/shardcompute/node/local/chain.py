"""Local chain, inside this process: stages one after the other, in a thread of their own."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Sequence

from shardcompute.backends.matrix import Array
from shardcompute.core.errors import ShardComputeError, UsageError
from shardcompute.core.steps import Draft, Frame, Opening, Picked, SessionRows
from shardcompute.node.driver.driver import Driver
from shardcompute.runtime.stage import StageRuntime

log = logging.getLogger(__name__)
_CLOSE_S = 10.0


class LocalChain:
    """A `ChainPort` over stages in this process. `close` ends its thread and frees the stages."""

    def __init__(self, stages: Sequence[StageRuntime], driver: Driver) -> None:
        self._stages = stages
        self._driver = driver
        self._inbox: queue.SimpleQueue[Frame | tuple[int, ...] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name="stages", daemon=True)
        self._thread.start()

    def send(self, frame: Frame) -> None:
        self._inbox.put(frame)

    def close_sessions(self, sessions: Sequence[int]) -> None:
        self._inbox.put(tuple(sessions))

    def replay(self, work: SessionRows, opening: Opening | None) -> None:
        """Never asked for: a chain in this process is not repaired."""

    def overdue(self, frame: Frame, waited_s: float, allowed_s: float) -> None:
        """Nobody else can compute it: whoever reads the log decides."""
        log.warning(
            "a step of %d rows has taken %.0f s, where %.0f would be long; this machine may be out of memory",
            frame.rows,
            waited_s,
            allowed_s,
        )

    def close(self) -> None:
        self._inbox.put(None)
        self._thread.join(_CLOSE_S)
        if self._thread.is_alive():
            log.warning("a step has not ended within %g s; the model is closed without it", _CLOSE_S)
            return
        for stage in self._stages:
            stage.close()

    def _serve(self) -> None:
        while (item := self._inbox.get()) is not None:
            if isinstance(item, Frame):
                self._step(item)
            else:
                for stage in self._stages:
                    stage.close_sessions(item)

    def _step(self, frame: Frame) -> None:
        try:
            picked, drafts = self._compute(frame)
        except ShardComputeError as error:
            self._driver.step_failed(frame.sequence, error)
        except Exception as error:
            self._driver.step_failed(frame.sequence, ShardComputeError(f"a step failed: {error!r}"))
        else:
            self._driver.take_results(frame.sequence, picked, head_drafts=drafts)

    def _compute(self, frame: Frame) -> tuple[list[Picked], list[Draft]]:
        rows: Array | None = None
        for stage in self._stages:
            passed = stage.step(frame.work, frame.openings, rows)
            if isinstance(passed, list):
                return passed, stage.draft(frame.work, passed)
            rows = passed
        raise UsageError("the last stage of a chain must pick tokens")
