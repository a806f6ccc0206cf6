"""Incremental JSON parser of tool calls, read while they arrive.

`JsonText` follows one JSON value to its end without building it. `CallObject` reads `{"name": …, "arguments": …}`,
whose keys may come in any order, and passes the text of the arguments on as it comes once the name is known. Models
that repeat how tools are described to them, `{"type": "function", "function": {…}}`, or write the name as `function`,
are understood too.
"""

from __future__ import annotations

import json
from collections.abc import Collection

from shardcompute.api.tools.events import CallArguments, CallStarted, Event

_ARGUMENTS = frozenset({"arguments", "parameters"})
_NAMES = frozenset({"name", "function"})
_KEYS = frozenset({"type", "id"}) | _NAMES | _ARGUMENTS
_SPACE = " \t\r\n"


class JsonText:
    """Where one JSON value ends. What it holds is not judged, only its strings and brackets are followed."""

    def __init__(self) -> None:
        self._depth = 0
        self._is_in_string = False
        self._is_escaped = False
        self._is_started = False
        self.is_whole = False

    def push(self, text: str) -> tuple[str, str]:
        """What of `text` belongs to the value, and what follows it."""
        for index, letter in enumerate(text):
            self.takes(letter)
            if self.is_whole:
                return text[: index + 1], text[index + 1 :]
        return text, ""

    def takes(self, letter: str) -> bool:
        """Whether the next letter belongs to the value; the last one of an object, list or string makes it whole."""
        if self._is_in_string:
            self._follow_string(letter)
            return True
        if letter in "}],:" and self._depth == 0:
            self.is_whole = True  # the end of a number or word shows by what follows it
            return False
        if letter in _SPACE and self._depth == 0 and self._is_started:
            self.is_whole = True
            return False
        self._is_started = True
        if letter == '"':
            self._is_in_string = True
        elif letter in "{[":
            self._depth += 1
        elif letter in "}]":
            self._depth -= 1
            self.is_whole = self._depth == 0
        return True

    def _follow_string(self, letter: str) -> None:
        if self._is_escaped:
            self._is_escaped = False
        elif letter == "\\":
            self._is_escaped = True
        elif letter == '"':
            self._is_in_string = False
            self.is_whole = self._depth == 0


class CallObject:
    """One call. After `push`, `rest` is what follows it once it `is_whole`; `is_broken` says that it is no call."""

    def __init__(self, keys: Collection[str] = _KEYS) -> None:
        self.text = ""
        """All that was read."""
        self.rest = ""
        self.name: str | None = None
        self.is_whole = False
        self.is_broken = False
        self._keys = keys
        self._expects = "{"
        self._value = JsonText()
        self._raw = ""
        self._key = ""
        self._outer = 0
        """Objects around this one."""
        self._waiting = ""
        self.has_arguments = False
        """Whether all of them were read."""

    @property
    def has_begun(self) -> bool:
        """Whether it has a key that calls have."""
        return bool(self._key) and not self.is_broken

    def push(self, text: str) -> list[Event]:
        events: list[Event] = []
        for index, letter in enumerate(text):
            if self.is_whole or self.is_broken:
                self.rest = text[index:]
                break
            self.text += letter
            self._step(letter, events)
        return events

    def _step(self, letter: str, events: list[Event]) -> None:
        if self._expects in ("key text", "value text"):
            self._follow_value(letter, events)
        elif letter in _SPACE:
            return
        elif letter == "}" and self._expects in ("key", "comma"):
            self._end(events)
        elif letter == "{" and self._expects == "value" and self._key == "function":
            self._outer += 1
            self._expects = "key"
        elif (self._expects == "{" and letter == "{") or (self._expects == "comma" and letter == ","):
            self._expects = "key"
        elif self._expects == "colon" and letter == ":":
            self._expects = "value"
        elif self._expects == "key" and letter == '"':
            self._begin("key text", letter, events)
        elif self._expects == "value" and letter not in "}],:":
            self._begin("value text", letter, events)
        else:
            self.is_broken = True

    def _begin(self, expects: str, letter: str, events: list[Event]) -> None:
        self._expects, self._value, self._raw = expects, JsonText(), ""
        self._follow_value(letter, events)

    def _follow_value(self, letter: str, events: list[Event]) -> None:
        is_taken = self._value.takes(letter)
        if is_taken:
            self._raw += letter
            if self._expects == "value text" and self._streams_arguments():
                self._pass_on(letter, events)
        if not self._value.is_whole:
            return
        if self._expects == "key text":
            self._end_key()
        else:
            self._end_value(events)
        if not is_taken and not self.is_broken:
            self._step(letter, events)

    def _streams_arguments(self) -> bool:
        return self._key in _ARGUMENTS and not self.has_arguments and self._raw.startswith("{")

    def _end_key(self) -> None:
        self._key = _text_of(self._raw) or ""
        self._expects = "colon"
        self.is_broken = self._key not in self._keys

    def _end_value(self, events: list[Event]) -> None:
        self._expects = "comma"
        if self._key in _NAMES and self.name is None:
            self.name = _text_of(self._raw)
            if not self.name:
                self.is_broken = True
                return
            events.append(CallStarted(self.name))
            events.append(CallArguments(self._waiting))
        elif self._key in _ARGUMENTS and not self.has_arguments:
            if not self._raw.startswith("{"):
                # Some models write the arguments as a string that holds JSON, or none as null.
                text = _text_of(self._raw) if self._raw.startswith('"') else self._raw
                self._pass_on("{}" if text in (None, "", "null") else text, events)
            self.has_arguments = True

    def _pass_on(self, text: str, events: list[Event]) -> None:
        if self.name is None:
            self._waiting += text
        else:
            events.append(CallArguments(text))

    def _end(self, events: list[Event]) -> None:
        if self._outer:
            self._outer -= 1
            self._expects = "comma"
            return
        if self.name is None:
            self.is_broken = True
            return
        self.is_whole = True
        if not self.has_arguments:
            events.append(CallArguments("{}"))


def _text_of(raw: str) -> str | None:
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, str) else None
