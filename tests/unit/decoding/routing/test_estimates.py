"""Live estimates: they start from priors, follow what is seen, and forget."""

from __future__ import annotations

import random

import pytest

from shardcompute.decoding.routing.estimates import Acceptance, DraftTimes, LineFit, RingTimes, WireFloor


def test_acceptance_starts_with_better_chances_for_better_grades() -> None:
    acceptance = Acceptance()
    chances = [acceptance.chances(1, "ngram", grade, 1)[0] for grade in range(4)]
    assert chances == sorted(chances)
    assert chances[0] < chances[3]


def test_acceptance_follows_what_is_seen_by_drafter_and_grade() -> None:
    acceptance = Acceptance()
    before = acceptance.chances(1, "model", 1, 4)
    for _ in range(100):
        acceptance.observe(1, "ngram", 3, 4, 0)
        acceptance.observe(1, "ngram", 2, 4, 4)
    assert acceptance.chances(9, "ngram", 3, 1)[0] < 0.1
    assert acceptance.chances(9, "ngram", 2, 4)[3] > 0.9
    assert acceptance.chances(1, "model", 1, 4) == before


def test_positions_are_told_apart() -> None:
    acceptance = Acceptance()
    for _ in range(200):
        acceptance.observe(1, "model", 1, 3, 1)  # the first always holds, the second never
    first, second = acceptance.chances(2, "model", 1, 2)
    assert first > 0.85
    assert second < 0.15


def test_tokens_after_the_first_failure_say_nothing() -> None:
    long, short = Acceptance(), Acceptance()
    for _ in range(20):
        long.observe(1, "ngram", 1, 16, 1)
        short.observe(1, "ngram", 1, 2, 1)
    assert long.chances(1, "ngram", 1, 16) == short.chances(1, "ngram", 1, 16)
    assert long.overall()["ngram"] == pytest.approx(1 / 16, rel=0.3)


def test_a_session_leans_away_from_all_others() -> None:
    acceptance = Acceptance()
    for _ in range(40):
        for session in (1, 2, 3):
            acceptance.observe(session, "ngram", 2, 1, 1)
        acceptance.observe(4, "ngram", 2, 1, 0)
    usual, unlucky = (acceptance.chances(session, "ngram", 2, 1)[0] for session in (9, 4))
    assert unlucky < usual - 0.2
    acceptance.forget(4)
    assert acceptance.chances(4, "ngram", 2, 1)[0] == usual


def test_old_observations_fade() -> None:
    acceptance = Acceptance()
    for held in (1, 0):
        for _ in range(2000):
            acceptance.observe(1, "ngram", 1, 1, held)
    assert acceptance.chances(2, "ngram", 1, 1)[0] < 0.1


def test_a_line_is_found_among_noise() -> None:
    chance, fit = random.Random(1), LineFit(row_share=0.1)
    for _ in range(400):
        rows = chance.choice((1, 2, 5, 9, 17))
        fit.observe(rows, (0.02 + 0.003 * rows) * chance.uniform(0.95, 1.05))
    fixed, slope = fit.line()
    assert fixed == pytest.approx(0.02, rel=0.15)
    assert slope == pytest.approx(0.003, rel=0.15)


def test_without_variety_the_slope_is_assumed() -> None:
    fit = LineFit(row_share=0.1)
    assert not fit.is_known
    assert fit.at(3) == 0.0
    for _ in range(50):
        fit.observe(1, 0.01)
    assert fit.at(1) == pytest.approx(0.01)
    assert fit.line()[1] == pytest.approx(0.001, rel=0.05)


def test_no_line_falls_or_starts_below_zero() -> None:
    falling, steep = LineFit(row_share=0.1), LineFit(row_share=0.1)
    for _ in range(30):
        falling.observe(1, 0.02)
        falling.observe(9, 0.01)
        steep.observe(4, 0.004)
        steep.observe(9, 0.030)
    assert falling.line()[1] == 0.0
    assert min(steep.line()) >= 0.0


def test_queues_are_not_mistaken_for_distance() -> None:
    wire = WireFloor()
    for turn in range(300):
        wire.observe(1, 0.05 + (0.0 if turn % 7 == 0 else 0.4))
    assert wire.line()[0] == pytest.approx(0.05, rel=0.15)
    for _ in range(3000):
        wire.observe(1, 0.2)
    assert wire.line()[0] == pytest.approx(0.2, rel=0.05)


def test_wire_time_of_rows_is_found_from_frames_of_different_sizes() -> None:
    wire = WireFloor()
    for _ in range(100):
        for rows in (1, 4, 16, 64):
            wire.observe(rows, 0.03 + 0.001 * rows)
    assert wire.line() == pytest.approx((0.03, 0.001), rel=0.01)


def test_the_slowest_stage_depends_on_the_rows() -> None:
    ring = RingTimes()
    for _ in range(200):
        for rows in (1, 8, 32):
            stages = [0.010 + 0.0001 * rows, 0.002 + 0.001 * rows]
            ring.observe(rows, 0.05 + sum(stages), stages)
    assert ring.bottleneck(1)[0] == pytest.approx(0.010, rel=0.1)
    assert ring.bottleneck(32)[1] == pytest.approx(0.001, rel=0.1)
    assert ring.ring() == pytest.approx((0.062, 0.0011), rel=0.1)


def test_another_shape_of_the_chain_is_measured_anew() -> None:
    ring = RingTimes()
    for _ in range(100):
        ring.observe(1, 0.5, [0.1, 0.1])
    ring.observe(1, 0.05, [0.01, 0.01, 0.01])
    assert sum(ring.ring()) == pytest.approx(0.05)


def test_draft_times_follow_what_is_seen() -> None:
    times = DraftTimes()
    assert times.per_token_s("ngram") < times.per_token_s("model")
    for _ in range(50):
        times.observe("model", 0.08, 8)
    times.observe("model", 1.0, 0)
    assert times.per_token_s("model") == pytest.approx(0.01, rel=0.01)
