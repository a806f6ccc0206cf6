"""The mixture of copied and invented tokens: its probabilities, and how much copies count."""

from __future__ import annotations

import numpy as np
import pytest

from shardcompute.decoding.copying.mixture import CopiedText, CopyGuess, MixedLogits

IDS = np.array([2, 3, 5], dtype=np.int32)
PLACES = np.array([-1, -1, 0, 1, -1, 2, -1, -1], dtype=np.int32)
LOGITS = np.log(np.array([0.5, 0.3, 0.2], dtype=np.float32))


def softmax(logits: np.ndarray, temperature: float) -> np.ndarray:
    weights = np.exp(logits.astype(np.float64) / temperature)
    return np.asarray(weights / weights.sum())


def chance(text: CopiedText, *assumed: int) -> float:
    guess = text.guess(assumed)
    assert guess is not None
    return guess.chance


@pytest.mark.parametrize("temperature", [1.0, 0.5])
@pytest.mark.parametrize("token", [3, 7])
def test_logits_are_those_of_the_mixture(token: int, temperature: float) -> None:
    mixed = MixedLogits(LOGITS, IDS, PLACES, CopyGuess(token, 0.4), temperature)
    expected = np.zeros(8)
    expected[IDS] = 0.6 * softmax(LOGITS, temperature)
    expected[token] += 0.4
    assert softmax(mixed.spread(8), temperature) == pytest.approx(expected, abs=1e-6)
    assert [mixed.likelihood(each) for each in range(8)] == pytest.approx(expected.tolist(), abs=1e-6)


def test_the_best_of_the_mixture_is_copied_or_invented() -> None:
    # 0.3 against 0.35 of token 2; then 0.4 + 0.6 · 0.3 against 0.6 · 0.5.
    assert MixedLogits(LOGITS, IDS, PLACES, CopyGuess(7, 0.3), 0.0).best() == 2
    assert MixedLogits(LOGITS, IDS, PLACES, CopyGuess(7, 0.4), 0.0).best() == 7
    assert MixedLogits(LOGITS, IDS, PLACES, CopyGuess(3, 0.2), 0.0).best() == 3
    assert MixedLogits(LOGITS, IDS, PLACES, CopyGuess(7, 0.2), 0.0).best() == 2
    assert MixedLogits(LOGITS, IDS, PLACES, None, 0.0).best() == 2


def test_long_matches_and_places_that_agree_count_for_more() -> None:
    text = CopiedText()
    text.follow((1, 2, 3, 4, 5, 6, 7, 2, 3))
    assert text.guess((9,)) is None
    short, long = chance(text), chance(text, 4, 5, 6)
    assert 0 < short < long < 1
    agreeing, torn = CopiedText(), CopiedText()
    agreeing.follow((8, 1, 2, 5, 9, 1, 2, 5, 1, 2))
    torn.follow((8, 1, 2, 6, 9, 1, 2, 5, 1, 2))
    assert agreeing.guess(()) == CopyGuess(5, chance(agreeing))
    assert chance(agreeing) > short > chance(torn)


def test_contests_count_where_all_before_them_came_true() -> None:
    known = (1, 2, 3, 4, 5, 1, 2)

    def by_record(*ending: int) -> float:
        """What a contest between 4, copied, and 9 changes where the text goes on like that."""
        text = CopiedText()
        text.follow(known)
        text.contest((3,), 4, 9)
        text.follow((*known, *ending, 1, 2))
        return chance(text, 3) - untried_chance((*known, *ending, 1, 2), 3)

    assert by_record(3, 4) > 0 > by_record(3, 9)
    # Neither was right; and nothing is known behind a token that did not come.
    assert by_record(3, 6) == by_record(8, 9) == by_record(8, 4) == 0


def untried_chance(known: tuple[int, ...], *assumed: int) -> float:
    text = CopiedText()
    text.follow(known)
    return chance(text, *assumed)
