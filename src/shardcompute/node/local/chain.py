"""Local chain, inside this process: stages one after the other, in a thread of their own."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Sequence
from dataclasses import dataclass

from shardcompute.backends.matrix import Array
from shardcompute.core.errors import ShardComputeError, UsageError
from shardcompute.core.steps import Frame, Opening, SessionRows
from shardcompute.node.driver.driver import Driver
from shardcompute.runtime.overlap import next_item
from shardcompute.runtime.picture_encoding import PictureEncoding
from shardcompute.runtime.stage import PendingFrame, StageRuntime

log = logging.getLogger(__name__)
_CLOSE_S = 10.0


@dataclass(frozen=True, slots=True)
class _BegunFrame:
    frame: Frame
    pending: PendingFrame


@dataclass(frozen=True, slots=True)
class _Encoded:
    """Pictures were encoded: what waited for them may go on."""


class LocalChain:
    """A `ChainPort` over stages in this process. `close` ends its thread and frees the stages."""

    def __init__(self, stages: Sequence[StageRuntime], driver: Driver) -> None:
        self._stages = stages
        self._driver = driver
        self._inbox: queue.SimpleQueue[Frame | tuple[int, ...] | _Encoded | None] = queue.SimpleQueue()
        self._encoding: PictureEncoding[Frame | tuple[int, ...]] = PictureEncoding(
            lambda: self._inbox.put(_Encoded())
        )
        self._begun: _BegunFrame | None = None
        """The frame whose last step is under way; of the thread alone."""
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
        while True:
            came = next_item(self._inbox, None if self._begun is None else self._begun.pending)
            if came is None:
                self._finish_begun()
            elif isinstance(came[0], _Encoded):
                for item in self._encoding.take_ready():
                    self._serve_item(item)
            elif came[0] is None:
                self._finish_begun()
                return
            elif not self._waits_for_pictures(came[0]):
                self._serve_item(came[0])

    def _waits_for_pictures(self, item: Frame | tuple[int, ...]) -> bool:
        """Whether it is for later: a tower has to look at its pictures, or at those of what came before it."""
        if not isinstance(item, Frame):
            return self._encoding.holds(item, item)
        encode = self._stages[0].encoding(item.openings) if item.patches else None
        return self._encoding.holds(item, sessions_of(item), encode)

    def _serve_item(self, item: Frame | tuple[int, ...]) -> None:
        if isinstance(item, Frame):
            self._serve_frame(item)
        else:
            for stage in self._stages:
                stage.close_sessions(item)

    def _serve_frame(self, frame: Frame) -> None:
        if self._begun is not None and not self._may_overlap(self._begun):
            self._finish_begun()
        following = self._begin(frame)
        self._finish_begun()
        self._begun = following
        if following is not None and not self._may_overlap(following):
            self._finish_begun()

    def _may_overlap(self, begun: _BegunFrame) -> bool:
        return len(self._stages) == 1 and self._stages[0].can_begin_after(begun.pending)

    def _begin(self, frame: Frame) -> _BegunFrame | None:
        """Compute a frame up to the last stage, and begin that one's step; None where it failed."""
        try:
            rows: Array | None = None
            for stage in self._stages[:-1]:
                passed = stage.step(frame.work, frame.openings, rows)
                assert not isinstance(passed, list)
                rows = passed
            return _BegunFrame(frame, self._stages[-1].begin(frame.work, frame.openings, rows))
        except Exception as error:
            self._driver.step_failed(frame.sequence, _told(error))
            return None

    def _finish_begun(self) -> None:
        begun, self._begun = self._begun, None
        if begun is None:
            return
        stage = self._stages[-1]
        try:
            picked = stage.finish(begun.pending)
            if not isinstance(picked, list):
                raise UsageError("the last stage of a chain must pick tokens")
            stage.remember(begun.pending.work, picked)
            drafts = stage.draft(begun.pending.work)
        except Exception as error:
            self._driver.step_failed(begun.frame.sequence, _told(error))
        else:
            self._driver.take_results(begun.frame.sequence, picked, head_drafts=drafts)


def sessions_of(frame: Frame) -> set[int]:
    """All that a frame has to do with: what one begins with is another's content."""
    sources = {opening.prefix.source for opening in frame.openings if opening.prefix is not None}
    return {part.session for part in frame.work} | sources


def _told(error: Exception) -> ShardComputeError:
    return error if isinstance(error, ShardComputeError) else ShardComputeError(f"a step failed: {error!r}")
