"""Trials under load: whether all sessions together get more tokens with drafts than without, as measured.

What drafts promise (`gains`) rests on estimates, and on every stage having a machine of its own. Where stages share
cores, or a driver has none to spare, the rows of one session cost the others more than anybody can see from times of
stages. So where several sessions answer, their tokens are counted in windows of time: first some with drafts and some
without, in turn, then with what was faster; the other is tried again now and then, less and less often.

Loads are told apart by powers of two of sessions. Deterministic: whoever tells has the clock.
"""

from __future__ import annotations

from dataclasses import dataclass, field

_LEAST_WINDOW_S = 1.0
_RINGS_IN_WINDOW = 10.0
_LEAST_TOKENS = 24
"""A window lasts until there are so many, at least."""
_SETTLING_RINGS = 2.0
"""What was under way before a change comes back meanwhile; it counts for neither."""
_FIRST_WINDOWS = 3
"""So many of each are compared at first."""
_MEMORY = 6.0
_FIRST_WAIT, _LONGEST_WAIT = 12, 96
"""In windows, until what was slower is tried again; twice as long after each time."""
_IDLE_S = 2.0


@dataclass(slots=True)
class _TrialArm:
    """Tokens per second, with drafts or without, over about the last `_MEMORY` windows."""

    rate: float = 0.0
    windows: int = 0

    def add(self, rate: float) -> None:
        self.windows += 1
        self.rate += (rate - self.rate) / min(float(self.windows), _MEMORY)


@dataclass(slots=True)
class _Crowd:
    """What is known of loads of about so many sessions."""

    with_drafts: _TrialArm = field(default_factory=_TrialArm)
    plain: _TrialArm = field(default_factory=_TrialArm)
    drafts: bool = True
    """What is done now."""
    wait: int = _FIRST_WAIT
    passed: int = 0

    @property
    def is_compared(self) -> bool:
        return min(self.with_drafts.windows, self.plain.windows) >= _FIRST_WINDOWS

    @property
    def drafts_pay(self) -> bool:
        return not self.is_compared or self.with_drafts.rate >= self.plain.rate

    def go_on(self) -> None:
        """A window is over: what to do in the next one."""
        if not self.is_compared:
            self.drafts = self.with_drafts.windows <= self.plain.windows
            return
        self.passed += 1
        if self.drafts != self.drafts_pay:
            # It was a try, or what was slower is faster by now.
            self.drafts, self.passed = self.drafts_pay, 0
        elif self.passed >= self.wait:
            self.drafts, self.passed = not self.drafts, 0
            self.wait = min(2 * self.wait, _LONGEST_WAIT)


@dataclass(slots=True)
class _TrialWindow:
    crowd: int
    begins_s: float
    tokens: int = 0
    has_drafts: bool = False


class LoadTrials:
    """Of one chain."""

    def __init__(self) -> None:
        self._crowds: dict[int, _Crowd] = {}
        self._window: _TrialWindow | None = None
        self._told_s = 0.0

    def drafts(self, sessions: int) -> bool:
        """Whether sessions may draft while so many answer."""
        known = self._crowds.get(_crowd_of(sessions))
        return known is None or known.drafts

    def drafted(self) -> None:
        """A draft is sent."""
        if self._window is not None:
            self._window.has_drafts = True

    def came(self, tokens: int, sessions: int, ring_s: float, now_s: float) -> None:
        """So many tokens came for the `sessions` that answer; `ring_s` is what a traversal takes."""
        crowd = _crowd_of(sessions)
        window, idle_s, self._told_s = self._window, now_s - self._told_s, now_s
        if sessions < 2:
            self._window = None
        elif window is None or window.crowd != crowd or idle_s > _IDLE_S:
            # What the sessions before had under way counts for nobody.
            self._window = _TrialWindow(crowd, now_s + _SETTLING_RINGS * ring_s)
        elif now_s >= window.begins_s:
            window.tokens += tokens
            lasted_s = now_s - window.begins_s
            if window.tokens >= _LEAST_TOKENS and lasted_s >= max(_LEAST_WINDOW_S, _RINGS_IN_WINDOW * ring_s):
                self._close(window, window.tokens / lasted_s, ring_s, now_s)

    def _close(self, window: _TrialWindow, rate: float, ring_s: float, now_s: float) -> None:
        known = self._crowds.setdefault(window.crowd, _Crowd())
        did_draft = known.drafts
        # Where nobody had anything to draft, it was as without.
        (known.with_drafts if window.has_drafts else known.plain).add(rate)
        known.go_on()
        settling_s = _SETTLING_RINGS * ring_s if known.drafts != did_draft else 0.0
        self._window = _TrialWindow(window.crowd, now_s + settling_s)


def _crowd_of(sessions: int) -> int:
    return sessions.bit_length()
