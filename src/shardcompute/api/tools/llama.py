"""Tool call format of Llama 3: the answer is a JSON object `{"name": …, "parameters": …}`, or several.

There is no mark that tells a call from an answer that happens to be JSON, so only an object that begins as a call
of a tool that was offered is one. A model may put words or `<|python_tag|>` before it, semicolons between several, or
a list around them.
"""

from __future__ import annotations

from collections.abc import Sequence

from shardcompute.api.tools.call_format import (
    CallFormat,
    Marks,
    Tool,
    object_rules,
)
from shardcompute.api.tools.events import (
    AnswerText,
    CallReader,
    CallStarted,
    Event,
    before_partial,
    merged,
    split_before,
)
from shardcompute.api.tools.json_calls import CallObject, JsonText

TAG = "<|python_tag|>"
_BETWEEN = " \t\r\n;,[]"


class LlamaReader(CallReader):
    """Text and calls as they come. An object that is no call is text as a whole, whatever it holds."""

    def __init__(self, names: frozenset[str]) -> None:
        super().__init__()
        self._names = names
        self._before = ""
        """Text in front of what may be a call."""
        self._call: CallObject | None = None
        self._waiting: list[Event] = []
        self._other: JsonText | None = None
        self._has_called = False
        self._is_fresh = True
        """Nothing was said yet, or since the last call."""

    def finish(self, *, is_cut: bool = False) -> list[Event]:
        held = before_partial(self._held, TAG) if is_cut else self._held
        if self._call is not None:
            self.is_mid_call = self._is_known(self._call) and not self._call.has_arguments
            begun = "" if is_cut and self._call.has_begun else self._call.text
            held = "" if self._is_known(self._call) else self._before + begun
        if self._is_fresh and self._has_called:
            held = held.strip(_BETWEEN)
        self._held, self._call = "", None
        return merged([AnswerText(held)])

    def _advance(self, events: list[Event]) -> bool:
        if self._call is not None:
            return self._follow_call(self._call, events)
        if self._other is not None:
            return self._follow_other(self._other, events)
        start = min(
            found for found in (self._held.find("{"), self._held.find(TAG), len(self._held)) if found >= 0
        )
        before, found = self._held[:start], self._held[start:]
        if found.startswith(TAG):
            self._say(before.rstrip(), events)
            self._held = found[len(TAG) :]
            return True
        if found:
            self._held, self._before, self._call, self._waiting = found, before, CallObject(), []
            return True
        certain = 0 if self._is_fresh and not before.strip(_BETWEEN) else split_before(before, TAG)
        self._say(before[:certain], events)
        self._held = before[certain:]
        return False

    def _say(self, text: str, events: list[Event]) -> None:
        if self._is_fresh and self._has_called:
            text = text.lstrip(_BETWEEN)
        self._is_fresh = self._is_fresh and not text
        events.append(AnswerText(text))

    def _is_known(self, call: CallObject) -> bool:
        return call.name is not None and call.name in self._names

    def _follow_call(self, call: CallObject, events: list[Event]) -> bool:
        self._waiting += call.push(self._held)
        self._held = call.rest
        if call.name is None and not call.is_broken:
            return False
        if not self._is_known(call):
            self._say(self._before, events)
            self._held, self._call, self._other = call.text + self._held, None, JsonText()
            return True
        if any(isinstance(event, CallStarted) for event in self._waiting):
            is_empty = self._is_fresh and not self._before.strip(_BETWEEN)
            self._say("" if is_empty else self._before.rstrip(), events)
            self._has_called = self._is_fresh = True
        events += self._waiting
        self._waiting = []
        if call.is_whole or call.is_broken:
            self._call = None
            return True
        return False

    def _follow_other(self, value: JsonText, events: list[Event]) -> bool:
        said, self._held = value.push(self._held)
        self._say(said, events)
        self._other = None if value.is_whole else value
        return value.is_whole


class LlamaFormat(CallFormat):
    marks: tuple[str, ...] = (TAG,)
    most_calls = 1

    def reader(self, tools: Sequence[Tool]) -> LlamaReader:
        return LlamaReader(frozenset(tool.name for tool in tools))

    def calls(self, tools: Sequence[Tool], marks: Marks, most: int) -> str:
        return f"calls: call\n{object_rules(tools, 'parameters')}"

    def text_then_calls(self, marks: Marks, most: int) -> str | None:
        return None
