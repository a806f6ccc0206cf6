"""How soon cheats are caught follows from how often audits find them, and from the rate."""

from __future__ import annotations

from shardcompute.bench.trust.catching import always, find_among, simulate


def test_a_cheat_that_every_audit_finds_is_caught_by_the_first() -> None:
    caught = simulate(always("failed"), 0.05, 128, trials=300)
    assert (caught.audits, caught.never) == (1.0, 0.0)
    rarely = simulate(always("failed"), 0.01, 128, trials=300)
    assert rarely.within < caught.within < simulate(always("failed"), 0.2, 128, trials=300).within == 1.0


def test_one_that_audits_find_now_and_then_takes_more_of_them() -> None:
    half = simulate(find_among([True, False]), 0.05, 128, trials=300)
    assert 1.5 < half.audits < 2.5
    assert simulate(find_among([False]), 0.2, 128, trials=3).never == 1.0


def test_rows_that_are_withheld_are_forgiven_once_and_longer_to_the_long_honest() -> None:
    assert simulate(always("withheld"), 0.2, 128, trials=50).audits == 2.0
    assert simulate(always("withheld"), 0.2, 128, trials=50, reputation=0.95).audits == 4.0
