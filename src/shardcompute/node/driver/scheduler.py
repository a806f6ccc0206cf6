"""Scheduler of a chain, what goes into the next frame: pure bookkeeping, no I/O, no clock.

Computed tokens catch up with known tokens, and that is all there is: a new session's known tokens are its
prompt, and each picked token adds one. Drafts are tokens that are assumed ahead of being known (`session`); where
they come from is a `Speculator`'s business. Sessions take turns; one with many tokens to compute gets what room
the others leave, so that a long prompt delays nobody. A session that must make room (`preempt`) forgets what
it computed and later computes it again, to the same bits. Where a chain can *continue* sessions by itself, the row
behind the token that is being picked is sent along, one ahead, so that the chain need not wait for the driver; where
the session ends with that token, what the row brings is dropped.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from shardcompute.core.generation import GenerationRequest
from shardcompute.core.pictures import step_stop
from shardcompute.core.steps import PICKED, Frame, Opening, Picked, SessionRows
from shardcompute.decoding.routing.router import PipeLoad
from shardcompute.node.driver.limits import ChainShape
from shardcompute.node.driver.sessions.kv_budget import KvBudget
from shardcompute.node.driver.sessions.session import Session, round_to_pages

_PROMPT_SHARE = 4
"""One row in so many is kept for prompts while others are answering."""
_SHARED_PART, _LEAST_SHARED = 8, 64
"""Of the rows that a chain can take at once, while others are answering: they wait for all of them."""


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """`chunk_rows`: the most rows of a frame; `shared_rows`: the most when some session is already answering."""

    chunk_rows: int = 256
    shared_rows: int = _LEAST_SHARED
    max_sessions: int = 16
    max_logit_rows: int = 64
    can_continue: bool = False
    has_whole_pictures: bool = False
    """No step may end inside a picture."""


@dataclass(frozen=True, slots=True)
class PipeContext:
    """What there is to know of the chain while a frame is put together."""

    load: PipeLoad
    depth: int = 1
    """So many frames keep every stage busy: one for each, and as many as are on the wires between them."""
    free_tokens: int = 0
    """KV that nobody holds yet."""


class Speculator(Protocol):
    """Where drafts come from. Called while a frame is put together, so it must be quick."""

    def can_extend(self, session: Session, context: PipeContext) -> bool:
        """Whether `extend` may add to a session of which every row has been sent."""
        ...

    def extend(self, session: Session, context: PipeContext) -> None:
        """Add to `assumed`, or set `head_draft_tokens` or `is_drafting`; or leave the session as it is."""
        ...

    def lets_continue(self, session: Session, context: PipeContext) -> bool:
        """Whether the chain may go on with a session by itself: there is no better draft. May set
        `head_draft_tokens`."""
        ...

    def committed(self, session: Session, was_assumed: bool, is_right: bool) -> None:
        """A token was picked; whether another one, or the same, had been assumed there."""
        ...


class PlainDecoding:
    """A `Speculator` that never does."""

    def can_extend(self, session: Session, context: PipeContext) -> bool:
        return False

    def extend(self, session: Session, context: PipeContext) -> None:
        """Nothing is ever assumed."""

    def lets_continue(self, session: Session, context: PipeContext) -> bool:
        return True

    def committed(self, session: Session, was_assumed: bool, is_right: bool) -> None:
        """Nothing is to be learned."""


@dataclass(slots=True)
class Scheduler:
    """Owns the sessions of one chain; `budget` knows which of them run, because they hold its memory."""

    limits: SchedulerLimits
    first_id: int = 1
    speculator: Speculator = field(default_factory=PlainDecoding)
    budget: KvBudget = field(default_factory=KvBudget)
    waiting: deque[Session] = field(default_factory=deque)
    _turns: deque[int] = field(default_factory=deque)
    _sequence: int = 0
    _added: int = 0

    @property
    def running(self) -> dict[int, Session]:
        return self.budget.running

    def connect(self, shape: ChainShape) -> list[int]:
        """Frames go to a chain of this shape from now on. Returns the sessions that were kept on the one before."""
        self.limits = replace(
            self.limits,
            chunk_rows=shape.max_rows,
            shared_rows=max(_LEAST_SHARED, shape.max_rows // _SHARED_PART),
            max_logit_rows=shape.max_logit_rows,
            can_continue=shape.can_continue and shape.stages == 1,
        )
        return self.budget.connect(shape.capacity_tokens, can_share=shape.can_share)

    def add(self, request: GenerationRequest) -> Session:
        session = Session(self.first_id + self._added, request, list(request.prompt))
        self._added += 1
        self.waiting.append(session)
        return session

    def remove(self, session: Session) -> None:
        """The session is over, or nobody wants it any more."""
        if self.budget.release(session):
            self._turns.remove(session.id)
        elif session in self.waiting:
            self.waiting.remove(session)

    def make_room(self) -> list[int]:
        """Give up what is kept of ended sessions for those who run, or wait first. Returns what was given up."""
        return self.budget.make_room(self.waiting[0] if self.waiting else None)

    def next_frame(self, context: PipeContext) -> Frame | None:
        """The next step, or None when every session waits for results."""
        self._admit()
        shown = self._show_next()
        if shown is not None:
            return shown
        answering = [s for s in self._in_turn() if self._is_due(s, context)]
        computing = [
            s for s in self._in_turn() if not s.generated and s.unsent and not (s.is_showing or s.is_to_show)
        ]
        limits = self.limits
        room = min(limits.chunk_rows, limits.shared_rows) if answering else limits.chunk_rows
        reserved = -(-room // _PROMPT_SHARE) if computing else 0
        work = self._answer(answering, context, room - reserved, limits.max_logit_rows - bool(reserved))
        room -= sum(len(part.ids) for part in work)
        logit_room = limits.max_logit_rows - sum(part.logit_rows for part in work)
        for session in computing:
            part = self._next_part(session, work, room, logit_room)
            if part is not None:
                work.append(part)
                room -= len(part.ids)
                logit_room -= part.logit_rows
        return self._frame(work) if work else None

    def _show_next(self) -> Frame | None:
        """The pictures of one session, in a frame of its own: a tower looks at them first, and others go on. One after
        the other: they are many bytes, and much work."""
        if any(session.is_showing for session in self.running.values()):
            return None
        for session in self._in_turn():
            if session.is_to_show:
                part = self._next_part(session, (), self.limits.chunk_rows, self.limits.max_logit_rows)
                if part is not None:
                    session.shown_in = self._sequence + 1
                    return self._frame([part])
        return None

    def _frame(self, work: Sequence[SessionRows]) -> Frame:
        self._sequence += 1
        openings = tuple(
            self._open(self.running[part.session]) for part in work if self._is_new(part.session)
        )
        for part in work:
            self._send(self.running[part.session], part)
        return Frame(self._sequence, tuple(work), openings)

    def take_results(self, sequence: int, picked: Iterable[Picked]) -> list[tuple[Session, Picked]]:
        """Results of a frame, for sessions that are still here; picked tokens become known.

        What was sent before a session was rolled back does not count: it is told again.
        """
        taken: list[tuple[Session, Picked]] = []
        for result in picked:
            session = self.running.get(result.session)
            if session is None:
                continue
            if result.is_scored:
                session.scores[result.position] = result.choice
                while session.scored in session.scores:
                    session.scored += 1
            elif sequence > session.void_until and result.position >= len(session.known) - 1:
                session.early[result.position] = result
                taken.extend((session, each) for each in self._commit(session))
        for session in self.running.values():
            session.flights.discard(sequence)
            if not session.flights:
                session.awaits_head_draft = False
        return taken

    def undo(self, frame: Frame) -> None:
        """The frame was not computed: its tokens are to be sent again."""
        for part in frame.work:
            session = self.running.get(part.session)
            if session is not None and frame.sequence > session.void_until:
                session.roll_back(part.start, self._sequence)
        for opening in frame.openings:
            session = self.running.get(opening.session)
            if session is not None and opening.prefix is not None:
                session.forget()
            elif session is not None and session.sent == 0:
                session.is_opened = False

    def is_void(self, frame: Frame) -> bool:
        """Whether a session of the frame has left or was rolled back since: its rows then leave a gap, for which
        the others in the frame are not to blame."""
        sessions = [self.running.get(part.session) for part in frame.work]
        return any(session is None or frame.sequence <= session.void_until for session in sessions)

    def preempt(self) -> Session | None:
        """Make room: the youngest session gives up its KV and starts again when there is room."""
        session = self.budget.choose_victim()
        if session is None:
            return None
        self.remove(session)
        session.forget()
        session.void_until = self._sequence
        self.waiting.appendleft(session)
        return session

    def start_again(self, sessions: Iterable[int]) -> None:
        """What was computed of these is gone: compute it again, whatever is on its way."""
        for id in sessions:
            session = self.running.get(id)
            if session is not None:
                session.forget()
                session.void_until = self._sequence

    def shrink(self) -> list[int]:
        """Give up the sessions whose memory is missed least while there is too little: ended ones, then the youngest.
        Returns what was given up."""
        given_up: list[int] = []
        while self.budget.free_tokens < 0:
            if (kept := self.budget.evict()) is not None:
                given_up.append(kept)
            elif (victim := self.preempt()) is not None:
                given_up.append(victim.id)
            else:
                break
        return given_up

    def answering(self) -> int:
        """How many sessions have begun to answer."""
        return sum(1 for session in self.running.values() if session.generated)

    def _commit(self, session: Session) -> list[Picked]:
        """Make known what follows the known tokens, as far as it is there."""
        taken = []
        while (result := session.early.pop(len(session.known) - 1, None)) is not None:
            was_assumed = bool(session.assumed) and session.assumed[0] != PICKED
            is_right = session.commit(result.choice.id)
            if not is_right:
                session.roll_back(len(session.known) - 1, self._sequence)
            self.speculator.committed(session, was_assumed, is_right)
            taken.append(result)
        return taken

    def _admit(self) -> None:
        while self.waiting and len(self.running) < self.limits.max_sessions:
            if not self.budget.admit(self.waiting[0]):
                return
            self._turns.append(self.waiting.popleft().id)

    def _in_turn(self) -> list[Session]:
        return [self.running[i] for i in self._turns]

    def _is_due(self, session: Session, context: PipeContext) -> bool:
        if session.is_drafting or session.is_showing or session.is_to_show:
            return False
        if self._may_continue(session, context):
            return True
        return session.generated > 0 and (session.unsent > 0 or self.speculator.can_extend(session, context))

    def _may_continue(self, session: Session, context: PipeContext) -> bool:
        """Whether the row behind the token that is being picked for a session can be sent already."""
        request = session.request
        return (
            self.limits.can_continue
            and len(session.flights) == 1
            and session.unsent == 0
            and not session.assumed
            and not session.awaits_head_draft
            and session.generated + 1 < request.max_tokens
            and not request.sampling.shows_rows
            and (request.prompt_logprobs is None or session.generated > 0)
            and round_to_pages(session.length + 2) <= session.held_tokens + max(context.free_tokens, 0)
        )

    def _answer(
        self, answering: list[Session], context: PipeContext, room: int, logit_room: int
    ) -> list[SessionRows]:
        """Rows of sessions that are answering: with several frames in flight, each takes its share of the sessions
        so that every stage has one."""
        share = -(-len(self.running) // context.depth)
        work: list[SessionRows] = []
        for session in answering:
            if len(work) == share:
                break
            if not self._may_continue(session, context):
                self.speculator.extend(session, context)
            elif self.speculator.lets_continue(session, context):
                session.assumed.append(PICKED)
            part = None if session.is_drafting else self._next_part(session, work, room, logit_room)
            if part is not None:
                work.append(part)
                room -= len(part.ids)
                logit_room -= part.logit_rows
        return work

    def _next_part(
        self, session: Session, work: Sequence[SessionRows], room: int, logit_room: int
    ) -> SessionRows | None:
        """As many of the session's unsent tokens as fit a frame with this work; no part of a picture where the model
        wants whole ones."""
        part = _next_work(session, room, logit_room)
        if part is None or not (self.limits.has_whole_pictures and session.request.pictures):
            return part
        most = self.limits.chunk_rows - sum(len(each.ids) for each in work)
        return _with_whole_pictures(session, part, most, logit_room, is_alone=not work)

    def _is_new(self, session: int) -> bool:
        return not self.running[session].is_opened

    def _open(self, session: Session) -> Opening:
        session.is_opened = True
        return session.opening()

    def _send(self, session: Session, part: SessionRows) -> None:
        session.sent = part.start + len(part.ids)
        session.flights.add(self._sequence)
        session.awaits_head_draft = session.awaits_head_draft or part.head_draft_tokens > 0
        session.head_draft_tokens = 0
        self._turns.remove(session.id)
        self._turns.append(session.id)


def _next_work(session: Session, room: int, logit_room: int) -> SessionRows | None:
    """As many of the session's unsent tokens as fit."""
    count = min(session.unsent, max(room, 0))
    start = session.sent
    if count < 1:
        return None
    if start < session.scored:
        # Computed again after a loss: what was scored then is not scored twice.
        return SessionRows(session.id, start, session.tokens(start, min(start + count, session.scored)))
    last_of_prompt = session.prompt_length - 1
    if session.request.prompt_logprobs is not None and start < last_of_prompt:
        # Every prompt token but the first is scored after the row before it.
        count = min(count, logit_room, last_of_prompt - start)
        if count < 1:
            return None
        targets = session.tokens(start + 1, start + 1 + count)
        return SessionRows(session.id, start, session.tokens(start, start + count), count, targets)
    if session.request.prompt_logprobs is not None and session.scored < last_of_prompt:
        return None  # the first token is announced together with the scores, so they must be there
    # A token is wanted after the last known one and after each draft.
    silent = max(len(session.known) - 1 - start, 0)
    count = min(count, silent + logit_room)
    if count < 1:
        return None
    logit_rows = max(count - silent, 0)
    drafted = session.head_draft_tokens if logit_rows and start + count == session.length else 0
    ids = session.tokens(start, start + count)
    return SessionRows(session.id, start, ids, logit_rows, head_draft_tokens=drafted)


def _with_whole_pictures(
    session: Session, part: SessionRows, most: int, logit_room: int, *, is_alone: bool
) -> SessionRows | None:
    """These rows of a prompt, fewer or (up to `most`) more, so that no picture is cut. None: not in this frame."""
    stop = step_stop(session.spans, part.start, part.start + len(part.ids))
    count = stop - part.start
    if count == len(part.ids):
        return part
    logit_rows = max(stop - len(session.known) + 1, 0)
    # One that no frame has room for is for the chain to refuse.
    if logit_rows > logit_room or (count > most and not is_alone):
        return None
    return SessionRows(session.id, part.start, session.tokens(part.start, stop), logit_rows)
