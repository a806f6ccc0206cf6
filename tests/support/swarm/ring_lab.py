"""A ring of stages in simulated time: what the router's choices come to, without sockets, models or clocks.

Sessions answer for ever. How hard each position of an answer is to guess is drawn once from a seeded generator, so
that policies are compared on the same text.
Frames queue in front of each stage, which computes `stage_fixed_s + stage_row_s · rows`, and spend `wire_s` (and
`wire_row_s` per row) on the whole way round. The driver in here does what the real one does: batches what is ready,
keeps several frames of a session under way, voids those that were built on a draft that failed.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from shardcompute.core.generation import Speculation
from shardcompute.decoding.routing.router import DraftPlan, PipeLoad, Router


@dataclass(frozen=True)
class Ring:
    wire_s: float
    stages: int = 2
    stage_fixed_s: float = 0.004
    stage_row_s: float = 0.0005
    wire_row_s: float = 0.0
    has_one_core: bool = False
    """All stages compute on one, which nobody knows."""

    def stage_s(self, rows: int) -> float:
        return self.stage_fixed_s + self.stage_row_s * rows


@dataclass(frozen=True)
class DrafterModel:
    """A drafter that has something to offer in `coverage` of all cases, of a grade and true acceptance each."""

    name: str = "ngram"
    acceptance: float = 0.6
    coverage: float = 1.0
    draft_s: float = 0.0
    grades: tuple[tuple[float, int, float], ...] = ()
    """(share, grade, acceptance); empty: all of grade 1."""

    def draw(self, chance: random.Random) -> tuple[int, float] | None:
        if chance.random() >= self.coverage:
            return None
        point = chance.random()
        for share, grade, acceptance in self.grades:
            point -= share
            if point < 0:
                return grade, acceptance
        return 1, self.acceptance


@dataclass
class _Part:
    session: int
    era: int
    start: int
    held: list[bool]
    """Of each drafted token, whether it will hold."""
    drafter: str
    grade: int
    has_known_row: bool

    @property
    def rows(self) -> int:
        return len(self.held) + self.has_known_row


@dataclass
class _Answering:
    id: int
    chance: random.Random
    text: random.Random
    hardness: list[float] = field(default_factory=list)
    committed: int = 0
    era: int = 0
    under_way: list[_Part] = field(default_factory=list)
    busy_until: float = 0.0
    round: DraftPlan = DraftPlan(None, 0, 1, "not asked yet")  # noqa: RUF009

    def hardness_at(self, position: int) -> float:
        while len(self.hardness) <= position:
            self.hardness.append(self.text.random())
        return self.hardness[position]


@dataclass
class Outcome:
    seconds: float
    tokens: int
    drafted: int
    frames: int
    router: Router

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


class RingLab:
    """Runs `sessions` until `seconds` of simulated time have passed."""

    def __init__(
        self, ring: Ring, drafter: DrafterModel, wish: Speculation, *, sessions: int = 1, seed: int = 1
    ) -> None:
        self.ring, self.drafter, self.wish = ring, drafter, wish
        self.router = Router()
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._count = itertools.count()
        self._sessions = [
            _Answering(i, random.Random(seed * 1000 + i), random.Random(seed * 2000 + i))
            for i in range(sessions)
        ]
        self._turns = list(self._sessions)
        self._stage_free = [0.0] * ring.stages
        self._in_flight = 0
        self._drafted = self._frames = 0
        self._drafter_free = 0.0
        self.router.traversed(
            64, ring.wire_s + ring.stages * ring.stage_s(64), [ring.stage_s(64)] * ring.stages
        )

    def run(self, seconds: float) -> Outcome:
        self._fill()
        while self._events and self._events[0][0] <= seconds:
            self.now, _, event = heapq.heappop(self._events)
            event()
        return Outcome(seconds, self._committed(), self._drafted, self._frames, self.router)

    def _at(self, when: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (when, next(self._count), event))

    def _load(self) -> PipeLoad:
        return PipeLoad(len(self._sessions), self._in_flight, self.ring.stages)

    def _fill(self) -> None:
        depth = self.router.pipe_depth(self.ring.stages)
        share = max(1, -(-len(self._sessions) // depth))
        while True:
            parts: list[_Part] = []
            for session in list(self._turns):
                if len(parts) >= share or session.busy_until > self.now:
                    continue
                if not session.under_way and self._in_flight >= max(depth, 1) and len(self._sessions) > 1:
                    continue
                part = self._next_part(session)
                if part is not None:
                    parts.append(part)
                    session.under_way.append(part)
                    self._turns.remove(session)
                    self._turns.append(session)
            if not parts:
                return
            self._send(parts)

    def _next_part(self, session: _Answering) -> _Part | None:
        if not session.under_way:
            session.round = self.router.choose(session.id, self.wish, [self.drafter.name], self._load())
        chosen = session.round
        if len(session.under_way) >= chosen.frames:
            return None
        plain = (
            None if session.under_way else _Part(session.id, session.era, session.committed, [], "", 0, True)
        )
        if chosen.drafter is None:
            return plain
        drawn = self.drafter.draw(session.chance)
        if drawn is None:
            self.router.missed(session.id, chosen.drafter)
            return plain
        grade, acceptance = drawn
        took = self.drafter.draft_s * chosen.tokens
        self.router.drafted(session.id, chosen.drafter, took, chosen.tokens)
        count = self.router.worth(session.id, chosen.drafter, grade, chosen.tokens, self._load())
        if took > 0:
            self._drafter_free = max(self._drafter_free, self.now) + took
            session.busy_until = self._drafter_free
            self._at(self._drafter_free, self._fill)
        if count == 0:
            return plain
        lives = all(all(part.held) for part in session.under_way)
        last = session.under_way[-1] if session.under_way else None
        start = session.committed if last is None else last.start + len(last.held)
        held = []
        for position in range(start, start + count):
            lives = lives and session.hardness_at(position) < acceptance
            held.append(lives)
        return _Part(session.id, session.era, start, held, chosen.drafter, grade, last is None)

    def _send(self, parts: Sequence[_Part]) -> None:
        ring, rows = self.ring, sum(part.rows for part in parts)
        self._in_flight += 1
        self._frames += 1
        self._drafted += sum(len(part.held) for part in parts)
        sent = max([self.now, *(self._sessions[part.session].busy_until for part in parts)])
        hop = (ring.wire_s + ring.wire_row_s * rows) / (ring.stages + 1)

        def arrive(stage: int) -> None:
            if stage == ring.stages:
                self._take(parts, rows, self.now - sent)
                return
            core = 0 if ring.has_one_core else stage
            done = max(self.now, self._stage_free[core]) + ring.stage_s(rows)
            self._stage_free[core] = done
            self._at(done + hop, lambda: arrive(stage + 1))

        self._at(sent + hop, lambda: arrive(0))

    def _take(self, parts: Sequence[_Part], rows: int, seconds: float) -> None:
        self._in_flight -= 1
        self.router.traversed(rows, seconds, [self.ring.stage_s(rows)] * self.ring.stages)
        before = self._committed()
        for part in parts:
            session = self._sessions[part.session]
            if part.era == session.era:
                self._commit(session, part)
        self.router.came(self._committed() - before, len(self._sessions), self.now)
        self._fill()

    def _committed(self) -> int:
        return sum(session.committed for session in self._sessions)

    def _commit(self, session: _Answering, part: _Part) -> None:
        session.under_way.remove(part)
        # The first token of a frame that assumes others was judged with the frame before it.
        accepted = sum(part.held)
        session.committed += accepted - (0 if part.has_known_row else 1)
        if part.held:
            self.router.verified(session.id, part.drafter, part.grade, len(part.held), accepted)
        follower = session.under_way[0] if session.under_way else None
        session.committed += 1
        if accepted < len(part.held) or follower is None or not follower.held[0]:
            if accepted == len(part.held) and follower is not None:
                self.router.verified(session.id, follower.drafter, follower.grade, len(follower.held), 0)
            session.under_way.clear()
            session.era += 1
