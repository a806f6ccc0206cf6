"""Thinking plans: from a model's template and its prompt to the reader of answers and the grammar that they follow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal
from weakref import WeakKeyDictionary

from shardcompute.api.reasoning.channels import ChannelPlan
from shardcompute.api.reasoning.marks import MARKS, ThinkingMarks, detect_marks
from shardcompute.api.reasoning.splitter import ThinkingSplitter
from shardcompute.api.tools import CallReader, ToolPlan
from shardcompute.api.tools.call_format import Marks, quoted
from shardcompute.api.tools.harmony import HarmonyFormat, is_harmony
from shardcompute.core.errors import UsageError
from shardcompute.core.generation import Grammar
from shardcompute.decoding import rule_of
from shardcompute.models.vocabulary import Vocabulary
from shardcompute.node.service import TextCodec

Stand = Literal["free", "open", "closed"]
_TAIL_TOKENS = 32
_TEXT = "/(.|\\n)*/"
_GAP = '("\\n\\n" | "\\n")?'


@dataclass(frozen=True, slots=True)
class ThinkingPlan:
    """How the answers to one prompt think."""

    marks: ThinkingMarks
    stand: Stand
    """Where the prompt leaves the model: thinking already, done with it, or free to begin."""
    vocabulary: Vocabulary
    shown_ids: frozenset[int]

    def reader(self, tools: ToolPlan | None) -> CallReader | None:
        """A reader of one answer; None where it is nothing but text."""
        calls = None if tools is None else tools.reader()
        if self.stand == "closed":
            return calls
        return ThinkingSplitter(self.marks, is_open=self.stand == "open", calls=calls)

    def hold(self, grammar: Grammar | None, budget: int | None) -> Grammar | None:
        """The grammar of an answer, with thinking before it of at most `budget` tokens: once they are used up, the
        closing mark follows and the answer goes on. None where nothing has to be held to anything; UsageError for a
        budget that cannot be held to."""
        if self.stand == "closed" or (grammar is None and budget is None):
            return grammar
        opening = _token(self.vocabulary, self.marks.open)
        if grammar is None:
            held = f"held: {_TEXT}"
        elif grammar.kind == "lark":
            held = grammar.text.replace("start:", "held:", 1)
        else:
            held = f"held: {rule_of(grammar)}"
        thought = f"thought {_GAP}"
        if self.stand == "free":
            thought = f"({quoted(self.marks.open) if opening is None else opening} {thought})?"
        return Grammar("lark", f"start: {thought} held\n{self._thought(budget)}\n{held}\n")

    def _thought(self, budget: int | None) -> str:
        """Lark rules by which `thought` stands for thinking and its closing mark."""
        closing = _token(self.vocabulary, self.marks.close)
        if closing is None and budget is not None:
            message = (
                f"This model spells {self.marks.close} in several tokens, so its thinking cannot be limited."
            )
            raise UsageError(message, hint="leave the budget out, and limit the whole answer")
        if closing is None:
            return f"thought[lazy]: {_TEXT} {quoted(self.marks.close)}"
        if budget == 0:
            return f"thought: {closing}"
        limit = "" if budget is None else f"[max_tokens={budget}]"
        return f"thought: think {closing}\nthink{limit}: {_TEXT}"


def plan_thinking(
    codec: TextCodec, template: str | None, prompt: Sequence[int], begun: str = ""
) -> ThinkingPlan | ChannelPlan | None:
    """None for models that do not think. `begun` is the answer so far, where it is to be gone on with. Takes a moment
    when a model is asked first."""
    if is_harmony(template) and not begun:
        return ChannelPlan(Marks(codec.vocabulary(), HarmonyFormat.marks))
    marks = detect_marks(template)
    if marks is None:
        return None
    vocabulary = codec.vocabulary()
    shown = Marks(vocabulary, (marks.open, marks.close)).shown_ids
    tail = codec.decode(prompt[-_TAIL_TOKENS:], skip_special=False)
    return ThinkingPlan(marks, _stand_of(marks, tail, begun), vocabulary, shown)


def _stand_of(marks: ThinkingMarks, tail: str, begun: str) -> Stand:
    if begun:
        return "open" if begun.rfind(marks.open) > begun.rfind(marks.close) else "closed"
    end = tail.rstrip()
    if end.endswith(marks.close):
        return "closed"
    return "open" if end.endswith(marks.open) else "free"


def _token(vocabulary: Vocabulary, mark: str) -> str | None:
    """The mark in a Lark rule, where a token stands for it, special or not."""
    known = _TOKENS.get(vocabulary)
    if known is None:
        wanted = {mark.encode() for marks in MARKS for mark in (marks.open, marks.close)}
        known = {text.decode(): token for token, text in enumerate(vocabulary.tokens) if text in wanted}
        _TOKENS[vocabulary] = known
    return f"<[{known[mark]}]>" if mark in known else None


_TOKENS: WeakKeyDictionary[Vocabulary, Mapping[str, int]] = WeakKeyDictionary()
