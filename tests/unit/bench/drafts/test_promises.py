"""What guesses would have brought: by hand, where chances and costs are plain numbers."""

from __future__ import annotations

import pytest

from shardcompute.bench.drafts.guesses import Guess, GuessedAnswer
from shardcompute.bench.drafts.promises import (
    DRAFT,
    FIRST,
    SECONDS,
    SHAPES,
    TREE,
    Chances,
    TripCosts,
    choose_guesses,
    copied_shares,
    drafts_of,
    held_shares,
    promise_shapes,
    right_shares,
    tokens_per_trip,
    travel,
)

FREE = TripCosts(fixed_s=1.0, row_s=0.0)
GUESSES = (
    Guess((5,), (0,), (0.6,)),
    Guess((6,), (1,), (0.3,)),
    Guess((6, 7), (1, 0), (0.3, 0.9)),
    Guess((5, 8), (0, 0), (0.6, 0.5)),
    Guess((5, 9), (0, 1), (0.6, 0.4)),
)


def answer(*tokens: int, category: str = "any") -> GuessedAnswer:
    """The same guesses behind every token but the last."""
    return GuessedAnswer(category, "", tokens, (GUESSES,) * (len(tokens) - 1))


@pytest.mark.parametrize(
    ("shape", "paths"),
    [
        (DRAFT, {(5,), (5, 8)}),
        (FIRST, {(5,), (5, 8), (6,)}),
        (SECONDS, {(5,), (5, 8), (6,), (5, 9)}),
        (TREE, {guess.path for guess in GUESSES}),
    ],
)
def test_a_shape_says_which_guesses_travel(shape: str, paths: set[tuple[int, ...]]) -> None:
    chosen, seconds = choose_guesses(GUESSES, shape, Chances(), FREE)
    assert {guess.path for guess in chosen} == paths
    assert seconds == FREE.fixed_s


def test_only_guesses_that_pay_for_their_rows_travel() -> None:
    # Worth 0.6, 0.3 (twice), 0.27 and 0.24 tokens; with three of them a trip brings 2.2 in 2.08 s.
    chosen, seconds = choose_guesses(GUESSES, TREE, Chances(), TripCosts(1.0, 0.27))
    assert {guess.path for guess in chosen} == {(5,), (6,), (5, 8)}
    assert seconds == pytest.approx(1.0 + 4 * 0.27)
    assert choose_guesses(GUESSES, TREE, Chances(), TripCosts(1.0, 5.0))[0] == []


def test_drafting_and_segments_are_paid_once_for_each() -> None:
    costs = TripCosts(1.0, 0.0, draft_s=0.01, segment_s=0.001)
    # The network takes three steps: behind the known token, behind 5 and behind 6. Two guesses branch off.
    assert choose_guesses(GUESSES, TREE, Chances(), costs)[1] == pytest.approx(1.0 + 0.03 + 0.002)


@pytest.mark.parametrize(
    ("tokens", "shape", "trips"),
    [
        ((1, 5, 8, 2), DRAFT, 1),
        ((1, 6, 7, 2), DRAFT, 3),
        ((1, 6, 7, 2), FIRST, 2),
        ((1, 6, 7, 2), TREE, 1),
        ((1, 5, 9, 2), FIRST, 2),
        ((1, 5, 9, 2), SECONDS, 1),
    ],
)
def test_what_holds_saves_trips(tokens: tuple[int, ...], shape: str, trips: int) -> None:
    journey = travel(answer(*tokens), shape, Chances(), FREE)
    assert (journey.tokens, journey.trips, journey.seconds) == (3, trips, float(trips))


def test_a_side_guess_that_holds_is_computed_again() -> None:
    costs = TripCosts(100.0, 1.0)
    journey = travel(answer(1, 6, 3, 4), FIRST, Chances(), costs)
    # 1 → 6 and the 3 behind it; then 3 → 4, with the row of 6 once more. Three guesses travel each time.
    assert journey.trips == 2
    assert journey.seconds == pytest.approx(2 * 104.0 + 1.0)


def test_chances_follow_what_was_seen() -> None:
    chances = Chances()
    unseen = chances.of_last(GUESSES[0])
    assert unseen == pytest.approx(0.6)
    for _ in range(50):
        chances.observe(answer(1, 6, 2))
    assert chances.of_last(GUESSES[0]) < 0.1
    assert chances.of_last(GUESSES[1]) > 0.3
    # Nothing was seen behind a draft that did not hold.
    assert chances.of_last(GUESSES[3]) == pytest.approx(0.5)


def test_shares_are_of_positions_whose_draft_held_so_far() -> None:
    answers = [answer(1, 5, 8), answer(1, 5, 9), answer(1, 6, 7)]
    first, second = right_shares(answers, 0), right_shares(answers, 1)
    # Behind the second token of each nothing that was guessed came.
    assert first == {-1: 6, 0: pytest.approx(2 / 6), 1: pytest.approx(1 / 6)}
    assert second == {-1: 2, 0: pytest.approx(1 / 2), 1: pytest.approx(1 / 2)}


def test_gains_are_against_the_draft_alone() -> None:
    promises = promise_shapes([answer(1, 6, 7, 2), answer(1, 5, 8, 2)] * 2, FREE)
    assert list(promises) == list(SHAPES)
    assert promises[DRAFT].gain == promises[DRAFT].gain_half_interval == 0
    assert promises[TREE].gain == pytest.approx((3 - 1 + 0) / 2)
    assert promises[TREE].tokens_per_trip == 3
    assert promises[TREE].rows_per_trip == 5
    assert 0 < promises[FIRST].gain < promises[TREE].gain


def test_copied_tokens_count_where_they_differ_from_the_draft() -> None:
    copied = (None, 5, 6, 9)
    answers = [GuessedAnswer("any", "", (1, 5, 5, 6, 5), (GUESSES,) * 4, copied)]
    # 5 is the draft's own first token; 6 came, 9 did not.
    assert copied_shares(answers) == (2 / 4, 1 / 2)


def test_drafts_count_as_far_as_they_held() -> None:
    own = answer(1, 5, 8, 5, 2)
    alone = [(own.tokens, drafts_of(own))]
    assert drafts_of(own) == ((5, 8),) * 4
    # 5 came behind the first and the third token, and 8 behind the first 5 alone.
    assert held_shares(alone, 0) == (4, 2 / 4)
    assert held_shares(alone, 1) == (2, 1 / 2)
    # One trip brings 5, 8 and the next 5, and one the last token; with one drafted token, 5 and 8, 5 and 2.
    assert tokens_per_trip(alone, 2) == 4 / 2
    assert tokens_per_trip(alone, 1) == 4 / 2
    assert tokens_per_trip(alone, 0) == 1
    mixed = [(own.tokens, ((5, 8), (8, 5), (5, 2), (2, 5)))]
    assert held_shares(mixed, 1) == (3, 1.0)
    assert tokens_per_trip(mixed, 2) == 4 / 2
