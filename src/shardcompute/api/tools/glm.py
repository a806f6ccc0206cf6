"""Tool call format of GLM-4.5 and later, not JSON: `<tool_call>`, the name, and each argument as

    <arg_key>city</arg_key>
    <arg_value>Oslo</arg_value>

then `</tool_call>`. Texts are written as they are, other values as JSON. Later models leave the lines out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from shardcompute.api.tools.call_format import Marks, Tool
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
from shardcompute.api.tools.hermes import CLOSE, OPEN, marked_calls, text_then_marked_calls
from shardcompute.api.tools.qwen_coder import QwenCoderFormat, Wording, in_json, parameter_schema

KEY, END_KEY = "<arg_key>", "</arg_key>"
VALUE, END_VALUE = "<arg_value>", "</arg_value>"
_NAME = re.compile(r"\s*([^\s<>{}]{1,128})\s*(?=<arg_key>|</tool_call>)")
_MOST_NAME_CHARS = 256
_ARGUMENT = re.compile(r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL)


class GlmReader(CallReader):
    """Text, calls, text again. What stands behind a mark and is no call stays text."""

    def __init__(self, tools: Sequence[Tool]) -> None:
        super().__init__()
        self._schemas = {tool.name: tool.parameters for tool in tools}
        self._is_marked = False
        """Behind the mark, where a name is to come."""
        self._name: str | None = None
        self._given = 0
        self._has_called = False

    def finish(self, *, is_cut: bool = False) -> list[Event]:
        held, self._held = self._held, ""
        self.is_mid_call = self._name is not None
        events: list[Event] = []
        if self._is_marked and not is_cut:
            self._say(OPEN + held, events)
        elif self._name is None and not self._is_marked:
            self._say(before_partial(held, OPEN) if is_cut else held, events)
        return merged(events)

    def _advance(self, events: list[Event]) -> bool:
        if self._name is not None:
            return self._follow_call(self._name, events)
        if self._is_marked:
            return self._read_name(events)
        before, mark, behind = self._held.partition(OPEN)
        if mark:
            self._say(before.rstrip(), events)
            self._held, self._is_marked = behind, True
            return True
        certain = split_before(self._held, OPEN)
        self._say(self._held[:certain], events)
        self._held = self._held[certain:]
        return False

    def _say(self, text: str, events: list[Event]) -> None:
        """The line between two calls is not meant for anybody."""
        text = text.lstrip() if self._has_called else text
        self._has_called = self._has_called and not text
        events.append(AnswerText(text))

    def _read_name(self, events: list[Event]) -> bool:
        if found := _NAME.match(self._held):
            events.append(CallStarted(found[1]))
            self._held, self._name, self._given = self._held[found.end() :], found[1], 0
            self._is_marked, self._has_called = False, True
            return True
        at = self._held.find("<")
        head = self._held if at < 0 else self._held[:at]
        rest = "" if at < 0 else self._held[at:]
        may_go_on = any(mark.startswith(rest) for mark in (KEY, CLOSE))
        if may_go_on and len(head.split()) <= 1 and len(head) <= _MOST_NAME_CHARS and "{" not in head:
            return False
        self._is_marked = False
        self._say(OPEN, events)
        return True

    def _follow_call(self, name: str, events: list[Event]) -> bool:
        self._held = self._held.lstrip()
        if self._held.startswith(KEY):
            found = _ARGUMENT.match(self._held)
            if found is None:
                return False
            schema = parameter_schema(self._schemas.get(name, {}), found[1])
            written = f"{json.dumps(found[1], ensure_ascii=False)}: {in_json(found[2], schema)}"
            events.append(CallArguments((", " if self._given else "{") + written))
            self._held, self._given = self._held[found.end() :], self._given + 1
            return True
        if self._held.startswith(CLOSE):
            events.append(CallArguments("}" if self._given else "{}"))
            self._held, self._name = self._held[len(CLOSE) :], None
            return True
        if any(mark.startswith(self._held) for mark in (KEY, CLOSE)):
            return False
        # Something else between the arguments: nobody could say what it is.
        self._held = self._held[1:]
        return True


class GlmFormat(QwenCoderFormat):
    """`has_lines`: the model was taught to write each part on a line of its own."""

    def __init__(self, *, has_lines: bool = True) -> None:
        line = "\n" if has_lines else ""
        self._line = line
        self.wording = Wording(
            call=f"%s{line}",
            end_call="",
            parameter=f"{KEY}%s{END_KEY}{line}{VALUE}",
            end_parameter=f"{END_VALUE}{line}",
            named=f'"{KEY}" /[^<>\\n]+/ {json.dumps(f"{END_KEY}{line}{VALUE}")}',
        )

    def reader(self, tools: Sequence[Tool]) -> CallReader:
        return GlmReader(tools)

    def _marked(self, marks: Marks, most: int) -> str:
        return marked_calls(marks, most, gap="")

    def text_then_calls(self, marks: Marks, most: int) -> str | None:
        return text_then_marked_calls(marks, most, gap="")
