"""Drafts of the last stage: where they begin, where they end, and that nothing is remembered of them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from shardcompute.backends.matrix import Array, DenseMatrix, HeldRows
from shardcompute.core.batch import Segment
from shardcompute.core.generation import Sampling, TokenChoice
from shardcompute.core.steps import Draft, Opening, Picked, SessionRows
from shardcompute.runtime.head_drafter import HeadDrafter, HeadDraftLimits
from shardcompute.runtime.tail import Tail

VOCABULARY, HIDDEN, CONTEXT = 40, 4, 64
KNOWN = np.arange(0, 30, dtype=np.int32)
"""Tokens from 30 on are not known to the network."""


class CountingNetwork:
    """After token t it expects t + 1, `sureness` sure of it. An embedding is the token's number."""

    def __init__(self, sureness: float = 0.9) -> None:
        self.sureness = sureness
        self.steps: list[list[int]] = []
        self._states: Array = np.zeros((0, HIDDEN))

    def step(self, segments: Sequence[Segment], inputs: Array, *, keeps_hidden: bool = False) -> Array:
        assert keeps_hidden
        assert inputs.shape == (len(segments), 2 * HIDDEN)
        tokens = inputs[:, HIDDEN].astype(int)
        self.steps.append([int(token) for token in tokens])
        self._states = inputs[:, :HIDDEN] + 1
        logits = np.full((len(tokens), len(KNOWN)), np.log((1 - self.sureness) / (len(KNOWN) - 1)))
        logits[np.arange(len(tokens)), (tokens + 1) % len(KNOWN)] = np.log(self.sureness)
        return logits.astype(np.float32)

    def hidden_rows(self) -> Array:
        return self._states

    def close(self) -> None:
        self.steps.clear()


def drafter(network: CountingNetwork, **limits: float) -> HeadDrafter:
    embedding = np.repeat(KNOWN[:, None], HIDDEN, axis=1).astype(np.float32)
    return HeadDrafter(
        network,  # type: ignore[arg-type]
        KNOWN,
        HeldRows(DenseMatrix(embedding)),
        HeadDraftLimits(CONTEXT, **{"most": 8, **limits}),  # type: ignore[arg-type]
        vocab_size=VOCABULARY,
    )


def opened(*sessions: int, sampling: Sampling | None = None, tokens: Sequence[int] = (1, 2, 3)) -> Tail:
    tail = Tail()
    for session in sessions:
        tail.open([Opening(session, sampling or Sampling(temperature=0.0), len(tokens))])
        tail.follow(SessionRows(session, 0, tuple(tokens)))
    return tail


def picks(session: int, first: int, *tokens: int) -> list[Picked]:
    return [Picked(session, first + i, TokenChoice(token)) for i, token in enumerate(tokens)]


def states(count: int) -> Array:
    return np.zeros((count, HIDDEN), dtype=np.float32)


def test_drafts_follow_the_picked_token() -> None:
    work = [SessionRows(7, 2, (3,), 1, head_draft_tokens=4)]
    found = drafter(CountingNetwork()).draft(work, picks(7, 2, 10), states(1), opened(7))
    assert found == [Draft(7, 4, (11, 12, 13, 14), 3)]


def test_drafts_go_on_from_the_last_draft_that_held() -> None:
    # Rows: the known token, then drafts 10, 11 and 20; the last one is not what was picked.
    work = [SessionRows(7, 2, (3, 10, 11, 20), 4, head_draft_tokens=2)]
    tail = opened(7)
    tail.follow(work[0])
    found = drafter(CountingNetwork()).draft(work, picks(7, 2, 10, 11, 15, 21), states(4), tail)
    assert found == [Draft(7, 6, (16, 17), 3)]


def test_sessions_are_drafted_for_side_by_side_and_only_where_asked() -> None:
    network = CountingNetwork()
    work = [
        SessionRows(1, 2, (3,), 1, head_draft_tokens=1),
        SessionRows(2, 2, (3,), 1),
        SessionRows(3, 2, (3,), 1, head_draft_tokens=3),
    ]
    picked = [*picks(1, 2, 5), *picks(2, 2, 6), *picks(3, 2, 7)]
    found = drafter(network).draft(work, picked, states(3), opened(1, 2, 3))
    assert [(each.session, each.ids) for each in found] == [(1, (6,)), (3, (8, 9, 10))]
    assert network.steps == [[5, 7], [8], [9]]


def test_a_draft_ends_where_it_is_more_likely_wrong() -> None:
    work = [SessionRows(7, 2, (3,), 1, head_draft_tokens=8)]
    found = drafter(CountingNetwork(0.5), confidence=0.2).draft(work, picks(7, 2, 3), states(1), opened(7))
    assert found == [Draft(7, 4, (4, 5), 1)]
    assert not drafter(CountingNetwork(0.1), confidence=0.2).draft(work, picks(7, 2, 3), states(1), opened(7))


def test_a_token_that_is_not_known_ends_drafting() -> None:
    work = [SessionRows(7, 2, (3,), 1, head_draft_tokens=4)]
    assert drafter(CountingNetwork()).draft(work, picks(7, 2, 35), states(1), opened(7)) == []


def test_the_context_bounds_drafts() -> None:
    tokens = tuple(range(20)) * 3
    work = [SessionRows(7, 59, (tokens[59],), 1, head_draft_tokens=8)]
    found = drafter(CountingNetwork()).draft(work, picks(7, 59, 1), states(1), opened(7, tokens=tokens))
    assert found[0].start + len(found[0].ids) <= CONTEXT


def test_prompts_that_are_scored_are_not_drafted_on() -> None:
    work = [SessionRows(7, 2, (3,), 1, (4,), head_draft_tokens=4)]
    picked = [Picked(7, 2, TokenChoice(4), is_scored=True)]
    assert drafter(CountingNetwork()).draft(work, picked, states(1), opened(7)) == []


@pytest.mark.parametrize(
    "sampling", [Sampling(temperature=0.9, seed=3), Sampling(temperature=0.0, repetition_penalty=1.5)]
)
def test_the_tail_knows_afterwards_what_it_knew_before(sampling: Sampling) -> None:
    tail, other = opened(7, sampling=sampling), opened(7, sampling=sampling)
    logits = np.random.default_rng(2).standard_normal((2, VOCABULARY)).astype(np.float32)
    work = SessionRows(7, 3, (4, 9), 2, head_draft_tokens=5)
    first, first_other = tail.pick([work], logits), other.pick([work], logits)
    drafter(CountingNetwork()).draft([work], first, states(2), tail)
    assert first == first_other
    assert tail.length(7) == other.length(7)
    following = SessionRows(7, 4, (first[0].choice.id,), 1)
    assert tail.pick([following], logits[:1]) == other.pick([following], logits[:1])


def test_biases_and_penalties_count_for_drafts() -> None:
    sampling = Sampling(temperature=0.0, logit_bias={11: -100.0})
    work = [SessionRows(7, 2, (3,), 1, head_draft_tokens=1)]
    network = drafter(CountingNetwork(), confidence=0.0)
    found = network.draft(work, picks(7, 2, 10), states(1), opened(7, sampling=sampling))
    assert found[0].ids != (11,)
