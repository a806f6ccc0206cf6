"""Drafts from a session's own text."""

from __future__ import annotations

import random

import pytest

from shardcompute.core.generation import Sampling
from shardcompute.core.steps import Opening
from shardcompute.decoding.ngram import NgramDrafter

OPENING = Opening(1, Sampling(), 4)


def propose(known: list[int], limit: int = 4, assumed: tuple[int, ...] = ()) -> tuple[tuple[int, ...], int]:
    draft = NgramDrafter().propose(1, known, assumed, limit, OPENING)
    assert draft is None or (draft.session, draft.start) == (1, len(known) + len(assumed))
    return ((), 0) if draft is None else (draft.ids, draft.grade)


def test_copies_what_followed_before() -> None:
    assert propose([1, 2, 3, 4, 5, 6, 7, 9, 9, 8, 1, 2, 3])[0] == (4, 5, 6, 7)


@pytest.mark.parametrize("known", [[], [1], [1, 2], [1, 2, 3, 4, 5, 6]])
def test_offers_nothing_where_nothing_repeats(known: list[int]) -> None:
    assert propose(known) == ((), 0)


def test_offers_no_more_than_the_limit() -> None:
    known = [1, 2, 3, 4, 5, 6, 1, 2]
    assert propose(known, 1)[0] == (3,)
    assert propose(known, 0)[0] == ()


def test_the_longest_match_wins_over_a_later_one() -> None:
    known = [*(1, 2, 3, 4, 70), *(9, 3, 4, 80), 5, *(1, 2, 3, 4)]
    assert propose(known, 1)[0] == (70,)


def test_among_equal_matches_the_latest_wins() -> None:
    known = [*(3, 4, 70), 9, *(3, 4, 80), 5, *(3, 4)]
    assert propose(known, 1)[0] == (80,)


def test_repetition_goes_on_past_the_known_text() -> None:
    assert propose([1, 2, 3] * 3, 7)[0] == (1, 2, 3, 1, 2, 3, 1)
    assert propose([5] * 4, 6)[0] == (5,) * 6


def test_goes_on_after_what_is_assumed() -> None:
    known = [1, 2, 3, 4, 5, 6, 7, 8, 99, 1, 2]
    assert propose(known, 3, assumed=(3, 4))[0] == (5, 6, 7)
    # The assumption alone may repeat what is known last.
    assert propose([1, 2, 7, 8], 3, assumed=(7, 8))[0] == (7, 8, 7)


def test_assumptions_are_not_remembered() -> None:
    drafter = NgramDrafter()
    known = [1, 2, 3, 4]
    drafter.propose(1, known, (50, 51, 52, 53), 4, OPENING)
    assert drafter.propose(1, [*known, 50, 51], (), 4, OPENING) is None


def test_longer_matches_and_agreement_give_better_grades() -> None:
    phrase = [11, 12, 13, 14, 15, 16, 17, 18, 19, 20]
    short = propose([1, 2, 3, 4, 1, 2])[1]
    long = propose([*phrase, 30, 31, *phrase[:-1]])[1]
    agreed = propose([1, 2, 3, 9, 1, 2, 3, 8, 1, 2])[1]
    torn = propose([*phrase[:6], 40, 8, *phrase[:6], 41, 7, *phrase[:6]])[1]
    assert short < agreed < long
    assert torn < propose([*phrase[:6], 40, 8, *phrase[:6]])[1]


def test_growing_step_by_step_drafts_as_one_go() -> None:
    chance = random.Random(3)
    text = [chance.randrange(6) for _ in range(300)]
    growing = NgramDrafter()
    for stop in range(0, 300, 7):
        at_once = NgramDrafter().propose(1, text[:stop], (), 5, OPENING)
        assert growing.propose(1, text[:stop], (), 5, OPENING) == at_once


def test_a_very_long_prompt_is_indexed_over_several_calls() -> None:
    known = [*range(20_000), 19_500, 19_501, 19_502]
    drafter = NgramDrafter()
    assert drafter.propose(1, known, (), 2, OPENING) is None
    for _ in range(3):
        draft = drafter.propose(1, known, (), 2, OPENING)
    assert draft is not None
    assert draft.ids == (19_503, 19_504)


def test_sessions_know_nothing_of_each_other_and_are_forgotten() -> None:
    drafter = NgramDrafter()
    known = [1, 2, 3, 1, 2]
    assert drafter.propose(1, known, (), 1, OPENING) is not None
    assert drafter.propose(2, [1, 2], (), 1, OPENING) is None
    drafter.forget(1)
    drafter.forget(7)
    assert drafter.propose(1, [1, 2], (), 1, OPENING) is None
