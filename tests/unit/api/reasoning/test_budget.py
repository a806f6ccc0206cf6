"""Thinking before a form, and within a budget: what the grammar allows at every token, also after a rollback."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from shardcompute.api.reasoning import ThinkingPlan
from shardcompute.api.reasoning.marks import THINK
from shardcompute.api.reasoning.planning import Stand
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
