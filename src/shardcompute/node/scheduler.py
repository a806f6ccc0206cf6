"""What goes into the next frame: pure bookkeeping, no I/O, no clock.

Computed tokens catch up with known tokens, and that is all there is: a new session's known tokens are its
prompt, and each picked token adds one. Sessions take turns; one with many tokens to compute gets what room
the others leave, so that a long prompt delays nobody. A session that must make room (`preempt`) forgets what
it computed and later computes it again, to the same bits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from shardcompute.core.batch import PAGE_TOKENS
from shardcompute.core.generation import GenerationRequest, TokenChoice
from shardcompute.core.steps import Opening, Picked, Work


@dataclass(slots=True)
class Session:
    """One generation under way. `known` are prompt and picked tokens; `sent` of them are on their way or done."""

    id: int
    request: GenerationRequest
    known: list[int]
    sent: int = 0
    scores: dict[int, TokenChoice] = field(default_factory=dict)
    """The prompt's tokens with their log-probabilities, by the row that scored them."""
    scored: int = 0
    """So many of the first rows have scores; these are not asked for again."""
    is_opened: bool = False
    void_until: int = 0
    """Frames up to this number were sent before the session was rolled back: they may fail for that alone."""

    @property
    def prompt_length(self) -> int:
        return len(self.request.prompt)

    @property
    def generated(self) -> int:
        return len(self.known) - self.prompt_length

    def forget(self) -> None:
        """What was computed is gone: compute it again."""
        self.sent, self.is_opened = 0, False

    def rewind(self, sent: int) -> None:
        """What was on its way is lost; the first `sent` tokens are computed, wherever it was about to start again."""
        self.sent, self.is_opened = sent, True

    def opening(self) -> Opening:
        request = self.request
        return Opening(self.id, request.sampling, self.prompt_length, request.prompt_logprobs or 0)


@dataclass(frozen=True, slots=True)
class Frame:
    """One step for the whole chain."""

    sequence: int
    work: tuple[Work, ...]
    openings: tuple[Opening, ...]

    @property
    def rows(self) -> int:
        return sum(len(part.ids) for part in self.work)


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """`chunk_rows`: the most rows of a frame; `shared_rows`: the most when some session is already answering."""

    chunk_rows: int = 256
    shared_rows: int = 64
    max_sessions: int = 16
    max_wanted: int = 64
    frames_in_flight: int = 1


@dataclass(slots=True)
class Scheduler:
    """Owns the sessions of one chain."""

    limits: SchedulerLimits
    first_id: int = 1
    running: dict[int, Session] = field(default_factory=dict)
    waiting: deque[Session] = field(default_factory=deque)
    _turns: deque[int] = field(default_factory=deque)
    _sequence: int = 0
    _added: int = 0

    def add(self, request: GenerationRequest) -> Session:
        session = Session(self.first_id + self._added, request, list(request.prompt))
        self._added += 1
        self.waiting.append(session)
        return session

    def remove(self, session: Session) -> None:
        """The session is over, or nobody wants it any more."""
        if self.running.pop(session.id, None) is not None:
            self._turns.remove(session.id)
        elif session in self.waiting:
            self.waiting.remove(session)

    def next_frame(self, free_tokens: int) -> Frame | None:
        """The next step, or None when every session waits for results. `free_tokens` of KV bound new sessions."""
        self._admit(free_tokens)
        answering = [s for s in self._in_turn() if s.generated and s.sent < len(s.known)]
        computing = [s for s in self._in_turn() if not s.generated and s.sent < len(s.known)]
        room = self.limits.chunk_rows
        if answering:
            room = min(room, self.limits.shared_rows)
        wanted = self.limits.max_wanted
        work: list[Work] = []
        for session in self._share_of(answering) + computing:
            part = _next_work(session, room, wanted)
            if part is None:
                continue
            work.append(part)
            room -= len(part.ids)
            wanted -= part.wanted
        if not work:
            return None
        openings = tuple(
            self._open(self.running[part.session]) for part in work if self._is_new(part.session)
        )
        for part in work:
            self._send(self.running[part.session], part)
        self._sequence += 1
        return Frame(self._sequence, tuple(work), openings)

    def take_results(self, picked: Iterable[Picked]) -> list[tuple[Session, Picked]]:
        """Results of a frame, for sessions that are still here; picked tokens become known.

        A session that was rolled back may be told the same thing twice: only the token that follows the known
        ones counts.
        """
        taken = []
        for result in picked:
            session = self.running.get(result.session)
            if session is None:
                continue
            if result.is_scored:
                session.scores[result.position] = result.choice
                while session.scored in session.scores:
                    session.scored += 1
            elif result.position == len(session.known) - 1:
                session.known.append(result.choice.id)
                taken.append((session, result))
        return taken

    def undo(self, frame: Frame) -> None:
        """The frame was not computed: its tokens are to be sent again."""
        for part in frame.work:
            session = self.running.get(part.session)
            if session is not None and frame.sequence > session.void_until:
                session.sent = min(session.sent, part.start)
                session.void_until = self._sequence
        for opening in frame.openings:
            session = self.running.get(opening.session)
            if session is not None and session.sent == 0:
                session.is_opened = False

    def is_void(self, frame: Frame) -> bool:
        """Whether a session of the frame has left or was rolled back since: its rows then leave a gap, for which
        the others in the frame are not to blame."""
        sessions = [self.running.get(part.session) for part in frame.work]
        return any(session is None or frame.sequence <= session.void_until for session in sessions)

    def preempt(self) -> Session | None:
        """Make room: the youngest session gives up its KV and starts again when there is room."""
        if len(self.running) < 2:
            return None
        session = self.running[max(self.running)]
        self.remove(session)
        session.forget()
        session.void_until = self._sequence
        self.waiting.appendleft(session)
        return session

    def used_tokens(self) -> int:
        """KV that the running sessions hold or will need next, in tokens of whole pages."""
        return sum(round_to_pages(len(session.known) + 1) for session in self.running.values())

    def _admit(self, free_tokens: int) -> None:
        while self.waiting and len(self.running) < self.limits.max_sessions:
            needed = round_to_pages(len(self.waiting[0].known) + 1)
            if self.running and needed > free_tokens:
                return
            session = self.waiting.popleft()
            free_tokens -= needed
            self.running[session.id] = session
            self._turns.append(session.id)

    def _in_turn(self) -> list[Session]:
        return [self.running[i] for i in self._turns]

    def _share_of(self, answering: Sequence[Session]) -> list[Session]:
        """With several frames in flight, each takes its share of the sessions so that every stage has one."""
        share = -(-len(self.running) // self.limits.frames_in_flight)
        return list(answering[:share])

    def _is_new(self, session: int) -> bool:
        return not self.running[session].is_opened

    def _open(self, session: Session) -> Opening:
        session.is_opened = True
        return session.opening()

    def _send(self, session: Session, part: Work) -> None:
        session.sent = part.start + len(part.ids)
        self._turns.remove(session.id)
        self._turns.append(session.id)


def round_to_pages(tokens: int) -> int:
    return -(-tokens // PAGE_TOKENS) * PAGE_TOKENS


def _next_work(session: Session, room: int, wanted_room: int) -> Work | None:
    """As many of the session's unsent tokens as fit."""
    ids = session.known[session.sent : session.sent + max(room, 0)]
    if not ids:
        return None
    if session.sent < session.scored:
        # Computed again after a loss: what was scored then is not scored twice.
        return Work(session.id, session.sent, tuple(ids[: session.scored - session.sent]))
    if session.request.prompt_logprobs is not None and session.sent + 1 < session.prompt_length:
        # Every prompt token but the first is scored after the row before it.
        count = min(len(ids), wanted_room, session.prompt_length - 1 - session.sent)
        if count < 1:
            return None
        targets = tuple(session.known[session.sent + 1 : session.sent + 1 + count])
        return Work(session.id, session.sent, tuple(ids[:count]), count, targets)
    if session.request.prompt_logprobs is not None and session.scored < session.prompt_length - 1:
        return None  # the first token is announced together with the scores, so they must be there
    reaches_end = session.sent + len(ids) == len(session.known)
    if reaches_end and wanted_room < 1:
        return None
    return Work(session.id, session.sent, tuple(ids), 1 if reaches_end else 0)
