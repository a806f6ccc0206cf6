"""Tells a cluster how a run goes, from a thread of its own: the run neither waits for that nor ends because of it."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from shardcompute.core.closing import Closing
from shardcompute.core.errors import ShardComputeError
from shardcompute.finetune.training import CurvePoint
from shardcompute.node.finetuning.curves import MOST_POINTS, CurveStep, RunReport

_PAUSE_S = 1.0
_LAST_S = 5.0


class CurveReporter(Closing):
    """`tell` sends a report; what cannot be told is tried again with what comes later. Of what waits too long the
    oldest steps are dropped."""

    def __init__(
        self,
        tell: Callable[[RunReport], None],
        run: str,
        model: str,
        steps: int,
        *,
        pause_s: float = _PAUSE_S,
    ) -> None:
        self.workers = 0
        self.is_over = False
        self._tell, self._run, self._model, self._steps = tell, run, model, steps
        self._pause_s = pause_s
        self._waiting: deque[CurveStep] = deque(maxlen=MOST_POINTS)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._report, name="finetune curves", daemon=True)
        self._thread.start()

    def note(self, point: CurvePoint, seconds: float) -> None:
        speed = point.tokens / max(seconds, 1e-9)
        self._waiting.append(CurveStep(point.step, point.loss, point.norm, speed, point.held_out))

    def close(self) -> None:
        """Tell what is left, if that can be done soon."""
        self._closing.set()
        self._thread.join(_LAST_S)

    def _report(self) -> None:
        is_last = False
        while not is_last:
            is_last = self._closing.wait(self._pause_s)
            points = tuple(self._waiting.popleft() for _ in range(len(self._waiting)))
            if not points and not is_last:
                continue
            report = RunReport(self._run, self._model, self._steps, self.workers, points, self.is_over)
            try:
                self._tell(report)
            except ShardComputeError:
                # What has come meanwhile is newer, and what does not fit before it the oldest.
                room = max(0, MOST_POINTS - len(self._waiting))
                self._waiting.extendleft(reversed(points[len(points) - min(room, len(points)) :]))
