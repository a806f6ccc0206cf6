"""Tool call format of gpt-oss, called harmony: an answer is messages on channels, each with a header.

    <|channel|>analysis<|message|>thinking<|end|><|start|>assistant<|channel|>final<|message|>answer
    <|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "Oslo"}

The prompt ends with `<|start|>assistant`; the last message ends with a token that ends the answer. What is on the
channel `analysis` is thinking, and so one reader tells thinking, text and calls apart.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal

from shardcompute.api.tools.call_format import CallFormat, Marks, Tool, arguments_rule, quoted
from shardcompute.api.tools.events import (
    AnswerText,
    CallArguments,
    CallReader,
    CallStarted,
    Event,
    ReasoningText,
    merged,
)
from shardcompute.api.tools.json_calls import JsonText

START, CHANNEL, MESSAGE, END, CONSTRAIN = (
    "<|start|>",
    "<|channel|>",
    "<|message|>",
    "<|end|>",
    "<|constrain|>",
)
_ENDS = (END, START, CHANNEL, "<|call|>", "<|return|>")
_HEADS = (CHANNEL, START, MESSAGE, CONSTRAIN, "to=", "assistant")
_HEADER_CHARS = 512
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=functions\.([^\s<]+)")


def is_harmony(template: str | None) -> bool:
    """Whether a model with this chat template writes its answers in channels."""
    return template is not None and CHANNEL in template and MESSAGE in template


class HarmonyReader(CallReader):
    """Text without a header is for the user. Without `has_tools` a call is text, too."""

    def __init__(self, *, has_tools: bool) -> None:
        super().__init__()
        self._has_tools = has_tools
        self._state: Literal["header", "text", "thought", "call", "called"] = "header"
        self._arguments = JsonText()

    def finish(self, *, is_cut: bool = False) -> list[Event]:
        held, self._held = self._held, ""
        self.is_mid_call = self._state == "call"
        if is_cut:
            held = held[: _certain(held)]
        if self._state == "thought":
            self.thought_chars += len(held)
            return merged([ReasoningText(held)])
        return merged([AnswerText(held if self._state == "text" else "")])

    def _advance(self, events: list[Event]) -> bool:
        if self._state == "header":
            return self._read_header(events)
        if self._state == "call":
            written, self._held = self._arguments.push(self._held)
            events.append(CallArguments(written))
            self._state = "called" if self._arguments.is_whole else "call"
            return self._arguments.is_whole
        places = {mark: at for mark in _ENDS if (at := self._held.find(mark)) >= 0}
        if not places:
            certain = _certain(self._held)
            self._pass_on(self._held[:certain], events)
            self._held = self._held[certain:]
            return False
        mark = min(places, key=places.__getitem__)
        is_over = mark not in (START, CHANNEL)
        self._pass_on(self._held[: places[mark]], events)
        self._count(len(mark) if is_over else 0)
        self._held = self._held[places[mark] + (len(mark) if is_over else 0) :]
        self._state = "header"
        return True

    def _read_header(self, events: list[Event]) -> bool:
        begun, at = self._held.lstrip(), self._held.find(MESSAGE)
        may_be = any(begun.startswith(head) or head.startswith(begun) for head in _HEADS)
        if not may_be or at > _HEADER_CHARS or (at < 0 and len(self._held) > _HEADER_CHARS + len(MESSAGE)):
            self._state = "text"
            return True
        if at < 0:
            return False
        header, self._held = self._held[:at], self._held[at + len(MESSAGE) :]
        channel, recipient = _CHANNEL.search(header), _RECIPIENT.search(header)
        if recipient is not None and self._has_tools:
            self._state, self._arguments = "call", JsonText()
            events.append(CallStarted(recipient[1]))
        else:
            self._state = "thought" if channel is not None and channel[1] == "analysis" else "text"
        self._count(len(header) + len(MESSAGE))
        return True

    def _pass_on(self, text: str, events: list[Event]) -> None:
        self._count(len(text))
        if self._state == "thought":
            events.append(ReasoningText(text))
        elif self._state == "text":
            events.append(AnswerText(text))

    def _count(self, chars: int) -> None:
        self.thought_chars += chars if self._state == "thought" else 0


def _certain(text: str) -> int:
    """How much of `text` is no beginning of a mark."""
    at = text.rfind("<", max(0, len(text) - max(map(len, _ENDS)) + 1))
    return at if at >= 0 and any(mark.startswith(text[at:]) for mark in _ENDS) else len(text)


class HarmonyFormat(CallFormat):
    """A call ends the answer, so there is one of them."""

    marks: tuple[str, ...] = (START, CHANNEL, MESSAGE, END, CONSTRAIN)
    most_calls = 1

    def reader(self, tools: Sequence[Tool]) -> HarmonyReader:
        return HarmonyReader(has_tools=True)

    def calls(self, tools: Sequence[Tool], marks: Marks, most: int) -> str:
        lines = [f"calls: {' | '.join(f'call_{index}' for index in range(len(tools)))}"]
        for index, tool in enumerate(tools):
            to = quoted(f"commentary to=functions.{tool.name} ")
            form = f'{marks.term(CONSTRAIN)} "json"'
            head = f"{marks.term(CHANNEL)} {to} {form} {marks.term(MESSAGE)}"
            lines.append(f"call_{index}: {head} arguments_{index}")
            lines.append(f"arguments_{index}: {arguments_rule(tool)}")
        return "\n".join(lines)

    def text_then_calls(self, marks: Marks, most: int) -> str | None:
        if not all(marks.is_token(mark) for mark in self.marks):
            return None
        next_one = f'{marks.term(END)} {marks.term(START)} "assistant"'
        before = f'({marks.term(CHANNEL)} "commentary" {marks.term(MESSAGE)} TEXT {next_one})?'
        return f"answer: {before} (calls | {self.text_rule(marks, 'TEXT')})\nTEXT: /(.|\\n)*/"

    def text_rule(self, marks: Marks, rule: str) -> str:
        return f'{marks.term(CHANNEL)} "final" {marks.term(MESSAGE)} ({rule})'
