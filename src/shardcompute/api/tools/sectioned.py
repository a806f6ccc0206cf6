"""Tool call formats of a section with marked calls in it: a name, a mark, and the arguments as JSON.

DeepSeek V3 and R1 put a kind before the name and a fence around the arguments, V3.1 neither; Kimi K2 numbers its calls.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from shardcompute.api.tools.call_format import CallFormat, Marks, Tool, arguments_rule, quoted
from shardcompute.api.tools.events import (
    AnswerText,
    CallArguments,
    CallReader,
    CallStarted,
    Event,
    before_partial,
    merged,
    split_before,
)
from shardcompute.api.tools.json_calls import JsonText

_HEAD_CHARS = 512
_AFTER = " \t\r\n`"
_NUMBERED = re.compile(r"(?:functions\.)?(.+?)(?::\d+)?")


@dataclass(frozen=True, slots=True)
class SectionMarks:
    section: str
    call: str
    separator: str
    """Between name and arguments or, in DeepSeek V3, between kind and name."""
    end_call: str
    end_section: str

    @property
    def all(self) -> tuple[str, ...]:
        return self.section, self.call, self.separator, self.end_call, self.end_section


class SectionReader(CallReader):
    """Text up to a section, or to a call without one, then calls. What is no call stays text."""

    def __init__(self, marks: SectionMarks, *, is_numbered: bool) -> None:
        super().__init__()
        self._marks, self._is_numbered = marks, is_numbered
        separator = re.escape(marks.separator)
        self._head = re.compile(
            rf"\s*(?:function\s*{separator}\s*)?([^\s<{{`]{{1,160}}?)\s*(?:{separator})?\s*(?:```(?:json)?)?\s*"
        )
        self._is_inside = False
        """Of a section."""
        self._is_in_head = False
        self._arguments: JsonText | None = None
        self._is_after = False
        """Behind arguments, where the call has not ended yet."""

    def finish(self, *, is_cut: bool = False) -> list[Event]:
        held, self._held = self._held, ""
        self.is_mid_call = self._arguments is not None
        text = ""
        if self._is_in_head and not is_cut:
            text = self._marks.call + held
        elif not (self._is_in_head or self._is_inside or self._arguments is not None):
            text = (
                before_partial(before_partial(held, self._marks.section), self._marks.call)
                if is_cut
                else held
            )
        return merged([AnswerText(text)])

    def _advance(self, events: list[Event]) -> bool:
        if self._arguments is not None:
            return self._follow_arguments(self._arguments, events)
        if self._is_in_head:
            return self._read_head(events)
        if self._is_inside:
            return self._find_call(events)
        marks = (self._marks.section, self._marks.call)
        places = {mark: self._held.find(mark) for mark in marks}
        found = min((mark for mark in marks if places[mark] >= 0), key=places.__getitem__, default=None)
        if found is not None:
            events.append(AnswerText(self._held[: places[found]].rstrip()))
            start = places[found] + (len(found) if found == self._marks.section else 0)
            self._held, self._is_inside = self._held[start:], True
            return True
        certain = min(split_before(self._held, mark) for mark in marks)
        events.append(AnswerText(self._held[:certain]))
        self._held = self._held[certain:]
        return False

    def _find_call(self, events: list[Event]) -> bool:
        """Another call, or the end of the section."""
        held = self._held.lstrip(_AFTER)
        after = (self._marks.end_call,) if self._is_after else ()
        for mark in (*after, self._marks.call, self._marks.end_section):
            if held.startswith(mark):
                self._held, self._is_after = held[len(mark) :], False
                self._is_in_head = mark == self._marks.call
                self._is_inside = mark != self._marks.end_section
                return True
            if mark.startswith(held):
                return False
        self._held, self._is_inside, self._is_after = held, False, False
        return True

    def _read_head(self, events: list[Event]) -> bool:
        at = self._held.find("{")
        if 0 <= at <= _HEAD_CHARS and (found := self._head.fullmatch(self._held[:at])):
            name = found[1]
            if self._is_numbered and (known := _NUMBERED.fullmatch(name)):
                name = known[1]
            events.append(CallStarted(name))
            self._held, self._is_in_head, self._arguments = self._held[at:], False, JsonText()
            return True
        if at < 0 and len(self._held) <= _HEAD_CHARS:
            return False
        events.append(AnswerText(self._marks.call))
        self._is_in_head = self._is_inside = False
        return True

    def _follow_arguments(self, value: JsonText, events: list[Event]) -> bool:
        written, self._held = value.push(self._held)
        events.append(CallArguments(written))
        if value.is_whole:
            self._arguments, self._is_after = None, True
        return value.is_whole


class SectionedFormat(CallFormat):
    """`before` and `behind` are what stands around a name, `fence` what stands around the arguments, `between` two
    calls. A format that `is_numbered` has a number behind each name."""

    def __init__(
        self,
        marks: SectionMarks,
        *,
        before: Sequence[str] = (),
        behind: Sequence[str] = (),
        fence: tuple[str, str] = ("", ""),
        between: str = "",
        is_numbered: bool = False,
    ) -> None:
        self.marks: tuple[str, ...] = marks.all
        self._own, self._before, self._behind = marks, before, behind
        self._fence, self._between, self._is_numbered = fence, between, is_numbered

    def reader(self, tools: Sequence[Tool]) -> SectionReader:
        return SectionReader(self._own, is_numbered=self._is_numbered)

    def calls(self, tools: Sequence[Tool], marks: Marks, most: int) -> str:
        own = self._own
        between = f"{quoted(self._between)} " if self._between else ""
        more = f" ({between}call){{0,{most - 1}}}" if most > 1 else ""
        lines = [f"calls: {marks.term(own.section)} call{more} {marks.term(own.end_section)}"]
        lines.append(f"call: {' | '.join(f'call_{index}' for index in range(len(tools)))}")
        opening, closing = self._fence
        for index, tool in enumerate(tools):
            parts = [own.call, *self._before, tool.name, *self._behind, opening]
            head = [marks.term(part) for part in parts if part]
            if self._is_numbered:
                head.insert(1 + len(self._before) + 1, '":" /[0-9]{1,3}/')
            tail = f"{quoted(closing)} " if closing else ""
            end = f"{tail}{marks.term(own.end_call)}"
            lines.append(f"call_{index}: {' '.join(head)} arguments_{index} {end}")
            lines.append(f"arguments_{index}: {arguments_rule(tool)}")
        return "\n".join(lines)

    def text_then_calls(self, marks: Marks, most: int) -> str | None:
        # Only where the mark is a token of its own can free text not run into it.
        return "answer: TEXT calls?\nTEXT: /(.|\\n)*/" if marks.is_token(self._own.section) else None

    def call_id(self, name: str, number: int) -> str | None:
        return f"functions.{name}:{number}" if self._is_numbered else None


_DEEPSEEK = SectionMarks(
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁sep｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁calls▁end｜>",
)
_KIMI = SectionMarks(
    "<|tool_calls_section_begin|>",
    "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
    "<|tool_calls_section_end|>",
)
DEEPSEEK_V3 = SectionedFormat(
    _DEEPSEEK, before=("function", _DEEPSEEK.separator), fence=("\n```json\n", "\n```"), between="\n"
)
DEEPSEEK_V31 = SectionedFormat(_DEEPSEEK, behind=(_DEEPSEEK.separator,))
KIMI = SectionedFormat(_KIMI, before=("functions.",), behind=(_KIMI.separator,), is_numbered=True)
