from __future__ import annotations

import math

import numpy as np
import pytest

from shardcompute.core.errors import BackendError
from shardcompute.decoding.logprobs import score_token


def test_scores_are_a_log_softmax() -> None:
    logits = np.random.default_rng(1).normal(size=5000).astype(np.float32) * 4 + 100
    wide = logits.astype(np.float64)
    expected = wide - wide.max() - math.log(np.exp(wide - wide.max()).sum())
    choice = score_token(logits, 17, 3, 0)
    assert choice.id == 17
    assert choice.logprob == pytest.approx(expected[17], abs=1e-4)
    order = np.argsort(-wide)[:3]
    assert [token for token, _ in choice.alternatives] == order.tolist()
    assert [value for _, value in choice.alternatives] == pytest.approx(expected[order].tolist(), abs=1e-4)


def test_equal_alternatives_are_ordered_by_id() -> None:
    choice = score_token(np.array([1, 2, 2, 1], dtype=np.float32), 0, 4, 0)
    assert [token for token, _ in choice.alternatives] == [1, 2, 0, 3]


def test_zero_alternatives_still_score_the_token() -> None:
    choice = score_token(np.zeros(4, dtype=np.float32), 2, 0, 0)
    assert choice.alternatives == ()
    assert choice.logprob == pytest.approx(-math.log(4))


def test_forbidden_tokens_are_no_alternatives() -> None:
    choice = score_token(np.array([-np.inf, 0, -np.inf], dtype=np.float32), 0, 3, 0)
    assert choice.logprob == -math.inf
    assert choice.alternatives == ((1, 0.0),)


def test_infinite_logits_share_all_probability() -> None:
    choice = score_token(np.array([np.inf, 3, np.inf], dtype=np.float32), 0, 3, 0)
    assert choice.logprob == pytest.approx(-math.log(2))
    assert [token for token, _ in choice.alternatives] == [0, 2]


def test_opposite_extremes_raise_no_warning() -> None:
    highest = np.finfo(np.float32).max
    assert score_token(np.array([highest, -highest], dtype=np.float32), 0, 1, 0).logprob == 0.0


def test_nan_names_the_position() -> None:
    with pytest.raises(BackendError, match="position 4"):
        score_token(np.array([np.nan, 1], dtype=np.float32), 1, 0, 4)
