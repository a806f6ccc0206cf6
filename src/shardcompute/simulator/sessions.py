"""Sessions of a simulation, and the ledger of their tokens: each position is delivered once, in order, or it is noted
that it was not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(slots=True, eq=False)
class SimulatedSession:
    """One request and its answer. Rows are computed for known tokens; the last row of them brings the next token."""

    id: int
    prompt: int
    wanted: int
    """Tokens of the answer."""
    asked_s: float
    patience_s: float
    on_end: Callable[[], None]
    generated: int = 0
    sent: int = 0
    """Rows that are computed or on their way."""
    computed: int = 0
    first_s: float | None = None
    progress_s: float = 0.0
    """When it was asked, or got its newest token."""
    longest_gap_s: float = 0.0
    is_over: bool = False
    interrupted_s: float | None = None
    """Since when it waits for its chain to be repaired."""

    @property
    def unsent(self) -> int:
        return self.prompt + self.generated - self.sent

    def roll_back(self, computed: int | None = None) -> None:
        """What was on its way is lost; where a number is given, so is what was computed beyond it."""
        self.computed = self.computed if computed is None else min(computed, self.computed)
        self.sent = self.computed


@dataclass(slots=True)
class Ledger:
    """What clients got. Figures count from `since_s` on, but for what must never happen."""

    since_s: float = 0.0
    tokens: int = 0
    lost: int = 0
    """Tokens that never came, although later ones did."""
    doubled: int = 0
    asked: int = 0
    finished: int = 0
    abandoned: int = 0
    first_asked_s: float | None = None
    last_token_s: float = 0.0
    first_s: list[float] = field(default_factory=list)
    gap_s: list[float] = field(default_factory=list)
    """The mean time between two tokens, of each answer."""
    longest_gap_s: list[float] = field(default_factory=list)
    recovery_s: list[float] = field(default_factory=list)
    """From the last token before an interruption to the first one after it."""

    def ask(self, session: SimulatedSession) -> None:
        if session.asked_s >= self.since_s:
            self.asked += 1
        if self.first_asked_s is None:
            self.first_asked_s = session.asked_s

    def deliver(self, session: SimulatedSession, position: int, count: int, now_s: float) -> int:
        """Tokens `[position, position + count)` came; how many of them are new."""
        expected = session.generated
        self.lost += max(0, position - expected)
        self.doubled += min(count, max(0, expected - position))
        new = max(0, position + count - expected)
        if not new:
            return 0
        gap_s = now_s - session.progress_s
        if session.first_s is None:
            session.first_s = now_s
            if session.asked_s >= self.since_s:
                self.first_s.append(now_s - session.asked_s)
        else:
            session.longest_gap_s = max(session.longest_gap_s, gap_s / new)
        if session.interrupted_s is not None and expected and now_s >= self.since_s:
            self.recovery_s.append(gap_s)
        session.interrupted_s = None
        session.generated += new
        session.progress_s = self.last_token_s = now_s
        if now_s >= self.since_s:
            self.tokens += new
        return new

    def finish(self, session: SimulatedSession, now_s: float) -> None:
        session.is_over = True
        if session.asked_s < self.since_s or session.first_s is None:
            return
        self.finished += 1
        if session.generated > 1:
            self.gap_s.append((now_s - session.first_s) / (session.generated - 1))
            self.longest_gap_s.append(session.longest_gap_s)

    def abandon(self, session: SimulatedSession) -> None:
        session.is_over = True
        self.abandoned += session.asked_s >= self.since_s
