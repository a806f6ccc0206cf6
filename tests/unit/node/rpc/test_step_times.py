"""Deadlines of steps follow from what steps took: generous, never below a floor, long for what was never tried."""

from __future__ import annotations

import math

import pytest

from shardcompute.node.rpc.step_times import OverdueStep, Patience, StepDeadlines, StepTimes

PATIENCE = Patience(floor_s=2.0, factor=8.0, cold_s=30.0)


def test_what_was_never_tried_may_take_long() -> None:
    times = StepTimes(PATIENCE)
    assert times.allowed_s(1) == 30.0
    times.observe(1, 0.01)
    assert times.allowed_s(1) == 2.0
    assert times.allowed_s(500) == pytest.approx(8 * 5.0), (
        "a long prompt after single tokens: as many of these"
    )
    times.observe(500, 0.4)
    assert times.allowed_s(500) < 8.0


def test_slow_steps_are_given_many_times_what_they_took() -> None:
    times = StepTimes(PATIENCE)
    for _ in range(20):
        times.observe(1, 3.0)
    assert times.allowed_s(1) == pytest.approx(24.0)


def test_rows_and_what_is_before_them_count() -> None:
    times = StepTimes(PATIENCE)
    for rows in (1, 64, 128) * 5:
        times.observe(rows, 0.1 + 0.1 * rows)
    alone, behind = times.allowed_s(64), times.allowed_s(64, rows_ahead=128)
    assert alone == pytest.approx(8 * 6.5, rel=0.1)
    assert behind == pytest.approx(8 * 19.3, rel=0.1)


def test_waiting_for_others_counts_for_a_while() -> None:
    times = StepTimes(PATIENCE)
    times.observe(1, 0.01, queue_s=5.0)
    assert times.allowed_s(1) == pytest.approx(8 * 5.01)
    for _ in range(100):
        times.observe(1, 0.01)
    assert times.allowed_s(1) == 2.0


@pytest.mark.parametrize("seconds", [-1.0, math.nan])
def test_nonsense_teaches_nothing(seconds: float) -> None:
    times = StepTimes(PATIENCE)
    times.observe(1, seconds)
    times.observe(0, 1.0)
    assert times.allowed_s(1) == 30.0


def test_a_step_is_overdue_once_then_again_after_twice_as_long() -> None:
    deadlines = StepDeadlines(PATIENCE)
    deadlines.sent(1, 1, now_s=0.0)
    deadlines.landed(1, 0.01, 0.0)
    assert deadlines.next_look_s(5.0) is None
    deadlines.sent(2, 1, now_s=10.0)
    deadlines.sent(3, 1, now_s=11.0)
    assert deadlines.next_look_s(10.5) == pytest.approx(1.5)
    assert deadlines.overdue(11.9) == []
    assert deadlines.overdue(12.0) == [OverdueStep(2, 2.0, 2.0)]
    assert deadlines.overdue(12.5) == []
    assert deadlines.overdue(13.0) == [OverdueStep(3, 2.0, 2.0)]
    assert deadlines.overdue(14.0) == [OverdueStep(2, 4.0, 2.0)]
    deadlines.landed(2, 4.5, 0.0)
    deadlines.drop(3)
    assert deadlines.next_look_s(15.0) is None


def test_nothing_is_awaited_of_a_chain_that_is_gone() -> None:
    deadlines = StepDeadlines(PATIENCE)
    deadlines.sent(1, 1, now_s=0.0)
    deadlines.clear()
    assert deadlines.next_look_s(0.0) is None
    assert deadlines.overdue(1000.0) == []
