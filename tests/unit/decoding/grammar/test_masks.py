"""Grammar masks: only what can become a whole answer, the same after any rollback, and never a crash."""

from __future__ import annotations

import json
import re
from typing import Any

import numpy as np
import pytest

from shardcompute.core.errors import UsageError
from shardcompute.core.generation import MAX_GRAMMAR_CHARS, Grammar
from shardcompute.decoding import GrammarState, compiler_of, rule_of
from shardcompute.models.vocabulary import Vocabulary
from support.models.byte_vocabulary import BYTES, EOS, text_of

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}, "ok": {"type": "boolean"}},
    "required": ["name", "ok"],
    "additionalProperties": False,
}
PADDED = len(BYTES.tokens) + 5
"""Models pad their vocabularies: these logits have no tokens."""


def schema_grammar(schema: Any) -> Grammar:
    return Grammar("json_schema", json.dumps(schema))


def start(grammar: Grammar) -> GrammarState:
    return compiler_of(BYTES).start(grammar)


def allowed(state: GrammarState) -> set[int]:
    return set(np.flatnonzero(state.mask(np.zeros(PADDED, dtype=np.float32)) > -np.inf).tolist())


def say(grammar: Grammar, seed: int, most: int = 400) -> list[int]:
    """A random answer, up to its end."""
    random, state, tokens = np.random.default_rng(seed), start(grammar), list[int]()
    while not tokens or (tokens[-1] != EOS and len(tokens) < most):
        tokens.append(int(random.choice(sorted(allowed(state)))))
        state.extend(tokens[-1:])
    return tokens


@pytest.mark.parametrize("seed", range(5))
def test_random_answers_follow_a_schema(seed: int) -> None:
    said = json.loads(text_of(say(schema_grammar(SCHEMA), seed)))
    assert set(said) == {"name", "ok"}
    assert len(said["name"]) <= 6
    assert isinstance(said["ok"], bool)


@pytest.mark.parametrize("seed", range(3))
def test_random_answers_match_an_expression_or_are_a_choice(seed: int) -> None:
    assert re.fullmatch(rb"[a-c]{2}-\d/", text_of(say(Grammar("regex", r"[a-c]{2}-\d/"), seed)))
    choices = ["yes", 'no "really" no', "größer\n"]
    assert text_of(say(Grammar("choice", json.dumps(choices)), seed)).decode() in choices


def test_the_end_is_allowed_exactly_where_the_grammar_may_end() -> None:
    state = start(Grammar("regex", "ab?"))
    assert allowed(state) == {ord("a")}
    state.extend([ord("a")])
    assert allowed(state) == {ord("b"), EOS}
    state.extend([ord("b")])
    assert allowed(state) == {EOS}


def test_a_text_may_be_cut_into_tokens_in_any_way() -> None:
    state = start(schema_grammar({"enum": ["name"]}))
    assert {ord('"')} <= allowed(state)
    state.extend([ord('"')])
    assert {ord("n"), BYTES.tokens.index(b"name")} <= allowed(state)


def test_masks_do_not_depend_on_drafts_that_were_taken_back() -> None:
    grammar, random = schema_grammar(SCHEMA), np.random.default_rng(1)
    tokens = say(grammar, 7)
    masks, state = [], start(grammar)
    for token in tokens:
        masks.append(allowed(state))
        state.extend([token])
    for _ in range(60):
        keep = int(random.integers(0, len(tokens)))
        state.truncate(keep)
        assert allowed(state) == masks[keep]
        state.extend(random.integers(0, PADDED, 3).tolist())  # what a bad drafter guesses
        state.truncate(keep)
        assert allowed(state) == masks[keep]
        state.extend(tokens[keep:])
        assert len(state) == len(tokens)


def test_behind_a_forbidden_token_nothing_is_masked() -> None:
    state = start(schema_grammar(SCHEMA))
    state.extend([ord("x"), ord("{")])
    logits = np.arange(PADDED, dtype=np.float32)
    assert state.mask(logits) is logits
    state.truncate(1)
    assert state.mask(logits) is logits
    state.truncate(0)
    assert len(allowed(state)) < 10


def test_even_what_follows_the_end_does_not_hurt() -> None:
    state = start(Grammar("choice", '["a"]'))
    state.extend([ord("a"), EOS, EOS, 300_000, ord("a")])
    assert len(state) == 5
    state.truncate(1)
    assert allowed(state) == {EOS}


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        (schema_grammar({"type": "foo"}), "Invalid type: foo"),
        (schema_grammar({"type": "array", "uniqueItems": True}), "uniqueItems"),
        (schema_grammar({"$ref": "https://example.org/x"}), "example.org"),
        (schema_grammar({"$ref": "#"}), "no text satisfies"),
        (schema_grammar({"oneOf": [{"type": "object"}, {"minProperties": 1}]}), "use anyOf"),
        (schema_grammar({"enum": []}), "Unsatisfiable"),
        (schema_grammar([1]), "object or boolean"),
        (Grammar("regex", "[a-"), "unclosed character class"),
        (Grammar("regex", "(?=a)b"), "look-ahead"),
        (Grammar("regex", "a" * (MAX_GRAMMAR_CHARS + 1)), "characters"),
        (Grammar("regex", "".join(chr(64 + i * i * 7919 % 50_000) for i in range(60_000))), "compressed"),
        (schema_grammar({"allOf": [{"anyOf": [{"minLength": i} for i in range(9)]}] * 9}), "too large"),
        (Grammar("lark", "start: nowhere"), "nowhere"),
    ],
)
def test_grammars_that_cannot_be_used_are_refused_with_the_reason(grammar: Grammar, reason: str) -> None:
    with pytest.raises(UsageError, match=re.escape(reason)):
        start(grammar)


@pytest.mark.parametrize(
    "grammar",
    [
        Grammar("regex", "((((a|b|c){0,100}){0,100}){0,100}){0,100}"),
        Grammar("regex", "(.*a.{30}){5}"),
        schema_grammar({"type": "string", "pattern": "^(.*a.{25}){8}$"}),
        schema_grammar({"type": "array", "minItems": 10**6, "items": {"type": "string"}}),
    ],
)
def test_hostile_grammars_may_break_off_an_answer_but_nothing_else(grammar: Grammar) -> None:
    """Within bounds that are counted in steps, not in seconds: they answer, or are ended."""
    tokens = say(grammar, 3, most=60)
    assert len(tokens) == 60 or tokens[-1] == EOS


@pytest.mark.parametrize(
    ("grammar", "text", "is_complete"),
    [
        (Grammar("regex", "ab?"), b"", False),
        (Grammar("regex", "ab?"), b"a", True),
        (Grammar("regex", "ab?"), b"ab", True),
        (Grammar("regex", "ab?"), b"abc", False),
        (schema_grammar(SCHEMA), b'{"name": "x", "ok": true', False),
        (schema_grammar(SCHEMA), b'{"name": "x", "ok": true}', True),
    ],
)
def test_an_answer_is_complete_or_not(grammar: Grammar, text: bytes, is_complete: bool) -> None:
    state = start(grammar)
    state.extend(list(text))
    assert state.is_complete == is_complete


def test_an_answer_that_was_broken_off_is_not_complete() -> None:
    """Each of so many repetitions may begin at every letter: after some of them there is too much to remember."""
    grammar, random = Grammar("regex", "(.*a.{200}){5}"), np.random.default_rng(1)
    state, tokens = start(grammar), list[int]()
    while EOS not in tokens and len(tokens) < 900:
        tokens.append(EOS if allowed(state) == {EOS} else int(random.choice(list(b"ab"))))
        state.extend(tokens[-1:])
    assert tokens[-1] == EOS
    replayed = start(grammar)
    replayed.extend(tokens[:-1])
    assert not replayed.is_complete


def test_a_grammar_is_compiled_once() -> None:
    compiler = compiler_of(BYTES)
    assert compiler_of(BYTES) is compiler
    first, second = (compiler.start(schema_grammar(SCHEMA)) for _ in range(2))
    first.extend([ord("{")])
    assert len(second) == 0
    assert allowed(second) != allowed(first)


def test_a_vocabulary_without_an_end_has_no_grammars() -> None:
    with pytest.raises(UsageError, match="ends an answer"):
        compiler_of(Vocabulary((b"a",), frozenset(), frozenset()))


def test_only_a_lark_grammar_is_more_than_a_rule() -> None:
    assert rule_of(Grammar("choice", '["a"]')) == '"a"'
    with pytest.raises(ValueError, match="single rule"):
        rule_of(Grammar("lark", "start: a"))
