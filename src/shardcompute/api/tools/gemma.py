"""Tool call format of FunctionGemma and Gemma 4: `call:weather{city:<escape>Oslo<escape>,days:2}` between marks.

Texts stand between quotes that are tokens, other values are bare. A call is read once it is whole, since its arguments
have to be written anew, as JSON.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from shardcompute.api.tools.call_format import CallFormat, Marks, Tool, quoted
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

_NAME = re.compile(r"\s*call:([^\s{}<>]{1,128})\s*(?={)")
_BARE = re.compile(r"[^,{}\[\]:]*")
_MOST_LEVELS = 32
_PATTERNS = {
    "integer": "/-?[0-9]{1,18}/",
    "number": "/-?[0-9]{1,18}(\\.[0-9]{1,18})?/",
    "boolean": '("true" | "false")',
}
_WORDS, _UNMARKED_WORDS = "/(.|\\n)*/", "/[^<]*/"


class GemmaReader(CallReader):
    """Text, calls between marks, text again. What stands between marks and is no call stays text."""

    def __init__(self, open_mark: str, close_mark: str, quote: str) -> None:
        super().__init__()
        self._open, self._close, self._quote = open_mark, close_mark, quote
        self._is_inside = self._has_called = False

    def finish(self, *, is_cut: bool = False) -> list[Event]:
        held, self._held = self._held, ""
        if self._is_inside:
            return merged([AnswerText("" if is_cut else self._open + held)])
        return merged([self._said(before_partial(held, self._open) if is_cut else held)])

    def _advance(self, events: list[Event]) -> bool:
        if self._is_inside:
            return self._read_call(events)
        at = self._held.find(self._open)
        end = split_before(self._held, self._open) if at < 0 else at
        events.append(self._said(self._held[:end] if at < 0 else self._held[:end].rstrip()))
        self._held = self._held[end + (len(self._open) if at >= 0 else 0) :]
        self._is_inside = at >= 0
        return self._is_inside

    def _said(self, text: str) -> AnswerText:
        """The line between two calls is not meant for anybody."""
        text = text.lstrip() if self._has_called else text
        self._has_called = self._has_called and not text
        return AnswerText(text)

    def _read_call(self, events: list[Event]) -> bool:
        end = _find_outside(self._held, self._close, self._quote)
        if end < 0:
            return False
        body, self._held = self._held[:end], self._held[end + len(self._close) :]
        self._is_inside = False
        found = _NAME.match(body)
        try:
            if found is None:
                raise ValueError("it has no name")
            arguments = BareObject(body[found.end() :].rstrip(), self._quote).read()
        except ValueError:
            events.append(self._said(self._open + body + self._close))
            return True
        self._has_called = True
        events += [CallStarted(found[1]), CallArguments(json.dumps(arguments, ensure_ascii=False))]
        return True


def _find_outside(text: str, mark: str, quote: str) -> int:
    """Where a mark stands that is not between quotes; -1 where none does, or a quote is open."""
    at = 0
    while True:
        found, opened = text.find(mark, at), text.find(quote, at)
        if found < 0 or opened < 0 or found < opened:
            return found
        closed = text.find(quote, opened + len(quote))
        if closed < 0:
            return -1
        at = closed + len(quote)


class BareObject:
    """An object whose names are bare and whose texts stand between quotes. ValueError where it is none."""

    def __init__(self, text: str, quote: str) -> None:
        self._text, self._quote, self._at = text, quote, 0

    def read(self) -> dict[str, Any]:
        value = self._value(0)
        if not isinstance(value, dict) or self._at < len(self._text):
            raise ValueError("it is no object")
        return value

    def _takes(self, token: str) -> bool:
        while self._text[self._at : self._at + 1].isspace():
            self._at += 1
        is_next = self._text.startswith(token, self._at)
        self._at += len(token) if is_next else 0
        return is_next

    def _expect(self, token: str) -> None:
        if not self._takes(token):
            raise ValueError(f"{token} is missing")

    def _value(self, level: int) -> Any:
        if level > _MOST_LEVELS:
            raise ValueError("it is too deep")
        if self._takes("{"):
            members: dict[str, Any] = {}
            while not self._takes("}"):
                name = self._words()
                self._expect(":")
                members[str(name)] = self._value(level + 1)
                if not self._takes(","):
                    self._expect("}")
                    break
            return members
        if self._takes("["):
            items: list[Any] = []
            while not self._takes("]"):
                items.append(self._value(level + 1))
                if not self._takes(","):
                    self._expect("]")
                    break
            return items
        is_text = self._text.startswith(self._quote, self._at)
        words = self._words()
        try:
            return words if is_text else json.loads(words)
        except ValueError:
            return words

    def _words(self) -> str:
        if self._takes(self._quote):
            end = self._text.find(self._quote, self._at)
            if end < 0:
                raise ValueError("a text has no end")
            words, self._at = self._text[self._at : end], end + len(self._quote)
            return words
        found = _BARE.match(self._text, self._at)
        if found is None or not found[0].strip():
            raise ValueError("a value is missing")
        self._at = found.end()
        return found[0].strip()


class GemmaFormat(CallFormat):
    """Names and types of arguments are held to, not whether all of them are there."""

    def __init__(self, open_mark: str, close_mark: str, quote: str) -> None:
        self.marks: tuple[str, ...] = (open_mark, close_mark, quote)

    def reader(self, tools: Sequence[Tool]) -> GemmaReader:
        return GemmaReader(*self.marks)

    def calls(self, tools: Sequence[Tool], marks: Marks, most: int) -> str:
        opening, closing, quote = map(marks.term, self.marks)
        lines = [f"calls: ({opening} call {closing}){{1,{most}}}"]
        lines.append(f"call: {' | '.join(f'call_{index}' for index in range(len(tools)))}")
        for index, tool in enumerate(tools):
            properties: Mapping[str, Any] = tool.parameters.get("properties") or {}
            pairs = [f"{quoted(f'{key}:')} {_value_rule(each, quote)}" for key, each in properties.items()]
            given = f'(given_{index} ("," given_{index}){{0,{len(pairs) - 1}}})?' if pairs else ""
            lines.append(f'call_{index}: {quoted(f"call:{tool.name}{{")} {given} "}}"')
            lines += [f"given_{index}: {' | '.join(pairs)}"] if pairs else []
        words = _WORDS if marks.is_token(self.marks[2]) else _UNMARKED_WORDS
        lines.append(f"quoted_text: {quote} {words} {quote}")
        lines.append(
            'value: quoted_text | NUMBER | "true" | "false" | "null" | "{" members? "}" | "[" items? "]"'
        )
        lines.append('members: NAME ":" value ("," NAME ":" value)*\nitems: value ("," value)*')
        return "\n".join([*lines, f"NUMBER: {_PATTERNS['number']}", "NAME: /[A-Za-z0-9_]+/"])

    def text_then_calls(self, marks: Marks, most: int) -> str | None:
        return "answer: TEXT calls?\nTEXT: /(.|\\n)*/" if marks.is_token(self.marks[0]) else None

    def holds_text(self, tool: Tool) -> bool:
        return not tool.parameters.get("properties")


def _value_rule(schema: Any, quote: str) -> str:
    kind = schema.get("type") if isinstance(schema, Mapping) else None
    choices = schema.get("enum") if isinstance(schema, Mapping) else None
    if choices and all(isinstance(choice, str) for choice in choices):
        return f"{quote} ({' | '.join(quoted(choice) for choice in choices)}) {quote}"
    if kind == "string":
        return "quoted_text"
    return _PATTERNS.get(kind, "value") if isinstance(kind, str) else "value"


FUNCTION_GEMMA = GemmaFormat("<start_function_call>", "<end_function_call>", "<escape>")
GEMMA_4 = GemmaFormat("<|tool_call>", "<tool_call|>", '<|"|>')
