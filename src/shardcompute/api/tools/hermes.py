"""Tool call format of Hermes and Qwen: `<tool_call>`, a JSON object, `</tool_call>`, as often as there are calls.

It is also what models are taught that have no format of their own (see `generic`).
"""

from __future__ import annotations

from collections.abc import Sequence

from shardcompute.api.tools.call_format import (
    CallFormat,
    Marks,
    Tool,
    object_rules,
    quoted,
)
from shardcompute.api.tools.events import AnswerText, CallReader, Event, before_partial, merged, split_before
from shardcompute.api.tools.json_calls import CallObject

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_BETWEEN = " \t\r\n,[]"


class MarkedReader(CallReader):
    """Text, calls between marks, text again. What stands between marks and is no call stays text.

    Several calls may stand between one pair of marks, with or without a list around them, and the closing mark may be
    forgotten.
    """

    def __init__(self, open_mark: str = OPEN, close_mark: str = CLOSE) -> None:
        super().__init__()
        self._open, self._close = open_mark, close_mark
        self._is_inside = False
        self._raw = ""
        """What was read since the mark, as long as no call has come of it."""
        self._call: CallObject | None = None
        self._has_called = False

    def finish(self, *, is_cut: bool = False) -> list[Event]:
        events: list[Event] = []
        if self._call is not None:
            self.is_mid_call = not self._call.has_arguments
            if self._call.name is None and not is_cut:
                events.append(self._said(self._raw + self._call.text))
        elif not self._is_inside:
            events.append(self._said(before_partial(self._held, self._open) if is_cut else self._held))
        elif self._raw and not is_cut:
            events.append(self._said(self._raw + self._held))
        self._held, self._raw, self._call = "", "", None
        return merged(events)

    def _advance(self, events: list[Event]) -> bool:
        if self._call is not None:
            return self._follow_call(self._call, events)
        if self._is_inside:
            return self._find_call(events)
        before, mark, behind = self._held.partition(self._open)
        if mark:
            events.append(self._said(before.rstrip()))
            self._held, self._raw, self._is_inside = behind, mark, True
            return True
        certain = split_before(self._held, self._open)
        events.append(self._said(self._held[:certain]))
        self._held = self._held[certain:]
        return False

    def _said(self, text: str) -> AnswerText:
        """The line between two calls is not meant for anybody."""
        text = text.lstrip() if self._has_called else text
        self._has_called = self._has_called and not text
        return AnswerText(text)

    def _find_call(self, events: list[Event]) -> bool:
        """What comes between the marks: another call, or the end."""
        start = self._held.lstrip(_BETWEEN)
        skipped = self._held[: len(self._held) - len(start)]
        if start.startswith("{"):
            self._raw += skipped if self._raw else ""
            self._held, self._call = start, CallObject()
            return True
        is_closed = start.startswith(self._close)
        if not is_closed and self._close.startswith(start):
            return False
        if self._raw:
            events.append(self._said(self._raw + skipped + (self._close if is_closed else "")))
        self._held = start[len(self._close) :] if is_closed else start
        self._raw, self._is_inside = "", False
        return True

    def _follow_call(self, call: CallObject, events: list[Event]) -> bool:
        events.extend(call.push(self._held))
        self._held = call.rest
        if call.is_broken and call.name is None:
            events.append(self._said(self._raw + call.text))
        if not call.is_whole and not call.is_broken:
            return False
        self._call, self._raw, self._is_inside = None, "", call.is_whole
        self._has_called = call.name is not None
        return True


class HermesFormat(CallFormat):
    marks: tuple[str, ...] = (OPEN, CLOSE)

    def reader(self, tools: Sequence[Tool]) -> MarkedReader:
        return MarkedReader()

    def calls(self, tools: Sequence[Tool], marks: Marks, most: int) -> str:
        return f"{marked_calls(marks, most)}\n{object_rules(tools, 'arguments')}"

    def text_then_calls(self, marks: Marks, most: int) -> str | None:
        return text_then_marked_calls(marks, most)


def marked_calls(marks: Marks, most: int, gap: str = "\n") -> str:
    """Lark rules by which `calls` stands for up to so many times `call` between marks, with a gap on either side."""
    return f"calls: marked {_more(most)}\nmarked: {marks.term(OPEN)} {_with_gaps(gap)} {marks.term(CLOSE)}"


def text_then_marked_calls(marks: Marks, most: int, gap: str = "\n") -> str:
    """Lark rules by which `answer` stands for text, perhaps with such calls behind it."""
    rest = f"{_with_gaps(gap)} {marks.term(CLOSE)} {_more(most)}"
    text = "TEXT: /(.|\\n)*/"
    if marks.is_token(OPEN):
        return f"answer: TEXT | TEXT {marks.term(OPEN)} {rest}\n{text}"
    return f'answer: TEXT | trigger {rest}\ntrigger[lazy]: TEXT "{OPEN}"\n{text}'


def _with_gaps(gap: str) -> str:
    return f"{quoted(gap)} call {quoted(gap)}" if gap else "call"


def _more(most: int) -> str:
    return f'("\\n" marked){{0,{most - 1}}}' if most > 1 else ""
