"""The format of Hermes and Qwen: `<tool_call>`, a JSON object, `</tool_call>`, as often as there are calls.

It is also what models are taught that have no format of their own (see `generic`).
"""

from __future__ import annotations

from collections.abc import Sequence

from shardcompute.api.tools.call_format import (
    MOST_CALLS,
    ArgumentsRule,
    Marks,
    Tool,
    object_rules,
    random_letters,
)
from shardcompute.api.tools.events import Event, Said, merged, split_before
from shardcompute.api.tools.json_calls import CallObject

OPEN, CLOSE = "<tool_call>", "</tool_call>"


class HermesReader:
    """Text, calls between marks, text again. What stands between marks and is no call stays text."""

    def __init__(self) -> None:
        self._held = ""
        self._call: CallObject | None = None
        self._is_closing = False
        self._has_called = False

    def push(self, text: str) -> list[Event]:
        self._held += text
        events: list[Event] = []
        while self._advance(events):
            pass
        return merged(events)

    def finish(self) -> list[Event]:
        events: list[Event] = []
        if self._call is not None and self._call.name is None:
            events.append(Said(OPEN + self._call.text))
        elif not self._is_closing:
            events.append(self._said(self._held))
        self._held, self._call = "", None
        return merged(events)

    def _advance(self, events: list[Event]) -> bool:
        """One step; False when more text is needed."""
        if self._call is not None:
            return self._follow_call(self._call, events)
        if self._is_closing:
            return self._skip_close()
        before, mark, behind = self._held.partition(OPEN)
        if mark:
            events.append(self._said(before.rstrip()))
            self._held, self._call = behind, CallObject()
            return True
        certain = split_before(self._held, OPEN)
        events.append(self._said(self._held[:certain]))
        self._held = self._held[certain:]
        return False

    def _said(self, text: str) -> Said:
        """The line between two calls is not meant for anybody."""
        text = text.lstrip() if self._has_called else text
        self._has_called = self._has_called and not text
        return Said(text)

    def _follow_call(self, call: CallObject, events: list[Event]) -> bool:
        events.extend(call.push(self._held))
        self._held = call.rest
        if call.is_broken and call.name is None:
            events.append(self._said(OPEN + call.text))
        if not call.is_whole and not call.is_broken:
            return False
        self._call, self._is_closing = None, call.is_whole
        self._has_called = call.name is not None
        return True

    def _skip_close(self) -> bool:
        """The closing mark; a model that forgets it is forgiven."""
        held = self._held.lstrip()
        if held.startswith(CLOSE):
            self._held, self._is_closing = held[len(CLOSE) :], False
            return True
        if CLOSE.startswith(held):
            return False
        self._is_closing = False
        return True


class HermesFormat:
    marks: tuple[str, ...] = (OPEN, CLOSE)
    has_own_template = True
    most_calls = MOST_CALLS

    def reader(self, names: frozenset[str]) -> HermesReader:
        return HermesReader()

    def calls(self, tools: Sequence[Tool], marks: Marks, most: int, arguments: ArgumentsRule) -> str:
        marked = f'marked: {marks.term(OPEN)} "\\n" call "\\n" {marks.term(CLOSE)}'
        return f"calls: marked {_more(most)}\n{marked}\n{object_rules(tools, 'arguments', arguments)}"

    def words_then_calls(self, marks: Marks, most: int) -> str | None:
        rest = f'"\\n" call "\\n" {marks.term(CLOSE)} {_more(most)}'
        text = "TEXT: /(.|\\n)*/"
        if marks.is_token(OPEN):
            return f"answer: TEXT | TEXT {marks.term(OPEN)} {rest}\n{text}"
        return f'answer: TEXT | trigger {rest}\ntrigger[lazy]: TEXT "{OPEN}"\n{text}'

    def new_id(self) -> str:
        return f"call_{random_letters(24)}"

    def known_id(self, call_id: str) -> str:
        return call_id


def _more(most: int) -> str:
    return f'("\\n" marked){{0,{most - 1}}}' if most > 1 else ""
