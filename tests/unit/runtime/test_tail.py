"""Picking at the end of a chain: rollback forgets, replay repeats."""

from __future__ import annotations

import numpy as np
import pytest

from shardcompute.core.errors import UsageError
from shardcompute.core.generation import Sampling
from shardcompute.core.steps import Opening, SessionRows
from shardcompute.runtime.tail import Tail, pack_state

LOGITS = np.random.default_rng(3).standard_normal((8, 50)).astype(np.float32)


def opened(sampling: Sampling, prompt_length: int = 3) -> Tail:
    tail = Tail()
    tail.open([Opening(1, sampling, prompt_length, 2)])
    return tail


def test_picks_one_token_per_wanted_row() -> None:
    picked = opened(Sampling()).pick([SessionRows(1, 0, (4, 5, 6), logit_rows=2)], LOGITS[:2])
    assert [(p.position, p.choice.id) for p in picked] == [(i + 1, int(LOGITS[i].argmax())) for i in range(2)]


def test_a_row_picks_the_same_token_alone_or_with_others() -> None:
    sampling = Sampling(temperature=0.9, seed=5, frequency_penalty=1.5)
    together = opened(sampling).pick([SessionRows(1, 0, (1, 2, 3, 9, 8), logit_rows=3)], LOGITS[:3])
    tail = opened(sampling)
    alone = tail.pick([SessionRows(1, 0, (1, 2, 3), logit_rows=1)], LOGITS[:1])
    alone += tail.pick([SessionRows(1, 3, (9,), logit_rows=1)], LOGITS[1:2])
    alone += tail.pick([SessionRows(1, 4, (8,), logit_rows=1)], LOGITS[2:3])
    assert alone == together


def test_rejected_drafts_do_not_count_as_seen() -> None:
    sampling = Sampling(presence_penalty=2.0)
    tail = opened(sampling)
    favourite = int(LOGITS[0].argmax())
    tail.pick([SessionRows(1, 0, (1, 2, 3, favourite, favourite), logit_rows=3)], LOGITS[1:4])
    picked = tail.pick([SessionRows(1, 3, (7,), logit_rows=1)], LOGITS[:1])
    assert picked[0].choice.id == favourite


def test_prompt_tokens_are_scored_not_picked() -> None:
    picked = opened(Sampling()).pick([SessionRows(1, 0, (4, 5), logit_rows=2, targets=(5, 6))], LOGITS[:2])
    assert [(p.choice.id, p.is_scored, len(p.choice.alternatives)) for p in picked] == [
        (5, True, 2),
        (6, True, 2),
    ]


def test_final_states_come_with_the_tokens_of_those_who_want_them() -> None:
    tail = opened(Sampling(wants_states=True))
    tail.open([Opening(2, Sampling(), 1)])
    states = np.random.default_rng(4).standard_normal((5, 16)).astype(np.float32) * 1e6
    work = [SessionRows(2, 0, (9,), logit_rows=1), SessionRows(1, 0, (4, 5), logit_rows=2, targets=(5, 6))]
    assert tail.wants_states(work)
    assert not tail.wants_states(work[:1])
    assert not tail.wants_states([SessionRows(1, 0, (4, 5))]), "nothing is picked after these"
    other, *scored = tail.pick(work, LOGITS[:3], None, states[:3])
    picked = tail.pick([SessionRows(1, 2, (6, 7), logit_rows=1)], LOGITS[3:4], None, states[3:])
    assert other.choice.hidden == b""
    assert [(each.choice.id, each.choice.logprob, each.is_scored) for each in scored] == [
        (5, None, True),
        (6, None, True),
    ]
    for one, state in zip([*scored, *picked], states[[1, 2, 4]], strict=True):
        given = np.frombuffer(one.choice.hidden, "<f2").astype(np.float32)
        assert np.allclose(given, state / np.sqrt(np.mean(state * state)), rtol=1e-2)
    assert np.isfinite(np.frombuffer(pack_state(np.zeros(16, np.float32)), "<f2")).all()


def test_refuses_unknown_sessions_and_gaps() -> None:
    with pytest.raises(UsageError, match="never opened"):
        Tail().pick([SessionRows(1, 0, (1,), logit_rows=1)], LOGITS[:1])
    with pytest.raises(UsageError, match="gap"):
        opened(Sampling()).pick([SessionRows(1, 2, (1,), logit_rows=1)], LOGITS[:1])
