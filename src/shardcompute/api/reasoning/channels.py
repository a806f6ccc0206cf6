"""Thinking plans of models that write their answers in channels (see `tools.harmony`)."""

from __future__ import annotations

from dataclasses import dataclass

from shardcompute.api.tools import CallReader, ToolPlan
from shardcompute.api.tools.call_format import Marks
from shardcompute.api.tools.harmony import CHANNEL, END, MESSAGE, START, HarmonyFormat, HarmonyReader
from shardcompute.core.errors import UsageError
from shardcompute.core.generation import Grammar
from shardcompute.decoding import rule_of

_TEXT = "/(.|\\n)*/"


@dataclass(frozen=True, slots=True)
class ChannelPlan:
    """How answers in channels think: on one of them, before they speak or call."""

    marks: Marks

    @property
    def shown_ids(self) -> frozenset[int]:
        return self.marks.shown_ids

    def reader(self, tools: ToolPlan | None) -> CallReader:
        return HarmonyReader(has_tools=tools is not None)

    def hold(self, grammar: Grammar | None, budget: int | None) -> Grammar | None:
        """As `ThinkingPlan.hold`. A budget is for the one message of thinking that there may be then."""
        if grammar is None and budget is None:
            return None
        if not all(self.marks.is_token(mark) for mark in HarmonyFormat.marks):
            if budget is not None:
                message = "This model spells its marks in several tokens, so its thinking cannot be limited."
                raise UsageError(message, hint="leave the budget out, and limit the whole answer")
            return grammar
        channel, message = self.marks.term(CHANNEL), self.marks.term(MESSAGE)
        following = f'{self.marks.term(END)} {self.marks.term(START)} "assistant"'
        limit = f"[max_tokens={budget}]" if budget else ""
        thought = "" if budget == 0 else "think"
        count = "*" if budget is None else "?"
        lines = [
            f"start: analysis{count} held",
            f'analysis: {channel} "analysis" {message} {thought} {following}',
        ]
        if thought:
            lines.append(f"think{limit}: {_TEXT}")
        if grammar is None:
            said = f'{channel} ("final" | "commentary") {message} SAID'
            lines += [f"held: {said} ({following} {said})*", f"SAID: {_TEXT}"]
        elif grammar.kind == "lark":
            lines.append(grammar.text.replace("start:", "held:", 1))
        else:
            lines.append(f"held: {HarmonyFormat().text_rule(self.marks, rule_of(grammar))}")
        return Grammar("lark", "\n".join(lines) + "\n")
