"""Driver, the head of a chain: sessions, batching, frames in flight, and what happens when the chain breaks.

A driver holds no layers. It gives frames to a `ChainPort` and takes their results, in whatever order and from
whatever thread they come. When the chain is lost it forgets what was computed, waits for the next shape, and
computes every session's known tokens again: sampling is a pure function, so the answers go on as they would
have. A frame whose results do not come in time is looked for. What follows from all that is decided under one lock and
done outside of it, in order: frames are sent, sessions closed and deltas emitted while others decide.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Protocol

from shardcompute.core.effects import CallLater, Countdown, EffectQueue, start_timer
from shardcompute.core.errors import (
    BackendError,
    CapacityError,
    DeviceMemoryError,
    QueueFullError,
    RowGapError,
    ShardComputeError,
    UnsupportedModelError,
    UsageError,
)
from shardcompute.core.generation import Delta, GenerationRequest, TokenChoice
from shardcompute.core.pictures import step_stop
from shardcompute.core.steps import Draft, Frame, Opening, Picked, SessionRows
from shardcompute.decoding.drafting import Drafter
from shardcompute.decoding.ngram import NgramDrafter
from shardcompute.decoding.routing.router import PipeLoad
from shardcompute.node.driver.flights import Flights, Lookout
from shardcompute.node.driver.generation import Emit, Generation, GenerationText, Landing
from shardcompute.node.driver.limits import ChainShape, DriverLimits, DriverLoad, check_request, picture_bytes
from shardcompute.node.driver.receipts.collector import ReceiptCollector, check_receipt
from shardcompute.node.driver.repair_wait import QUIET_S, RepairWait
from shardcompute.node.driver.scheduler import PipeContext, Scheduler, SchedulerLimits
from shardcompute.node.driver.sessions.kv_budget import KvBudget
from shardcompute.node.driver.sessions.session import Session
from shardcompute.node.driver.speculator import RoutedSpeculator, TakeDraft
from shardcompute.node.rpc.commands import UNCHANGED, ShapeChange
from shardcompute.node.rpc.session_ids import Resumption
from shardcompute.node.rpc.step_times import ROUND_PATIENCE, Patience
from shardcompute.node.telemetry.ring_pace import RingPace, RingWindow
from shardcompute.wire import StageTiming

if TYPE_CHECKING:
    from shardcompute.models.tokenizer import Tokenizer

_MOST_GAPS = 3
"""So often in a row a session is computed again because the chain lacks rows of it."""


_MOST_SHORTAGES = 4
_SHORTAGE_S = 0.5
"""So often in a row a session is computed again for which a stage's device had no memory, and after such pauses, which
double. Meanwhile its worker frees what it can, or other machines take its layers."""


class ChainPort(Protocol):
    """Where a driver's frames go. Neither method blocks for long, and neither calls the driver back directly."""

    def send(self, frame: Frame) -> None:
        """Start a step; its results reach `Driver.take_results` or `Driver.step_failed` later, or never if the
        chain is lost."""
        ...

    def close_sessions(self, sessions: Sequence[int]) -> None:
        """Free these sessions' KV on every stage, after the frames sent so far."""
        ...

    def replay(self, work: SessionRows, opening: Opening | None) -> None:
        """Have the first stage, and it alone, compute these rows for their KV."""
        ...

    def overdue(self, frame: Frame, waited_s: float, allowed_s: float) -> None:
        """Have a frame looked for whose results have not come in the time that was allowed for them."""
        ...


class Driver:
    """Serves generations over one chain. All methods may be called from any thread, also while deltas are emitted."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        limits: DriverLimits,
        *,
        first_session: int = 1,
        drafters: Sequence[Drafter] = (),
        receipts: ReceiptCollector | None = None,
        call_later: CallLater = start_timer,
        patience: Patience = ROUND_PATIENCE,
        quiet_s: float = QUIET_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._tokenizer = tokenizer
        self._receipts = receipts
        self._clock = clock
        self._limits = limits
        self._lock = threading.Lock()
        self._call_later = call_later
        self._chain_effects = EffectQueue()
        self._deltas = EffectQueue()
        self._timers = EffectQueue()
        self._flights = Flights(patience)
        self._ring = RingPace()
        self._ring_window: RingWindow | None = None
        self._lookout = Lookout(self._look_for_frames, self._timers, call_later)
        self._repair_wait = RepairWait(
            quiet_s, self._fail_all, self._deciding, self._timers, call_later, clock
        )
        self._speculator = RoutedSpeculator(
            (NgramDrafter(), *drafters),
            limits.speculation,
            self._take_draft,
            has_draft_head=limits.has_draft_head,
            clock=clock,
        )
        self._budget = KvBudget()
        self._scheduler = Scheduler(
            SchedulerLimits(
                max_sessions=limits.max_sessions,
                has_whole_pictures=limits.vision is not None and limits.vision.is_bidirectional,
            ),
            first_session,
            self._speculator,
            self._budget,
        )
        self._generations: dict[int, Generation] = {}
        self._port: ChainPort | None = None
        self._stages = 1
        self._is_closed = False
        self._shortage: Countdown | None = None
        """Runs while nothing is sent because a device is full."""
        self._freed_after = 0
        """The last frame that was sent before memory was freed: it, and those before it, may have lacked that."""
        self._is_draining = False
        """A frame failed: others under way may leave gaps, so none is sent until all of them have come back."""
        self._ended: list[int] = []
        """Sessions that ended while there was no chain to tell."""

    @property
    def context_length(self) -> int:
        return self._limits.context_length

    # What users ask

    def submit(self, request: GenerationRequest, emit: Emit, answered: Sequence[TokenChoice] = ()) -> int:
        """Start a generation; `emit` is called with each delta, or at last with an error. Where another driver has
        `answered` some of it already, this one goes on from there.

        Raises UsageError or PromptTooLongError for what cannot work, QueueFullError when too many wait.
        """
        check_request(request, self._limits)
        check_receipt(request, self._receipts)
        room = self._limits.context_length - len(request.prompt)
        request = replace(request, max_tokens=min(request.max_tokens, room))
        with self._deciding():
            self._speculator.check(request)
            if self._is_closed:
                raise CapacityError("the driver is shutting down")
            if len(self._scheduler.waiting) >= self._limits.max_waiting:
                raise QueueFullError(
                    f"{self._limits.max_waiting} requests are already waiting",
                    hint="try again in a few seconds",
                )
            self._check_picture_room(request)
            session = self._scheduler.add(request)
            answer = GenerationText(request, self._tokenizer)
            generation = Generation(session, answer, emit, self._clock())
            self._generations[session.id] = generation
            if self._receipts is not None:
                generation.record = self._receipts.begin(session.id, request, len(answered))
            if answered:
                session.known.extend(choice.id for choice in answered)
                session.scored = session.prompt_length if request.prompt_logprobs is not None else 0
                generation.first_token_s = generation.submitted_s
                for choice in answered:
                    answer.push(choice)
            self._fill()
        return session.id

    def cancel(self, generation: int) -> None:
        """Stop a generation and free its memory; nothing more is emitted, but what another thread is emitting now."""
        with self._deciding():
            known = self._generations.get(generation)
            if known is not None:
                known.is_cancelled = True
                self._end(known)
                self._fill()

    def expect_head_drafts(self, has_draft_head: bool) -> None:
        """Whether the chain's last stage drafts from now on."""
        with self._lock:
            self._speculator.expect_head_drafts(has_draft_head)

    def has_started(self, generation: int) -> bool:
        """Whether the chain works on this generation; not while it waits for a place."""
        with self._lock:
            known = self._generations.get(generation)
            return known is not None and known.started_s > 0

    def awaits(self, sequence: int) -> bool:
        """Whether the results of a frame are still to come."""
        with self._lock:
            return sequence in self._flights

    def load(self) -> DriverLoad:
        with self._lock:
            return DriverLoad(
                len(self._scheduler.running),
                len(self._scheduler.waiting),
                self._budget.used_tokens,
                self._budget.capacity_tokens,
            )

    def running_sessions(self) -> list[int]:
        """Those of which the chain has computed something, and that are not over."""
        with self._lock:
            return sorted(self._scheduler.running)

    def kept_tokens(self, request: GenerationRequest) -> int:
        """How much of a prompt's beginning the chain has kept, and need not compute."""
        with self._lock:
            return self._budget.kept_tokens(request)

    def speculation(self) -> Mapping[str, float]:
        """What the router knows (see `decoding.routing.router`)."""
        with self._lock:
            return self._speculator.router.snapshot()

    def drop_prefixes(self) -> None:
        """Give up what is kept of ended sessions."""
        with self._deciding():
            self._close_sessions(self._budget.evict_all())

    def close(self) -> None:
        """End every generation with an error; nothing is sent any more."""
        with self._deciding():
            self._is_closed = True
            self._wait_no_longer()
            self._flights.clear()
            self._lookout.stop()
            self._fail_all(CapacityError("the model is being shut down", hint="try again later"))
            self._close_sessions(self._budget.evict_all())
            self._port = None
            self._speculator.close()
        # A frame that another thread is sending now is through when this returns.
        self._chain_effects.flush()

    # What the chain tells

    def connect(
        self,
        port: ChainPort,
        shape: ChainShape,
        resumption: Resumption | None = None,
        change: ShapeChange = UNCHANGED,
    ) -> None:
        """A chain is ready, for the first time or again, with this `change`. What it does not know any more is computed
        again."""
        with self._deciding():
            self._wait_no_longer()
            if self._receipts is not None:
                # Before stages are told that those sessions have ended.
                self._receipts.reconnect(port, self._chain_effects.put)
            for generation in self._generations.values():
                generation.interrupt(change)
            self._flights.clear()
            self._ring, self._ring_window = RingPace(), None
            # Also those whose end was told to a chain that broke before all stages heard of it.
            held = resumption.held if resumption is not None else frozenset()
            kept = self._scheduler.connect(shape)
            ended = {*self._ended, *held, *kept} - self._scheduler.running.keys()
            if ended:
                self._chain_effects.put(partial(port.close_sessions, sorted(ended)))
                self._ended = []
            for session in self._scheduler.running.values():
                self._cut_receipt(session, port)
                self._resume(session, port, shape, resumption)
                self._go_on_receipt(session, port)
            self._port, self._stages = port, shape.stages
            self._fill()

    def resize(self, kv_tokens: int) -> None:
        """The chain that is connected has more or less memory for us from now on; frames under way stay so."""
        with self._deciding():
            self._budget.capacity_tokens = kv_tokens
            self._close_sessions(self._scheduler.shrink())
            self._fill()

    def take_ring_window(self) -> RingWindow | None:
        """What steps took of late, once for each window of many."""
        with self._lock:
            window, self._ring_window = self._ring_window, None
        return window

    def disconnect(self) -> None:
        """The chain is lost: keep the sessions and wait for the next `connect`."""
        with self._deciding():
            self._port = None
            self._flights.clear()
            self._budget.disconnect()
            if not self._is_closed:
                self._repair_wait.begin()

    def progressed(self, progress: tuple[int, float], waits_for: str) -> None:
        """The lost chain is being loaded: its epoch, which fraction is there, and what is missing in words. Whoever
        waits may go on waiting, where that is further than before."""
        with self._deciding():
            if self._port is None and not self._is_closed:
                self._repair_wait.progressed(progress, waits_for)

    def waits_for(self) -> str:
        """What the repair of a lost chain waits for, in words; empty where nothing is known of that."""
        with self._lock:
            return self._repair_wait.waits_for

    def fail_later(self, error: ShardComputeError, patience_s: float) -> None:
        """Unless a chain is connected by then, end every generation with this error."""
        if patience_s <= 0:
            self.fail_all(error)
            return
        with self._deciding():
            if self._port is None and not self._is_closed:
                self._repair_wait.give_up_after(patience_s, error)

    def fail_all(self, error: ShardComputeError) -> None:
        """No chain will come soon: end every generation with this error."""
        with self._deciding():
            self._fail_all(error)

    def take_results(
        self,
        sequence: int,
        picked: Sequence[Picked],
        timings: Sequence[StageTiming] = (),
        head_drafts: Sequence[Draft] = (),
    ) -> None:
        """What a frame brought: picked tokens, how the stages spent their time, and what the last one drafts to come
        next."""
        if any(result.choice.id >= self._limits.vocab_size for result in picked):
            self.step_failed(
                sequence, BackendError("the last stage chose a token that the model does not have")
            )
            return
        with self._deciding():
            now = self._clock()
            landed = self._flights.land(sequence, timings, now)
            if landed is None:
                return
            frame, landing = landed
            self._note(frame, landing, timings)
            answering, came = self._scheduler.answering(), 0
            for session, result in self._scheduler.take_results(sequence, picked):
                generation = self._generations.get(session.id)
                if generation is not None:  # unless it has ended with the one before
                    self._extend(generation, result.choice, now)
                    came += 1
            self._speculator.router.came(came, answering, now)
            self._take_head_drafts(frame, head_drafts, timings)
            self._fill()

    def step_failed(self, sequence: int, error: ShardComputeError) -> None:
        """A step could not be computed: make room, or give its sessions the error. Others go on."""
        with self._deciding():
            frame = self._flights.drop(sequence)
            if frame is None:
                return
            self._is_draining = True
            has_shared = any(opening.prefix is not None for opening in frame.openings)
            is_short = isinstance(error, DeviceMemoryError) and self._pause_for_memory(frame)
            if has_shared or self._scheduler.is_void(frame):
                self._undo(frame)
                self._fill()
                return
            if is_short:
                self._scheduler.undo(frame)
                self._close_sessions(self._budget.evict_all())
                return
            if isinstance(error, RowGapError) and self._fill_gap(frame):
                self._fill()
                return
            if isinstance(error, CapacityError) and not isinstance(error, DeviceMemoryError):
                self._scheduler.undo(frame)
                self._close_sessions(self._budget.evict_all())
                victim = None if sequence <= self._freed_after else self._scheduler.preempt()
                if victim is not None:
                    self._close_sessions([victim.id])
                if sequence <= self._freed_after:
                    self._fill()
                    return
            for session in self._blamed(frame, error):
                generation = self._generations.get(session)
                if generation is not None:
                    self._fail(generation, error)
            self._fill()

    def _blamed(self, frame: Frame, error: ShardComputeError) -> list[int]:
        """The sessions that a frame failed for: where a stage refuses pictures, those that show some. The others' rows
        are sent again."""
        shown = [opening.session for opening in frame.openings if opening.spans]
        if shown and isinstance(error, UsageError | UnsupportedModelError):
            self._scheduler.undo(frame)
            return shown
        return [part.session for part in frame.work]

    def replay_failed(self, sessions: Sequence[int]) -> None:
        """A new stage could not be told of these sessions: they start again."""
        with self._deciding():
            self._scheduler.start_again(sessions)
            self._fill()

    # Inside

    @contextlib.contextmanager
    def _deciding(self) -> Iterator[None]:
        """Decide under the lock, then do what follows outside of it: the chain first, which has others waiting."""
        try:
            with self._lock:
                yield
        finally:
            self._chain_effects.run()
            self._deltas.run()
            self._timers.run()

    def _send(self, port: ChainPort, frame: Frame) -> None:
        if not self._is_closed:
            port.send(frame)

    def _emit(self, generation: Generation, said: Delta | ShardComputeError) -> None:
        if not generation.is_cancelled:
            generation.emit(said)

    def _check_picture_room(self, request: GenerationRequest) -> None:
        if not request.pictures:
            return
        kept = sum(picture_bytes(each.session.request) for each in self._generations.values())
        if kept + picture_bytes(request) > self._limits.max_picture_bytes:
            raise QueueFullError(
                "the pictures of other requests take all the memory that there is for pictures",
                hint="try again in a few seconds, or send smaller ones",
            )

    def _fail(self, generation: Generation, error: ShardComputeError) -> None:
        self._end(generation)
        self._deltas.put(partial(self._emit, generation, error))

    def _fail_all(self, error: ShardComputeError) -> None:
        for generation in list(self._generations.values()):
            self._fail(generation, error)

    def _wait_no_longer(self) -> None:
        self._repair_wait.end()
        if self._shortage is not None:
            self._timers.put(self._shortage.stop)
            self._shortage = None

    def _fill(self) -> None:
        """Send frames while there is work and room in the pipe, and see to it that they are missed in time."""
        self._fill_pipe()
        self._watch(self._clock())

    def _fill_pipe(self) -> None:
        self._is_draining = self._is_draining and bool(self._flights)
        if self._is_draining or self._shortage is not None:
            return
        while self._port is not None and self._flights.computing < self._most_frames():
            self._close_sessions(self._scheduler.make_room())
            frame = self._scheduler.next_frame(self._context())
            if frame is None:
                return
            now = self._clock()
            for opening in frame.openings:
                generation = self._generations[opening.session]
                generation.started_s = generation.started_s or now
                self._open_receipt(generation, frame, opening)
            self._flights.depart(frame, now)
            self._chain_effects.put(partial(self._send, self._port, frame))

    def _watch(self, now: float) -> None:
        """Look when the first of the frames and drafts under way is overdue."""
        waits = (self._flights.next_look_s(now), self._speculator.next_overdue_s(now))
        wait_s = min((each for each in waits if each is not None), default=None)
        if wait_s is not None and not self._is_closed:
            self._lookout.expect(wait_s, now)

    def _look_for_frames(self, countdown: Countdown) -> None:
        with self._deciding():
            if not self._lookout.is_due(countdown):
                return
            now = self._clock()
            for frame, waited_s, allowed_s in self._flights.overdue(now):
                if self._port is not None:
                    self._chain_effects.put(partial(self._port.overdue, frame, waited_s, allowed_s))
            for id in self._speculator.give_up_drafts(now):
                self._generations[id].session.is_drafting = False
            self._fill()

    def _undo(self, frame: Frame) -> None:
        """The frame was not computed by all: its rows are sent again."""
        self._scheduler.undo(frame)
        self._drop_shared(frame)

    def _fill_gap(self, frame: Frame) -> bool:
        """A stage lacks rows that were sent before those of this frame: send them again. False where that was tried
        too often.

        Frames keep their order on the way: one before it that has not been answered is lost, or has failed.
        """
        sessions = {part.session for part in frame.work}
        lost = self._flights.before(frame)
        running = [self._scheduler.running[id] for id in sessions if id in self._scheduler.running]
        for session in running:
            session.gaps += 1
        if any(session.gaps > _MOST_GAPS for session in running):
            return False
        for each in (*lost, frame):
            self._flights.drop(each.sequence)
            self._undo(each)
        if not lost:
            self._scheduler.start_again(sessions)
        return True

    def _pause_for_memory(self, frame: Frame) -> bool:
        """A stage's device is full: send nothing for a moment. False where that was tried too often."""
        running = [self._scheduler.running.get(part.session) for part in frame.work]
        sessions = [session for session in running if session is not None]
        for session in sessions:
            session.shortages += 1
        most = max((session.shortages for session in sessions), default=1)
        if most > _MOST_SHORTAGES:
            return False
        if self._shortage is None:
            pause_s = _SHORTAGE_S * 2 ** (most - 1)
            self._shortage = Countdown(pause_s, self._end_pause, self._call_later)
            self._timers.put(self._shortage.start)
        return True

    def _end_pause(self, shortage: Countdown) -> None:
        with self._deciding():
            if self._shortage is shortage:
                self._shortage = None
                self._fill()

    def _most_frames(self) -> int:
        """So many may be under way."""
        depth = self._depth()
        if self._scheduler.limits.can_continue:
            depth *= 2
        return max(depth, self._speculator.most_frames())

    def _depth(self) -> int:
        """So many frames, with others' sessions each, keep the chain busy; half of them where each is followed by
        another one at once."""
        depth = self._speculator.router.pipe_depth(self._stages)
        return -(-depth // 2) if self._scheduler.limits.can_continue else depth

    def _context(self) -> PipeContext:
        return PipeContext(
            PipeLoad(
                self._scheduler.answering(),
                self._flights.computing,
                self._stages,
                self._scheduler.limits.can_continue,
            ),
            self._depth(),
            self._budget.free_tokens,
        )

    def _note(self, frame: Frame, landing: Landing, timings: Sequence[StageTiming]) -> None:
        """Learn from a frame that came back, unless its first stage looked at pictures too."""
        if frame.patches:
            return
        step_s = landing.seconds - landing.queue_s - landing.draft_s
        self._speculator.router.traversed(frame.rows, step_s, [timing.compute_s for timing in timings])
        window = self._ring.observe(frame.rows, step_s, landing.wire_s, self._clock())
        self._ring_window = window or self._ring_window
        for part in frame.work:
            generation = self._generations.get(part.session)
            if generation is not None and generation.session.generated:
                generation.journey.add(landing)

    def _take_head_drafts(
        self, frame: Frame, head_drafts: Sequence[Draft], timings: Sequence[StageTiming]
    ) -> None:
        """Keep what the last stage drafted for sessions that asked and are still here."""
        drafts = {draft.session: draft for draft in head_drafts}
        seconds = timings[-1].draft_s / max(len(drafts), 1) if timings else 0.0
        for part in frame.work:
            session = self._scheduler.running.get(part.session)
            if part.head_draft_tokens and session is not None:
                draft = drafts.get(part.session)
                is_sound = draft is None or all(token < self._limits.vocab_size for token in draft.ids)
                self._speculator.take_head_draft(session, draft if is_sound else None, seconds)

    def _take_draft(self, session: int, take: TakeDraft) -> None:
        """A slow drafter has answered, from a thread of its own."""
        with self._deciding():
            generation = self._generations.get(session)
            if generation is not None:
                take(generation.session, self._context())
                self._fill()

    def _resume(
        self, session: Session, port: ChainPort, shape: ChainShape, resumption: Resumption | None
    ) -> None:
        """Go on where the chain still knows the session, from its last known token; start again where it does not."""
        known = len(session.known) - 1
        lengths = resumption.lengths if resumption is not None else {}
        if not session.generated or (lengths is not None and lengths.get(session.id, 0) < known):
            session.forget()
            return
        session.rewind(known)
        if resumption is not None and resumption.has_new_first:
            # All of its rows are told, also those that it once began with: nobody else's are there.
            opening = replace(session.opening(), prefix=None)
            start = 0
            while start < known:
                stop = min(start + shape.max_rows, known)
                if self._scheduler.limits.has_whole_pictures:
                    stop = step_stop(session.spans, start, stop)
                work = SessionRows(session.id, start, tuple(session.known[start:stop]))
                self._chain_effects.put(partial(port.replay, work, opening if start == 0 else None))
                start = stop

    def _extend(self, generation: Generation, choice: TokenChoice, now: float) -> None:
        session, request = generation.session, generation.session.request
        session.gaps = session.shortages = 0
        interruption = generation.resumed(now)
        delta = generation.answer.push(choice)
        if interruption is not None:
            delta = replace(delta, interruption=interruption)
        if generation.answer.count == 1:
            generation.first_token_s = now
            if request.prompt_logprobs is not None:
                scores = (session.scores[row] for row in range(session.prompt_length - 1))
                delta = replace(delta, prompt=(TokenChoice(request.prompt[0]), *scores))
        if delta.finish is not None:
            delta = replace(delta, timings=generation.timings(self._speculator.stats_of(session.id), now))
            self._finish_receipt(generation)
            self._end(generation)
        self._deltas.put(partial(self._emit, generation, delta))

    # Receipts: nothing of it happens in answers that want none

    def _open_receipt(self, generation: Generation, frame: Frame, opening: Opening) -> None:
        record, session = generation.record, generation.session
        if record is not None and self._receipts is not None:
            record.opened(self._port, frame.sequence, opening, len(session.known) - 1)
            self._receipts.expect(record)

    def _cut_receipt(self, session: Session, port: ChainPort) -> None:
        """Have those sign who computed what is known of a session, before others go on with it."""
        generation = self._generations.get(session.id)
        if generation is not None and generation.record is not None:
            generation.record.cut(port, len(session.known) - 1, self._chain_effects.put)

    def _go_on_receipt(self, session: Session, port: ChainPort) -> None:
        generation = self._generations.get(session.id)
        if generation is None or generation.record is None:
            return
        if session.is_opened:
            generation.record.resumed(port, len(session.known) - 1)
        else:
            generation.record.restarted(len(session.known) - 1)

    def _finish_receipt(self, generation: Generation) -> None:
        record, session = generation.record, generation.session
        if record is None or self._receipts is None:
            return
        # With drafts, tokens behind the last of the answer may be known already.
        tokens = session.known[: session.prompt_length + generation.answer.count]
        if record.finish(tokens, self._chain_effects.put):
            generation.record = None
            self._timers.put(partial(self._receipts.finish, record))

    def _end(self, generation: Generation) -> None:
        if generation.record is not None and self._receipts is not None:
            self._timers.put(partial(self._receipts.abandon, generation.record))
        self._scheduler.remove(generation.session)
        self._generations.pop(generation.session.id, None)
        self._speculator.forget(generation.session.id)
        if not self._budget.keep(generation.session):
            self._close_sessions([generation.session.id])

    def _close_sessions(self, sessions: Sequence[int]) -> None:
        """Free what the chain holds of these."""
        if not sessions:
            return
        self._freed_after = self._flights.last_sent
        if self._port is not None:
            for id in sessions:
                if (generation := self._generations.get(id)) is not None:
                    self._cut_receipt(generation.session, self._port)
            self._chain_effects.put(partial(self._port.close_sessions, sessions))
        else:
            self._ended.extend(sessions)

    def _drop_shared(self, frame: Frame) -> None:
        """Some stages may have begun these sessions with others' memory, some not: start again without."""
        for opening in frame.openings:
            if opening.prefix is not None:
                moved = [opening.prefix.source] if opening.prefix.is_moved else []
                self._close_sessions([opening.session, *moved])
