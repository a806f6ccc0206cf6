"""Picking under a grammar: verification segments with right and wrong drafts give the picks of one by one."""

from __future__ import annotations

import json
from itertools import pairwise

import numpy as np
import pytest

from shardcompute.core.errors import UsageError
from shardcompute.core.generation import Grammar, Sampling, TokenChoice
from shardcompute.core.steps import Opening, Picked, SessionRows
from shardcompute.runtime.tail import Tail
from support.models.byte_vocabulary import BYTES, EOS, text_of

PROMPT = (5, 6, 7)
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 9}, "n": {"type": "integer", "maximum": 99}},
    "required": ["name"],
    "additionalProperties": False,
}
GREEDY = Sampling(grammar=Grammar("json_schema", json.dumps(SCHEMA)), logprobs=2)
SAMPLED = Sampling(1.3, seed=11, frequency_penalty=0.4, grammar=GREEDY.grammar, logprobs=2)
ROWS = np.random.default_rng(5).standard_normal((200, len(BYTES.tokens) + 3)).astype(np.float32) * 3
"""The logits behind each position: garbage, as a grammar deserves."""


def opened(sampling: Sampling) -> Tail:
    tail = Tail(lambda: BYTES)
    tail.open([Opening(1, sampling, len(PROMPT))])
    return tail


def pick(tail: Tail, start: int, ids: tuple[int, ...], logit_rows: int) -> list[Picked]:
    last = start + len(ids)
    return tail.pick([SessionRows(1, start, ids, logit_rows)], ROWS[last - logit_rows : last])


def one_by_one(sampling: Sampling) -> list[TokenChoice]:
    tail = opened(sampling)
    choices = [pick(tail, 0, PROMPT, 1)[0].choice]
    while choices[-1].id != EOS:
        position = len(PROMPT) + len(choices) - 1
        choices.append(pick(tail, position, (choices[-1].id,), 1)[0].choice)
    return choices


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED])
def test_garbage_logits_become_valid_json(sampling: Sampling) -> None:
    choices = one_by_one(sampling)
    said = json.loads(text_of([choice.id for choice in choices]))
    assert set(said) <= {"name", "n"}
    # Log-probabilities are those among the allowed tokens, and forbidden ones are no alternatives.
    assert all(choice.logprob is not None and choice.logprob > -100 for choice in choices)
    assert all(other > -100 for choice in choices for _, other in choice.alternatives)


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED])
@pytest.mark.parametrize("depth", [1, 3, 7])
def test_drafts_right_and_wrong_change_nothing(sampling: Sampling, depth: int) -> None:
    truth = one_by_one(sampling)
    random = np.random.default_rng(depth)
    tail = opened(sampling)
    known = [pick(tail, 0, PROMPT, 1)[0].choice]
    while known[-1].id != EOS:
        drafts = [choice.id for choice in truth[len(known) : len(known) + depth]]
        if drafts and random.random() < 0.7:
            # From some place on they are wrong, often against the grammar.
            drafts[random.integers(0, len(drafts)) :] = random.integers(0, 256, 4).tolist()
        ids = (known[-1].id, *drafts)
        picked = pick(tail, len(PROMPT) + len(known) - 1, ids, len(ids))
        for draft, result in zip([*drafts, -1], picked, strict=True):
            known.append(result.choice)
            if result.choice.id == EOS or result.choice.id != draft:
                break
    assert known == truth


def test_a_replayed_session_goes_on_as_it_was() -> None:
    truth = one_by_one(SAMPLED)
    for length in (1, len(truth) // 2, len(truth) - 1):
        tail = opened(SAMPLED)
        ids = (*PROMPT, *(choice.id for choice in truth[:length]))
        tail.pick([SessionRows(1, 0, ids[:-2], 0)], ROWS[:0])
        assert pick(tail, len(ids) - 2, ids[-2:], 1)[0].choice == truth[length]


def test_a_rollback_into_the_prompt_starts_the_grammar_again() -> None:
    truth = [choice.id for choice in one_by_one(GREEDY)]
    tail = opened(GREEDY)
    pick(tail, 0, (*PROMPT, *truth[:5]), 1)
    assert pick(tail, 1, PROMPT[1:], 1)[0].choice.id == truth[0]
    assert all(a != EOS for a, _ in pairwise(truth))


def test_a_tail_without_a_vocabulary_says_what_is_missing() -> None:
    with pytest.raises(UsageError, match="vocabulary"):
        Tail().open([Opening(1, GREEDY, 3)])
