"""Thinking before a form, and within a budget: what the grammar allows at every token, also after a rollback."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from shardcompute.api.reasoning import ChannelPlan, ThinkingPlan
from shardcompute.api.reasoning.marks import THINK
from shardcompute.api.reasoning.planning import Stand
from shardcompute.api.tools.call_format import Marks
from shardcompute.api.tools.harmony import HarmonyFormat
from shardcompute.core.errors import UsageError
from shardcompute.core.generation import Grammar
from shardcompute.decoding import GrammarState, compiler_of
from shardcompute.models.vocabulary import Vocabulary

EOS, OPEN, CLOSE = 256, 257, 258
BYTES = tuple(bytes([value]) for value in range(256))
MARKED = (*BYTES, b"<eos>", b"<think>", b"</think>")
SPECIAL = Vocabulary(MARKED, frozenset({EOS, OPEN, CLOSE}), frozenset({EOS}))
ADDED = Vocabulary(MARKED, frozenset({EOS}), frozenset({EOS}))
SPELLED = Vocabulary(MARKED[:257], frozenset({EOS}), frozenset({EOS}))
FORM = Grammar("choice", '["ok"]')
TOKENS = pytest.mark.parametrize("vocabulary", [SPECIAL, ADDED], ids=["special", "added"])


def begin(vocabulary: Vocabulary, stand: Stand, grammar: Grammar | None, budget: int | None) -> GrammarState:
    held = ThinkingPlan(THINK, stand, vocabulary, frozenset()).hold(grammar, budget)
    assert held is not None
    return compiler_of(vocabulary).start(held)


def allowed(state: GrammarState, vocabulary: Vocabulary) -> list[int]:
    masked = state.mask(np.zeros(len(vocabulary.tokens), dtype=np.float32))
    return [int(token) for token in np.flatnonzero(masked == 0)]


def follow(state: GrammarState, vocabulary: Vocabulary, tokens: Sequence[int]) -> None:
    for token in tokens:
        assert token in allowed(state, vocabulary)
        state.extend([token])


@TOKENS
def test_the_closing_mark_follows_once_the_budget_is_used_up(vocabulary: Vocabulary) -> None:
    state = begin(vocabulary, "open", None, 3)
    follow(state, vocabulary, b"abc")
    assert allowed(state, vocabulary) == [CLOSE]
    state.truncate(1)
    follow(state, vocabulary, b"xy")
    assert allowed(state, vocabulary) == [CLOSE]
    follow(state, vocabulary, [CLOSE, *b"\n\nYes, for as long as it takes."])
    assert EOS in allowed(state, vocabulary)


@TOKENS
def test_thinking_may_end_before(vocabulary: Vocabulary) -> None:
    state = begin(vocabulary, "open", FORM, 3)
    assert EOS not in allowed(state, vocabulary)
    follow(state, vocabulary, [*b"a", CLOSE, *b"\n\nok"])
    assert allowed(state, vocabulary) == [EOS]


@TOKENS
def test_a_form_follows_thinking_or_stands_alone(vocabulary: Vocabulary) -> None:
    for thought in ([], [OPEN, *b"{ anything", CLOSE], [OPEN, CLOSE, *b"\n"]):
        state = begin(vocabulary, "free", FORM, None)
        follow(state, vocabulary, [*thought, *b"ok"])
        assert state.is_complete
    closed = ThinkingPlan(THINK, "closed", vocabulary, frozenset())
    assert closed.hold(FORM, 3) is FORM
    assert closed.hold(None, 3) is None


@TOKENS
def test_no_budget_at_all(vocabulary: Vocabulary) -> None:
    state = begin(vocabulary, "open", None, 0)
    assert allowed(state, vocabulary) == [CLOSE]


def test_marks_that_are_no_tokens() -> None:
    state = begin(SPELLED, "open", FORM, None)
    follow(state, SPELLED, b"a < b</think>\nok")
    assert state.is_complete
    with pytest.raises(UsageError, match="cannot be limited"):
        begin(SPELLED, "open", FORM, 3)


def test_free_text_with_calls_follows_thinking() -> None:
    calls = Grammar("lark", 'start: answer\nanswer: TEXT | TEXT <[257]> "x"\nTEXT: /(.|\\n)*/\n')
    state = begin(SPECIAL, "open", calls, 5)
    follow(state, SPECIAL, [*b"ab", CLOSE, *b"\n\ntext", OPEN, *b"x"])
    assert state.is_complete


CHANNELS = Vocabulary(
    (*MARKED[:257], *(mark.encode() for mark in HarmonyFormat.marks)),
    frozenset(range(256, 262)),
    frozenset({EOS}),
)
ID = {mark: 257 + index for index, mark in enumerate(HarmonyFormat.marks)}
FINAL = [ID["<|channel|>"], *b"final", ID["<|message|>"]]


def channels(grammar: Grammar | None, budget: int | None) -> GrammarState:
    held = ChannelPlan(Marks(CHANNELS, HarmonyFormat.marks)).hold(grammar, budget)
    assert held is not None
    return compiler_of(CHANNELS).start(held)


def thought(text: bytes) -> list[int]:
    head = [ID["<|channel|>"], *b"analysis", ID["<|message|>"]]
    return [*head, *text, ID["<|end|>"], ID["<|start|>"], *b"assistant"]


@pytest.mark.parametrize("before", [[], thought(b"ab"), thought(b"a") + thought(b"b")])
def test_channels_think_before_a_form(before: list[int]) -> None:
    state = channels(FORM, None)
    follow(state, CHANNELS, [*before, *FINAL, *b"ok"])
    assert state.is_complete


def test_channels_keep_to_a_budget() -> None:
    state = channels(None, 3)
    follow(state, CHANNELS, thought(b"abc")[:13])
    assert allowed(state, CHANNELS) == [ID["<|end|>"]]
    follow(state, CHANNELS, [ID["<|end|>"], ID["<|start|>"], *b"assistant", *FINAL, *b"Yes."])
    assert EOS in allowed(state, CHANNELS)
    state = channels(None, 0)
    follow(state, CHANNELS, thought(b""))
    spelled = ChannelPlan(Marks(SPELLED, HarmonyFormat.marks))
    assert spelled.hold(FORM, None) is FORM
    with pytest.raises(UsageError, match="cannot be limited"):
        spelled.hold(None, 3)
