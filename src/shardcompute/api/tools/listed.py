"""Tool call formats of a mark and a list of JSON objects, such as `<|tool_call|>[…]` and `<TOOLCALL>[…]</TOOLCALL>`."""

from __future__ import annotations

from collections.abc import Sequence

from shardcompute.api.tools.call_format import (
    CallFormat,
    Marks,
    Tool,
    listed_rules,
    quoted,
)
from shardcompute.api.tools.hermes import MarkedReader


class ListedFormat(CallFormat):
    """`is_closed` says whether the model was taught to write the closing mark; it is read in any case."""

    def __init__(self, open_mark: str, close_mark: str, *, is_closed: bool = True) -> None:
        self.marks: tuple[str, ...] = (open_mark, close_mark)
        self._is_closed = is_closed

    def reader(self, tools: Sequence[Tool]) -> MarkedReader:
        return MarkedReader(*self.marks)

    def calls(self, tools: Sequence[Tool], marks: Marks, most: int) -> str:
        return listed_rules(marks.term(self.marks[0]), tools, most, self._end(marks))

    def text_then_calls(self, marks: Marks, most: int) -> str | None:
        text = "TEXT: /(.|\\n)*/"
        if marks.is_token(self.marks[0]):
            return f"answer: TEXT calls?\n{text}"
        trigger = f"trigger[lazy]: TEXT {quoted(self.marks[0])}"
        return f"answer: TEXT | trigger listed {self._end(marks)}\n{trigger}\n{text}"

    def _end(self, marks: Marks) -> str:
        return marks.term(self.marks[1]) if self._is_closed else ""


GRANITE = ListedFormat("<|tool_call|>", "<|/tool_call|>", is_closed=False)
NEMOTRON = ListedFormat("<TOOLCALL>", "</TOOLCALL>")
