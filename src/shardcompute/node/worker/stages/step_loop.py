"""Step loop: the one thread that computes with all shards of a worker.

Whatever it is to do comes through one inbox, in order: frames, ends of sessions, and errands of others (`perform`).
While a step is under way on a device the next one may begin. Where a frame is, and whether the thread is stuck, can be
asked at any time (`step_trace`).
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from shardcompute.backends.matrix import Array
from shardcompute.core.errors import (
    BackendError,
    CollectiveError,
    DeviceMemoryError,
    LinkError,
    ShardComputeError,
)
from shardcompute.core.process_memory import release_code, return_freed_memory
from shardcompute.core.rate_limited_log import RateLimitedLog
from shardcompute.core.steps import Draft, Opening, SessionRows
from shardcompute.node.rpc.frames import openings_of, rows_to_compute, work_of
from shardcompute.node.worker.ranks.groups import RankGroups
from shardcompute.node.worker.stages.service_pace import ShardPace
from shardcompute.node.worker.stages.slot import StageSlot, sessions_in
from shardcompute.node.worker.stages.stage_output import StageOutput
from shardcompute.node.worker.stages.stage_slots import ShardKey, StageSlots
from shardcompute.node.worker.stages.step_trace import StepTrace
from shardcompute.runtime.overlap import next_item
from shardcompute.runtime.picture_encoding import PictureEncoding
from shardcompute.runtime.stage import PendingFrame, StageRuntime
from shardcompute.wire import SessionClose, StageTiming, StepFrame, find_codec

log = logging.getLogger(__name__)
_WATCH_S = 1.0
_ERRAND_S = 60.0
"""So long the thread may be at anything but a step: freeing memory, putting in a drafter."""
_CLOSE_S = 10.0
_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True)
class StepEvents:
    """Who is told of what, by the computing thread."""

    writes: Callable[[StageRuntime, Sequence[SessionRows], Sequence[Opening]], None]
    """These rows are about to be written."""
    ended: Callable[[StageSlot, SessionClose], None]
    """Sessions are over, and what they held is free."""
    out_of_memory: Callable[[ShardKey, DeviceMemoryError], None]
    """What could be freed was, and a step has no memory still."""
    pace_changed: Callable[[ShardKey, ShardPace], None]
    """Steps take clearly longer than before, or less long."""


@dataclass(frozen=True, slots=True)
class _Arrived:
    frame: StepFrame
    body: memoryview
    sender: str
    received_s: float
    is_encoded: bool = False
    """Its pictures were looked at, or it has none."""


@dataclass(frozen=True, slots=True)
class _Begun:
    """A frame whose step is under way."""

    slot: StageSlot
    arrived: _Arrived
    pending: PendingFrame
    began_s: float
    codec_s: float


@dataclass(frozen=True, slots=True)
class _Ended:
    message: SessionClose
    sender: str


class StepLoop:
    """Of the worker `node`. Public methods may be called from any thread."""

    def __init__(
        self,
        node: str,
        slots: StageSlots,
        output: StageOutput,
        ranks: RankGroups,
        events: StepEvents,
        rest_s: float,
    ) -> None:
        """Where nothing has come in for `rest_s`, memory is given back that only steps need."""
        self._node = node
        self._slots = slots
        self._output = output
        self._ranks = ranks
        self._events = events
        self._rest_s = rest_s
        self._is_rested = True
        self.trace = StepTrace()
        self._limited_log = RateLimitedLog(log)
        self._inbox: queue.SimpleQueue[_Arrived | _Ended | Callable[[], None] | None] = queue.SimpleQueue()
        self._encoding: PictureEncoding[_Arrived | _Ended] = PictureEncoding(
            lambda: self._inbox.put(self._serve_encoded)
        )
        self._begun: _Begun | None = None
        """The step that is under way, and when the one before was done; of the computing thread alone."""
        self._done_s = 0.0
        self.computed_s = 0.0
        """By all steps, for whoever wants to know how busy this is."""
        self._thread = threading.Thread(target=self._serve, name="stages", daemon=True)

    def start(self) -> None:
        self._thread.start()

    # What comes in

    def take_frame(self, frame: StepFrame, body: memoryview, sender: str) -> None:
        self.trace.place(frame, sender, "queued")
        self._inbox.put(_Arrived(frame, body, sender, time.perf_counter()))

    def end_sessions(self, message: SessionClose, sender: str) -> None:
        self._inbox.put(_Ended(message, sender))

    def put(self, errand: Callable[[], None]) -> None:
        """Run something after all that came before."""
        self._inbox.put(errand)

    def perform(self, task: Callable[[], _Result]) -> _Result:
        """Run something after all that came before, and wait for it. Raises what it raises, LinkError where this node
        is closing, and BackendError where the thread is stuck."""
        done: queue.SimpleQueue[tuple[_Result] | Exception] = queue.SimpleQueue()

        def run() -> None:
            try:
                done.put((task(),))
            except Exception as error:
                done.put(error)

        self._inbox.put(run)
        outcome = self._await(done)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome[0]

    def _await(self, done: queue.SimpleQueue[_Result]) -> _Result:
        """What the computing thread says; for as long as it is well."""
        while True:
            try:
                return done.get(timeout=_WATCH_S)
            except queue.Empty:
                if not self._thread.is_alive():
                    raise LinkError("this node is closing") from None
                self.check_not_stuck()

    @property
    def has_work(self) -> bool:
        return not self._inbox.empty()

    def check_not_stuck(self) -> None:
        """BackendError where the computing thread is at one thing for longer than that can take."""
        seen = self.trace.look()
        if seen.is_stuck:
            raise BackendError(
                f"this worker has been stuck in one step for {seen.busy_s:.0f} s",
                hint="restart it; its log says with what",
            )

    def end(self) -> None:
        """Come to an end after all that came before."""
        self._inbox.put(None)

    def join(self) -> bool:
        """Wait for the end. False: a step does not end, and nobody may free what it computes with."""
        self._thread.join(_CLOSE_S)
        if self._thread.is_alive():
            # Its memory is freed with the process.
            log.warning("a step has not ended within %g s; this worker closes without it", _CLOSE_S)
        return not self._thread.is_alive()

    # The computing thread

    def _serve(self) -> None:
        while True:
            came = self._next_item()
            try:
                if came is None:
                    self._finish_begun()
                elif came[0] is None:
                    self._finish_begun()
                    return
                else:
                    self._serve_item(came[0])
            except LinkError as error:
                log.warning("a frame could not be passed on: %s", error)
            except Exception:
                # One bad message must not end the work of all shards.
                log.exception("a message of the chain could not be served")

    def _next_item(self) -> tuple[_Arrived | _Ended | Callable[[], None] | None] | None:
        begun = self._begun
        if begun is not None:
            allowed_s = begun.slot.allowed_s(rows_to_compute(begun.arrived.frame))
            return next_item(self._inbox, begun.pending, allowed_s)
        if not self._is_rested:
            try:
                return (self._inbox.get(timeout=self._rest_s),)
            except queue.Empty:
                self._rest()
        return next_item(self._inbox, None)

    def _rest(self) -> None:
        self._is_rested = True
        try:
            for runtime in self._slots.shards().values():
                runtime.rest()
            return_freed_memory()
            release_code()
        except Exception:
            log.exception("memory could not be given back")

    def _serve_item(self, item: _Arrived | _Ended | Callable[[], None]) -> None:
        self._is_rested = False
        if isinstance(item, _Arrived):
            self._serve_frame(item)
            return
        if not isinstance(item, _Ended):
            self._finish_begun()
        with self.trace.busy(_ERRAND_S):
            if isinstance(item, _Ended):
                if not self._encoding.holds(item, item.message.sessions):
                    self._close_sessions(item)
            else:
                item()

    def _slot_for(self, arrived: _Arrived) -> StageSlot | None:
        """Where a frame is to be computed; None if it is too late, or from somebody who is not heard."""
        frame = arrived.frame
        slot = self._slots.slot_for(frame)
        if slot is None:
            return None
        if slot.ranks is not None and slot.ranks.has_ended:
            # It may go on from what a step was to pick that fell with the group. All comes again in the next epoch.
            return None
        if not slot.route.hears(arrived.sender, sessions_in(frame), is_replay=frame.replay):
            self._limited_log.warning(
                arrived.sender,
                "%s sent a frame for chain %s, in which it has no such place",
                arrived.sender,
                frame.chain,
            )
            return None
        return None if slot.is_outdated(frame) else slot

    def _serve_frame(self, arrived: _Arrived) -> None:
        frame, slot = arrived.frame, self._slot_for(arrived)
        if slot is None:
            self.trace.place(frame, arrived.sender, "dropped")
            return
        begun = self._begun
        if begun is not None and not (
            begun.slot.runtime is slot.runtime and slot.runtime.can_begin_after(begun.pending)
        ):
            self._finish_begun()
        self.trace.place(frame, arrived.sender, "computing")
        if not arrived.is_encoded and self._waits_for_pictures(slot, arrived):
            return
        with self.trace.busy(slot.allowed_s(rows_to_compute(frame))):
            following = self._begin(slot, arrived)
        try:
            self._finish_begun()
        finally:
            self._begun = following
        if following is not None and not slot.runtime.can_begin_after(following.pending):
            self._finish_begun()

    def _waits_for_pictures(self, slot: StageSlot, arrived: _Arrived) -> bool:
        """Whether a frame is for later: a tower has to look at its pictures, or at those of a frame before it."""
        encode = None
        if any(opened.pictures for opened in arrived.frame.opens):
            # What is wrong with them is for the step to say.
            with contextlib.suppress(ShardComputeError):
                encode = slot.runtime.encoding(openings_of(arrived.frame, arrived.body))
        return self._encoding.holds(arrived, sessions_in(arrived.frame), encode)

    def _serve_encoded(self) -> None:
        """Go on with what has waited for pictures."""
        for item in self._encoding.take_ready():
            self._serve_item(item if isinstance(item, _Ended) else replace(item, is_encoded=True))

    def _begin(self, slot: StageSlot, arrived: _Arrived) -> _Begun | None:
        """Begin a step; None where that failed, and was reported."""
        frame = arrived.frame
        started = time.perf_counter()
        try:
            slot.check_share(frame)
            work = [work_of(segment) for segment in frame.segments]
            openings = openings_of(frame, arrived.body)
            activations = _decode(frame, arrived.body)
            decoded = time.perf_counter()
            for opening in openings:
                _log_session("begins", opening.session, frame.chain)
            self._events.writes(slot.runtime, work, openings)
            pending = slot.runtime.begin(work, openings, activations)
        except CollectiveError as error:
            self._parted(slot, frame, arrived.sender, error)
            return None
        except Exception as error:
            self._failed(slot, frame, arrived.sender, error)
            return None
        return _Begun(slot, arrived, pending, decoded, decoded - started)

    def _finish_begun(self) -> None:
        """Finish the step that is under way, if there is one, and send what it brings."""
        begun, self._begun = self._begun, None
        if begun is not None:
            with self.trace.busy(begun.slot.allowed_s(rows_to_compute(begun.arrived.frame))):
                self._finish(begun)

    def _finish(self, begun: _Begun) -> None:
        slot, frame, sender = begun.slot, begun.arrived.frame, begun.arrived.sender
        pending = begun.pending
        # Behind another step it waited for the device.
        started = max(begun.began_s, self._done_s)
        try:
            out = slot.runtime.finish(pending)
            self._done_s = computed = time.perf_counter()
            if rows_to_compute(frame) == frame.rows:
                slot.times.observe(frame.rows, computed - started)
                self._observe_pace(slot, pending.work, computed - started)
            drafts: list[Draft] = []
            if isinstance(out, list):
                slot.runtime.remember(pending.work, out)
            drafting = time.perf_counter()
            if isinstance(out, list) and not frame.replay:
                drafts = slot.runtime.draft(pending.work)
            timing = StageTiming(
                self._node,
                started - begun.codec_s - begun.arrived.received_s,
                computed - started,
                begun.codec_s,
                len(begun.arrived.body),
                draft_s=time.perf_counter() - drafting,
                **self._exchanges(slot),
            )
            body = begun.arrived.body
            send = self._output.of_step(
                slot, frame, pending.work, pending.openings, out, drafts, timing, body
            )
        except CollectiveError as error:
            self._parted(slot, frame, sender, error)
            return
        except Exception as error:
            self._failed(slot, frame, sender, error)
            return
        self.trace.place(frame, sender, "sending")
        try:
            send()
        except Exception:
            self.trace.place(frame, sender, "dropped")
            raise
        self.trace.place(frame, sender, "sent")

    def _failed(self, slot: StageSlot, frame: StepFrame, sender: str, error: Exception) -> None:
        self.trace.place(frame, sender, "failed")
        self._output.report_failure(slot, frame, error)
        if isinstance(error, DeviceMemoryError):
            # Others are to compute these layers.
            for key in self._slots.keys_of(slot):
                self._events.out_of_memory(key, error)

    def _parted(self, slot: StageSlot, frame: StepFrame, sender: str, error: CollectiveError) -> None:
        """The group has ended in a step: no fault of the step, which comes again in the next epoch."""
        self.trace.place(frame, sender, "dropped")
        if slot.ranks is not None:
            self._ranks.failed(slot.ranks, error)

    def _exchanges(self, slot: StageSlot) -> dict[str, Any]:
        """What a step's exchanges took, and who was waited for most of late."""
        leader = None if slot.ranks is None else self._ranks.leader(slot.ranks.place)
        if slot.ranks is None or leader is None:
            return {}
        slowest = "" if leader.slowest is None else slot.ranks.peers[leader.slowest].node
        return {"exchange_s": leader.exchange_s, "slowest": slowest}

    def _observe_pace(self, slot: StageSlot, work: Sequence[SessionRows], seconds: float) -> None:
        self.computed_s += seconds
        for key, pace in self._slots.paces_of(slot):
            context = sum(part.start * len(part.ids) for part in work)
            changed = pace.observe(sum(len(part.ids) for part in work), context, seconds, self._done_s)
            if changed is not None:
                self._events.pace_changed(key, changed)

    def _close_sessions(self, ended: _Ended) -> None:
        message = ended.message
        slot = self._slots.slot(message.chain)
        # Of an old epoch it may be news of a session that has begun again since.
        is_current = slot is not None and message.epoch in (0, slot.route.epoch)
        if slot is not None and is_current and slot.route.may_end(ended.sender, message.sessions):
            for session in message.sessions:
                _log_session("has ended", session, message.chain)
            slot.close(message.sessions)
            self._events.ended(slot, message)


def _log_session(what: str, session: int, chain: str) -> None:
    """Stages know sessions by number alone; which request one belongs to is in the log of its driver."""
    extra = {"session": session, "chain": chain}
    log.debug("session %d of chain %s %s", session, chain, what, extra=extra)


def _decode(frame: StepFrame, body: memoryview) -> Array | None:
    if frame.width == 0:
        return None
    return find_codec(frame.codec).decode(body, frame.rows, frame.width)
