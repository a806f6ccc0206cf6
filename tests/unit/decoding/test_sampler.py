from __future__ import annotations

import math

import numpy as np
import pytest

from shardcompute.core.errors import BackendError
from shardcompute.core.generation import Sampling, TokenChoice
from shardcompute.decoding import TokenHistory, build_sampler, choose_token, derive_seed, gumbel_noise

NOTHING = TokenHistory()


def draw_counts(logits: np.ndarray, sampling: Sampling, draws: int) -> np.ndarray:
    sample = build_sampler(sampling)
    return np.bincount([sample(logits, NOTHING, at).id for at in range(draws)], minlength=logits.size)


def test_greedy_takes_the_lowest_of_the_best() -> None:
    assert choose_token(np.array([0, 5, 5], dtype=np.float32), Sampling(), NOTHING, 3) == TokenChoice(1)


def test_a_draw_is_the_argmax_of_scaled_logits_plus_noise() -> None:
    logits = np.random.default_rng(0).normal(size=50_000).astype(np.float32) * 3  # more than one block
    for position in range(20):
        noise = gumbel_noise(11, position, np.arange(logits.size))
        expected = int(np.argmax(logits / 0.7 + noise))
        assert choose_token(logits, Sampling(temperature=0.7, seed=11), NOTHING, position).id == expected


def test_draws_follow_the_softmax() -> None:
    logits = np.array([2.0, 1.0, 0.0, -1.0, 1.5], dtype=np.float32)
    counts = draw_counts(logits, Sampling(temperature=1.3, seed=5), 5000)
    expected = np.exp(logits / 1.3) / np.exp(logits / 1.3).sum() * 5000
    assert ((counts - expected) ** 2 / expected).sum() < 18.5  # chi-square, 4 degrees of freedom, p = 0.001


def test_filters_bound_what_is_drawn() -> None:
    logits = np.log(np.array([0.3, 0.2, 0.4, 0.1])).astype(np.float32)
    assert np.flatnonzero(draw_counts(logits, Sampling(temperature=1.0, top_k=2), 200)).tolist() == [0, 2]
    assert np.flatnonzero(draw_counts(logits, Sampling(temperature=1.0, top_p=0.8), 200)).tolist() == [
        0,
        1,
        2,
    ]
    assert np.flatnonzero(draw_counts(logits, Sampling(temperature=1.0, min_p=0.7), 200)).tolist() == [0, 2]
    assert np.flatnonzero(draw_counts(logits, Sampling(temperature=1.0), 200)).tolist() == [0, 1, 2, 3]


def test_a_filter_that_keeps_the_winner_does_not_change_it() -> None:
    logits = np.random.default_rng(2).normal(size=3000).astype(np.float32) * 4
    plain = build_sampler(Sampling(temperature=1.0, seed=8))
    narrow = build_sampler(Sampling(temperature=1.0, seed=8, top_k=2999, top_p=0.999999, min_p=1e-9))
    assert [plain(logits, NOTHING, at).id for at in range(50)] == [
        narrow(logits, NOTHING, at).id for at in range(50)
    ]


def test_an_almost_zero_temperature_is_greedy() -> None:
    logits = np.array([1.0, 1.001, 0.5], dtype=np.float32)
    assert choose_token(logits, Sampling(temperature=1e-12), NOTHING, 0).id == 1


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_infinite_logits_win_and_forbidden_tokens_never_do(temperature: float) -> None:
    sampling = Sampling(temperature=temperature, logprobs=2)
    certain = choose_token(np.array([9, np.inf, 9], dtype=np.float32), sampling, NOTHING, 0)
    assert certain == TokenChoice(1, 0.0, ((1, 0.0),))
    only = choose_token(np.array([-np.inf, -np.inf, -50], dtype=np.float32), sampling, NOTHING, 0)
    assert only == TokenChoice(2, 0.0, ((2, 0.0),))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_broken_logits_name_the_position(temperature: float) -> None:
    sampling = Sampling(temperature=temperature)
    for bad in (np.nan, -np.inf):
        with pytest.raises(BackendError, match="position 77"):
            choose_token(np.full(8, bad, dtype=np.float32), sampling, NOTHING, 77)


def test_logprobs_come_after_penalties_and_before_temperature_and_filters() -> None:
    history = TokenHistory()
    history.append(0)
    logits = np.array([3.0, 1.0, 1.0], dtype=np.float32)
    sampling = Sampling(temperature=0.5, top_k=1, presence_penalty=2.0, logprobs=3)
    choice = choose_token(logits, sampling, history, 1)
    third = pytest.approx(-math.log(3))
    assert choice.logprob == third
    assert choice.alternatives == ((0, third), (1, third), (2, third))


def test_inputs_are_left_alone() -> None:
    logits = np.array([3.0, 1.0, 2.0], dtype=np.float32)
    logits.flags.writeable = False
    history = TokenHistory([0])
    sampling = Sampling(temperature=1.0, repetition_penalty=1.5, logit_bias={1: 5.0}, logprobs=1)
    choose_token(logits, sampling, history, 1)
    assert logits.tolist() == [3, 1, 2]
    assert len(history) == 1


def test_several_choices_are_different_draws() -> None:
    logits = np.zeros(1000, dtype=np.float32)
    picks = {
        choose_token(logits, Sampling(temperature=1.0, seed=derive_seed(4, index)), NOTHING, 0).id
        for index in range(20)
    }
    assert len(picks) > 15
