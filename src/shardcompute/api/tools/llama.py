"""The format of Llama 3: the whole answer is a JSON object `{"name": …, "parameters": …}`, or several.

There is no mark that tells a call from an answer that happens to be JSON, so only an object that begins as a call
of a tool that was offered is one. A model may put `<|python_tag|>` before it, and semicolons between several.
"""

from __future__ import annotations

from collections.abc import Sequence

from shardcompute.api.tools.call_format import ArgumentsRule, Marks, Tool, object_rules, random_letters
from shardcompute.api.tools.events import CallStarted, Event, Said, merged
from shardcompute.api.tools.json_calls import CallObject

TAG = "<|python_tag|>"


class LlamaReader:
    """Calls until something else comes; from there on it is text."""

    def __init__(self, names: frozenset[str]) -> None:
        self._names = names
        self._held = ""
        self._call: CallObject | None = None
        self._waiting: list[Event] = []
        self._is_text = False
        self._has_called = False

    def push(self, text: str) -> list[Event]:
        self._held += text
        events: list[Event] = []
        while self._held and self._advance(events):
            pass
        return merged(events)

    def finish(self) -> list[Event]:
        held = self._held if self._call is None else self._call.text + self._held
        if self._call is not None and self._call.name in self._names:
            held = ""
        self._held, self._call = "", None
        return merged([Said(held.lstrip("; \t\r\n") if self._has_called else held)])

    def _advance(self, events: list[Event]) -> bool:
        if self._is_text:
            events.append(Said(self._held))
            self._held = ""
            return False
        if self._call is not None:
            return self._follow_call(self._call, events)
        start = self._held.lstrip("; \t\r\n" if self._has_called else " \t\r\n")
        if start.startswith(TAG):
            self._held = start[len(TAG) :]
        elif start.startswith("{"):
            self._held, self._call, self._waiting = start, CallObject(), []
        elif TAG.startswith(start):
            return False
        else:
            self._is_text = True
        return True

    def _follow_call(self, call: CallObject, events: list[Event]) -> bool:
        self._waiting += call.push(self._held)
        self._held = call.rest
        if (call.is_broken and call.name is None) or (call.name is not None and call.name not in self._names):
            self._held, self._is_text, self._call = call.text + self._held, True, None
            return True
        if call.name is None:
            return False
        self._has_called = self._has_called or any(isinstance(each, CallStarted) for each in self._waiting)
        events += self._waiting
        self._waiting = []
        if call.is_whole or call.is_broken:
            self._call = None
            return True
        return False


class LlamaFormat:
    marks: tuple[str, ...] = (TAG,)
    has_own_template = True
    most_calls = 1

    def reader(self, names: frozenset[str]) -> LlamaReader:
        return LlamaReader(names)

    def calls(self, tools: Sequence[Tool], marks: Marks, most: int, arguments: ArgumentsRule) -> str:
        return f"calls: call\n{object_rules(tools, 'parameters', arguments)}"

    def words_then_calls(self, marks: Marks, most: int) -> str | None:
        return None

    def new_id(self) -> str:
        return f"call_{random_letters(24)}"

    def known_id(self, call_id: str) -> str:
        return call_id
