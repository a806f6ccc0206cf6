"""Simulated attacks on an open pool: seeded, and what the policy is for shows in them."""

from __future__ import annotations

from shardcompute.bench.trust.attacks import PoolAttack, attacks_on, run_attack
from shardcompute.trust.pools import PoolPolicy

SMALL = PoolAttack("greedy", 4, PoolPolicy(), days=4, answers_per_hour=20)


def test_equal_settings_give_equal_results() -> None:
    assert run_attack(SMALL, 1) == run_attack(SMALL, 1)


def test_honest_strangers_are_promoted_and_never_accused() -> None:
    [calm, *others] = attacks_on(SMALL, [2])
    found = run_attack(calm, 1)
    assert found["bad_answers"] == found["honest_expelled"] == 0
    assert found["hours_to_promotion"] >= 24
    assert len(others) == 10


def test_a_new_key_gains_nothing() -> None:
    """Each network gets two keys in a month, and each key one answer, or a few that cannot be audited."""
    found = run_attack(SMALL, 2)
    assert found["keys"] <= 2 * SMALL.networks
    assert found["expelled"] == found["keys"]
    assert found["bad_answers"] <= 1.5 * found["keys"]
    assert found["promoted"] == 0
