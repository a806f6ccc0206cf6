"""Canaries: prompts that nobody can foresee, agreement of answers, and drift over weeks."""

from __future__ import annotations

from shardcompute.trust.canaries import HALF_LIFE_S, DriftEstimate, agreement, compose, observe_canary


def test_a_bank_is_its_secret() -> None:
    bank = [compose(b"one", number) for number in range(32)]
    assert bank == [compose(b"one", number) for number in range(32)]
    assert len({each.text for each in bank}) > 25
    assert not {each.text for each in bank} & {compose(b"other", number).text for number in range(32)}
    assert all(24 <= each.tokens <= 64 and 0.0 < each.temperature <= 1.0 for each in bank)
    assert all("{" not in each.text for each in bank)


def test_answers_agree_up_to_the_first_token_that_differs() -> None:
    assert agreement([1, 2, 3, 4], [1, 2, 3, 4]) == 1.0
    assert agreement([1, 2, 3, 4], [1, 2, 9, 4]) == 0.5
    assert agreement([1, 2, 3, 4], [1, 2]) == agreement([1, 2], [1, 2, 3, 4]) == 0.5
    assert agreement([1], [2]) == 0.0
    assert agreement([], []) == 1.0


def test_one_that_differs_is_doubt_and_two_are_drift() -> None:
    known = DriftEstimate()
    for _ in range(5):
        known = observe_canary(known, 1.0, 0.0)
    assert not known.is_in_doubt
    known = observe_canary(known, 0.5, 1.0)
    assert known.is_in_doubt
    assert not known.is_drifting
    known = observe_canary(observe_canary(known, 1.0, 2.0), 0.5, 3.0)
    assert known.is_drifting
    assert (known.canaries, known.differed) == (8, 2)
    for at_s in range(3):
        known = observe_canary(known, 1.0, 4.0 + at_s)
    assert not known.is_drifting, "what is over does not warn for ever"


def test_old_canaries_count_less() -> None:
    known = observe_canary(DriftEstimate(), 0.0, 0.0)
    assert known.level == 1.0
    soon, late = observe_canary(known, 1.0, 1.0), observe_canary(known, 1.0, 3 * HALF_LIFE_S)
    assert 0.49 < soon.level <= 0.5
    assert late.level < 0.12
