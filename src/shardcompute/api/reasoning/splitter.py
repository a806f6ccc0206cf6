"""Thinking splitter: tells what a model thinks from what it answers while both arrive.

Thinking stands at the beginning, or not at all: a mark further on belongs to an answer that speaks of marks.
"""

from __future__ import annotations

from typing import Literal

from shardcompute.api.reasoning.marks import ThinkingMarks
from shardcompute.api.tools import AnswerText, CallReader, Event, ReasoningText
from shardcompute.api.tools.events import merged

MAX_GAP = 64
"""Spaces and lines that are taken off the end of a thought: they are held back until it has ended."""


class ThinkingSplitter(CallReader):
    """Thinking first, then an answer, which `calls` reads where tools may be called. `is_open`: the prompt has ended
    with the mark that opens."""

    def __init__(self, marks: ThinkingMarks, *, is_open: bool, calls: CallReader | None = None) -> None:
        super().__init__()
        self._marks, self._calls = marks, calls
        self._state: Literal["start", "thinking", "gap", "answer"] = "thinking" if is_open else "start"
        self._has_thought = False

    @property
    def is_plain(self) -> bool:
        return self._state == "answer" and self._calls is None

    def finish(self, *, is_cut: bool = False) -> list[Event]:
        held, self._held = self._held, ""
        events: list[Event] = []
        if self._state == "thinking":
            self.thought_chars += len(held)
            certain = len(held) - _begun(held, self._marks.close) if is_cut else len(held)
            events.append(self._thought(held[: _without_gap(held, certain)]))
        elif self._state == "start":
            begins_mark = is_cut and held.strip() and self._marks.open.startswith(held.strip())
            events += self._answered("" if begins_mark else held)
        if self._calls is not None:
            events += self._calls.finish(is_cut=is_cut)
            self.is_mid_call = self._calls.is_mid_call
        return merged(events)

    def _advance(self, events: list[Event]) -> bool:
        if self._state == "start":
            return self._find_start()
        if self._state == "thinking":
            return self._follow_thought(events)
        if self._state == "gap":
            held = self._held.lstrip()
            self.thought_chars += len(self._held) - len(held)
            self._held = held
            self._state = "answer" if held else "gap"
            return bool(held)
        events += self._answered(self._held)
        self._held = ""
        return False

    def _find_start(self) -> bool:
        begun = self._held.lstrip()
        gap = len(self._held) - len(begun)
        if gap <= MAX_GAP and begun.startswith(self._marks.open):
            self._count(gap + len(self._marks.open))
            self._state = "thinking"
        elif gap <= MAX_GAP and self._marks.open.startswith(begun):
            return False
        else:
            self._state = "answer"
        return True

    def _follow_thought(self, events: list[Event]) -> bool:
        at = self._held.find(self._marks.close)
        if at >= 0:
            events.append(self._thought(self._held[: _without_gap(self._held, at)]))
            self._count(at + len(self._marks.close))
            self._state = "gap"
            return True
        certain = _without_gap(self._held, len(self._held) - _begun(self._held, self._marks.close))
        events.append(self._thought(self._held[:certain]))
        self._count(certain)
        return False

    def _thought(self, text: str) -> ReasoningText:
        """The line behind the opening mark is not part of a thought."""
        text = text if self._has_thought else text.lstrip()
        self._has_thought = self._has_thought or bool(text)
        return ReasoningText(text)

    def _count(self, chars: int) -> None:
        """So many characters of what is held were thinking."""
        self.thought_chars += chars
        self._held = self._held[chars:]

    def _answered(self, text: str) -> list[Event]:
        return [AnswerText(text)] if self._calls is None else self._calls.push(text)


def _begun(text: str, mark: str) -> int:
    """How much of the end of `text` may be the beginning of a mark."""
    for length in range(min(len(mark) - 1, len(text)), 0, -1):
        if mark.startswith(text[-length:]):
            return length
    return 0


def _without_gap(text: str, end: int) -> int:
    """Where `text[:end]` ends without the spaces and lines at its end."""
    start = max(0, end - MAX_GAP)
    return start + len(text[start:end].rstrip())
