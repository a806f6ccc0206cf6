"""Tool call formats of Mistral: `[TOOL_CALLS]` and a list of JSON objects or, in later models, `name[ARGS]{…}`.

Names of calls are nine letters or digits, because the models' templates insist on it.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence

from shardcompute.api.tools.call_format import (
    CallFormat,
    Marks,
    Tool,
    arguments_rule,
    listed_rules,
    quoted,
    random_letters,
)
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
from shardcompute.api.tools.json_calls import CallObject, JsonText

OPEN, ARGS, CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
_NAME = re.compile(r"\s*([^\s\[{]+)(?:\[CALL_ID\][^\[{]*)?(?:\[ARGS\])?\s*(?=\{)")
_NAME_CHARS = 512
_BETWEEN = ", \t\r\n]"
_ID = re.compile(r"[A-Za-z0-9]{9}")


class MistralReader(CallReader):
    """Text up to the mark, then calls in either form. What follows a mark and is no call stays text."""

    def __init__(self) -> None:
        super().__init__()
        self._is_text = True
        self._is_list = False
        self._has_called = False
        """Since the mark."""
        self._call: CallObject | None = None
        self._arguments: JsonText | None = None

    def finish(self, *, is_cut: bool = False) -> list[Event]:
        events: list[Event] = []
        self.is_mid_call = self._arguments is not None
        if self._call is not None:
            self.is_mid_call = not self._call.has_arguments
        if self._is_text:
            events.append(AnswerText(before_partial(self._held, OPEN) if is_cut else self._held))
        elif is_cut:
            pass
        elif self._call is not None and self._call.name is None:
            events.append(AnswerText(self._call.text))
        elif self._call is None and self._arguments is None and self._held.strip(_BETWEEN):
            events.append(AnswerText(self._held if self._has_called else OPEN + self._held))
        self._held = ""
        return merged(events)

    def _advance(self, events: list[Event]) -> bool:
        if self._is_text:
            return self._find_mark(events)
        if self._call is not None:
            return self._follow_call(self._call, events)
        if self._arguments is not None:
            return self._follow_arguments(self._arguments, events)
        held = self._held.lstrip(_BETWEEN)
        if held.startswith(OPEN):
            self._held, self._is_list, self._has_called = held[len(OPEN) :], False, False
        elif held.startswith("{"):
            self._held, self._call = held, CallObject()
        elif held.startswith("[") and not self._is_list and not OPEN.startswith(held[:2]):
            self._held, self._is_list = held[1:], True
        elif not self._is_list and (found := _NAME.match(held)):
            events.append(CallStarted(found[1]))
            self._held, self._arguments, self._has_called = held[found.end() :], JsonText(), True
        elif held and (self._is_list or len(held) > _NAME_CHARS) and not OPEN.startswith(held):
            events.append(AnswerText("" if self._has_called else OPEN))
            self._held = held if self._has_called else self._held
            self._is_text = True
        else:
            return False
        return True

    def _find_mark(self, events: list[Event]) -> bool:
        before, mark, behind = self._held.partition(OPEN)
        if mark:
            events.append(AnswerText(before.rstrip()))
            self._held, self._is_text, self._is_list, self._has_called = behind, False, False, False
            return True
        certain = split_before(self._held, OPEN)
        events.append(AnswerText(self._held[:certain]))
        self._held = self._held[certain:]
        return False

    def _follow_call(self, call: CallObject, events: list[Event]) -> bool:
        events += call.push(self._held)
        self._held = call.rest
        if call.is_broken and call.name is None:
            events.append(AnswerText(call.text))
        self._has_called = self._has_called or call.name is not None
        if call.is_whole or call.is_broken:
            self._call = None
            return True
        return False

    def _follow_arguments(self, value: JsonText, events: list[Event]) -> bool:
        written, self._held = value.push(self._held)
        events.append(CallArguments(written))
        self._arguments = None if value.is_whole else value
        return value.is_whole


class MistralFormat(CallFormat):
    """`has_args_mark` tells the later form from the earlier one."""

    marks: tuple[str, ...] = (OPEN, ARGS, CALL_ID)

    def __init__(self, *, has_args_mark: bool = False) -> None:
        self._has_args_mark = has_args_mark

    def reader(self, tools: Sequence[Tool]) -> MistralReader:
        return MistralReader()

    def calls(self, tools: Sequence[Tool], marks: Marks, most: int) -> str:
        if not self._has_args_mark:
            return listed_rules(marks.term(OPEN), tools, most)
        lines = [f"calls: ({marks.term(OPEN)} call){{1,{most}}}"]
        lines.append(f"call: {' | '.join(f'call_{index}' for index in range(len(tools)))}")
        for index, tool in enumerate(tools):
            lines.append(f"call_{index}: {quoted(tool.name)} {marks.term(ARGS)} arguments_{index}")
            lines.append(f"arguments_{index}: {arguments_rule(tool)}")
        return "\n".join(lines)

    def text_then_calls(self, marks: Marks, most: int) -> str | None:
        # Only where the mark is a token of its own can free text not run into it.
        return "answer: TEXT calls?\nTEXT: /(.|\\n)*/" if marks.is_token(OPEN) else None

    def new_id(self) -> str:
        return random_letters(9)

    def known_id(self, call_id: str) -> str:
        return call_id if _ID.fullmatch(call_id) else hashlib.sha256(call_id.encode()).hexdigest()[:9]
