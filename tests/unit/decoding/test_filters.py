from __future__ import annotations

import numpy as np
import pytest

from shardcompute.core.generation import Sampling
from shardcompute.decoding.filters import Candidates, build_filters, candidates_of, keep_min_p, keep_top_p


def logits_of(*probabilities: float) -> np.ndarray:
    with np.errstate(divide="ignore"):
        return np.log(np.array(probabilities)).astype(np.float32)


def candidates(*probabilities: float) -> Candidates:
    logits = logits_of(*probabilities)
    return candidates_of(logits, float(logits.max()), 1.0)


def test_candidates_leave_out_forbidden_and_hopeless_tokens() -> None:
    logits = np.array([0, -np.inf, 10, -32, -31], dtype=np.float32)
    assert candidates_of(logits, 10.0, 1.0).ids.tolist() == [0, 2, 4]
    assert candidates_of(logits, 10.0, 0.1).ids.tolist() == [2]
    assert candidates_of(logits, 10.0, 2.0).ids.tolist() == [0, 2, 3, 4]


def test_scores_are_relative_to_the_best_and_divided_by_temperature() -> None:
    found = candidates_of(np.array([3, 1, 2], dtype=np.float32), 3.0, 0.5)
    assert found.scores.tolist() == [0, -4, -2]


def test_infinite_logits_leave_nothing_else() -> None:
    logits = np.array([1, np.inf, 5, np.inf], dtype=np.float32)
    found = candidates_of(logits, np.inf, 1.0)
    assert found.ids.tolist() == [1, 3]
    assert found.scores.tolist() == [0, 0]


@pytest.mark.parametrize("temperature", [1e-300, 1e-7, 2.0])
def test_extreme_logits_and_temperatures_raise_no_warning(temperature: float) -> None:
    lowest = float(np.finfo(np.float32).min)
    logits = np.array([lowest, -lowest, 0, -np.inf], dtype=np.float32)
    assert candidates_of(logits, -lowest, temperature).ids.tolist() == [1]
    assert candidates_of(logits[[0, 3]], lowest, temperature).ids.tolist() == [0]


def test_top_k_prefers_low_ids_among_equals() -> None:
    logits = np.array([1, 2, 1, 3, 1], dtype=np.float32)
    assert candidates_of(logits, 3.0, 1.0, top_k=3).ids.tolist() == [0, 1, 3]
    assert candidates_of(logits, 3.0, 1.0, top_k=99).ids.tolist() == [0, 1, 2, 3, 4]


def test_top_k_never_revives_forbidden_tokens() -> None:
    logits = np.array([-np.inf, 1, -np.inf, -np.inf], dtype=np.float32)
    assert candidates_of(logits, 1.0, 1.0, top_k=3).ids.tolist() == [1]


@pytest.mark.parametrize(
    ("p", "kept"),
    [(0.0, [2]), (0.3, [2]), (0.45, [0, 2]), (0.69, [0, 2]), (0.71, [0, 1, 2]), (0.999, [0, 1, 2, 3])],
)
def test_top_p_keeps_the_fewest_tokens_that_reach_p(p: float, kept: list[int]) -> None:
    assert keep_top_p(candidates(0.3, 0.2, 0.4, 0.1), p).ids.tolist() == kept


def test_top_p_prefers_low_ids_among_equals() -> None:
    assert keep_top_p(candidates(*[0.125] * 8), 0.3).ids.tolist() == [0, 1, 2]


def test_top_p_looks_beyond_the_near_tokens_when_they_hold_too_little() -> None:
    # One token 9 nats above 20,000 equal ones, which hold 71 % of the mass together.
    logits = np.zeros(20_001, dtype=np.float32)
    logits[20_000] = 9.0
    kept = keep_top_p(candidates_of(logits, 9.0, 1.0), 0.5).ids
    total = 20_000 + np.exp(9.0)
    expected = int(np.ceil(0.5 * total - np.exp(9.0)))
    assert abs(kept.size - 1 - expected) <= 1
    assert kept.tolist() == [*range(kept.size - 1), 20_000]


def test_min_p_is_relative_to_the_best() -> None:
    found = candidates(0.5, 0.3, 0.15, 0.05)
    assert keep_min_p(found, 0.2).ids.tolist() == [0, 1, 2]
    assert keep_min_p(found, 1.0).ids.tolist() == [0]


def test_filters_run_top_p_before_min_p_and_skip_neutral_ones() -> None:
    assert build_filters(Sampling(top_k=5)) == ()
    assert len(build_filters(Sampling(top_p=0.9))) == 1
    found = candidates(0.3, 0.2, 0.4, 0.1)
    for keep in build_filters(Sampling(top_p=0.5, min_p=0.6)):
        found = keep(found)
    # Were min-p first, top-p would measure its mass among tokens 0 and 2 alone and keep only 2.
    assert found.ids.tolist() == [0, 2]


def test_top_p_measures_mass_among_what_top_k_left() -> None:
    logits = logits_of(0.3, 0.2, 0.4, 0.1)
    left = candidates_of(logits, float(logits.max()), 1.0, top_k=2)
    assert keep_top_p(left, 0.5).ids.tolist() == [2]  # 0.4 of 0.7
