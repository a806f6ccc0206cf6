"""The router in a simulated ring: against plain decoding, and against the best fixed choice. All times simulated."""

from __future__ import annotations

import pytest

from shardcompute.core.generation import Speculation
from support.swarm.ring_lab import DrafterModel, Outcome, Ring, RingLab

FIXED = ((1, 1), (3, 1), (6, 1), (16, 1), (1, 4), (3, 4), (5, 3), (8, 3), (16, 4))
RINGS = {
    20: Ring(wire_s=0.011, stage_row_s=0.0005),
    80: Ring(wire_s=0.070, stage_row_s=0.001),
    200: Ring(wire_s=0.190, stage_row_s=0.001),
}
AUTO, OFF = Speculation(), Speculation("off")


def run(ring: Ring, drafter: DrafterModel, wish: Speculation = AUTO, *, sessions: int = 1) -> Outcome:
    traversal_s = ring.wire_s + ring.stages * ring.stage_s(1)
    return RingLab(ring, drafter, wish, sessions=sessions).run(300 * traversal_s)


def best_fixed(ring: Ring, drafter: DrafterModel) -> float:
    return max(run(ring, drafter, Speculation("ngram", tokens, frames)).rate for tokens, frames in FIXED)


@pytest.mark.parametrize("ring_ms", RINGS)
def test_drafts_that_never_hold_cost_next_to_nothing(ring_ms: int) -> None:
    drafter = DrafterModel(acceptance=0.02)
    assert run(RINGS[ring_ms], drafter).rate >= 0.97 * run(RINGS[ring_ms], drafter, OFF).rate


@pytest.mark.parametrize("acceptance", [0.3, 0.6, 0.8, 0.95])
@pytest.mark.parametrize("ring_ms", RINGS)
def test_one_session_comes_near_the_best_fixed_choice(ring_ms: int, acceptance: float) -> None:
    """Learning included."""
    drafter = DrafterModel(acceptance=acceptance)
    assert run(RINGS[ring_ms], drafter).rate >= 0.9 * best_fixed(RINGS[ring_ms], drafter)


def test_rare_good_drafts_are_used_and_frequent_bad_ones_are_not() -> None:
    mixed = DrafterModel(grades=((0.7, 0, 0.02), (0.3, 3, 0.95)))
    # Rows that cost enough for bad drafts to hurt.
    ring = Ring(wire_s=0.01, stage_row_s=0.002)
    chosen = run(ring, mixed)
    assert chosen.rate > 1.3 * run(ring, mixed, OFF).rate
    assert chosen.rate > max(run(ring, mixed, Speculation("ngram", tokens, 1)).rate for tokens in (2, 4, 8))


def test_a_slow_drafter_pays_on_a_long_ring_and_is_left_alone_on_a_short_one() -> None:
    slow = DrafterModel("model", acceptance=0.6, draft_s=0.012)
    assert run(RINGS[200], slow).rate > 1.6 * run(RINGS[200], slow, OFF).rate
    near = Ring(wire_s=0.002, stage_fixed_s=0.003, stage_row_s=0.0005)
    assert run(near, slow).rate >= 0.97 * run(near, slow, OFF).rate


@pytest.mark.parametrize("acceptance", [0.02, 0.6, 0.95])
def test_many_sessions_on_a_full_pipe_do_not_lose(acceptance: float) -> None:
    full = Ring(wire_s=0.004, stage_fixed_s=0.001, stage_row_s=0.004)
    drafter = DrafterModel(acceptance=acceptance)
    assert run(full, drafter, sessions=16).rate >= 0.97 * run(full, drafter, OFF, sessions=16).rate


def test_many_sessions_gain_where_rows_are_cheap() -> None:
    cheap = Ring(wire_s=0.004, stage_fixed_s=0.010, stage_row_s=0.0005)
    drafter = DrafterModel(acceptance=0.8)
    assert run(cheap, drafter, sessions=16).rate > 1.3 * run(cheap, drafter, OFF, sessions=16).rate


@pytest.mark.parametrize("sessions", [4, 8])
def test_stages_that_share_a_core_are_found_out(sessions: int) -> None:
    """Learning included. By what stages say of themselves drafts would pay: 0.6 to 0.8 of plain came of them."""
    shared = Ring(wire_s=0.08, stages=3, stage_fixed_s=0.001, stage_row_s=0.004, has_one_core=True)
    drafter = DrafterModel(acceptance=0.5)
    rates = [RingLab(shared, drafter, wish, sessions=sessions).run(60).rate for wish in (AUTO, OFF)]
    assert rates[0] >= 0.94 * rates[1]
