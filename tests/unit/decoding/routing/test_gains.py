"""The arithmetic of speculation, checked against cases that can be worked out by hand."""

from __future__ import annotations

import pytest

from shardcompute.decoding.routing.gains import RoundCosts, mix, net_rate, plain_rate, prospects


def costs(**changes: float) -> RoundCosts:
    usual = {"fixed_s": 0.1, "row_s": 0.0, "stage_fixed_s": 0.0, "stage_row_s": 0.0, "draft_s": 0.0}
    counts = {"sessions": 1, "circulating": 1}
    return RoundCosts(**{**usual, **counts, **changes})  # type: ignore[arg-type]


def test_prospects_multiply_chances() -> None:
    last = prospects([0.5, 0.8])[-1]
    assert (last.rows, last.accepted, last.whole, last.onward) == (
        2.0,
        pytest.approx(0.9),
        pytest.approx(0.4),
        0.8,
    )
    mixed = mix([(0.5, last), (0.3, prospects([0.5])[0])])
    assert (mixed.rows, mixed.accepted, mixed.whole) == (1.0, pytest.approx(0.45), pytest.approx(0.2))
    assert (mixed.onward, mixed.offered) == (pytest.approx(0.8), 0.5)


def test_free_rows_are_a_gain_and_dear_rows_are_not() -> None:
    draft = prospects([0.5])[-1]
    assert plain_rate(costs()) == pytest.approx(10.0)
    assert net_rate(costs(), 1, draft) == pytest.approx(15.0)
    dear = costs(fixed_s=0.0, row_s=0.1)
    assert net_rate(dear, 1, draft) == pytest.approx(7.5)


def test_drafting_time_counts_and_is_shared_by_all_sessions() -> None:
    draft = prospects([0.5])[-1]
    assert net_rate(costs(draft_s=0.1), 1, draft) == pytest.approx(7.5)
    many = costs(draft_s=0.1, sessions=8, circulating=8)
    assert net_rate(many, 1, draft) == pytest.approx(1.5 / 0.8)


def test_what_is_drafted_ahead_is_not_waited_for_where_it_is_of_use() -> None:
    draft = prospects([0.9, 0.8])[1]
    # Nine times in ten the draft holds, and of these eight times in ten the token behind it.
    waited = 0.1 * (1 - 0.72)
    assert net_rate(costs(draft_s=0.1, drafts_ahead=True), 1, draft) == pytest.approx(1.9 / (0.1 + waited))
    many = costs(draft_s=0.1, sessions=8, circulating=8, drafts_ahead=True)
    assert net_rate(many, 1, draft) == pytest.approx(1.9 / 0.8), "one drafts for all"


def test_a_second_frame_helps_only_if_the_first_is_wholly_accepted() -> None:
    ring = costs(stage_fixed_s=0.002, stage_row_s=0.0005, row_s=0.001)
    likely, unlikely = prospects([0.95] * 4)[-1], prospects([0.3] * 4)[-1]
    assert net_rate(ring, 4, likely, 2) > 1.3 * net_rate(ring, 4, likely)
    assert net_rate(ring, 4, unlikely, 2) < 1.03 * net_rate(ring, 4, unlikely)


def test_frames_that_the_slowest_stage_cannot_take_do_not_help() -> None:
    busy = costs(stage_fixed_s=0.05, fixed_s=0.1)
    draft = prospects([0.9] * 4)[-1]
    assert net_rate(busy, 4, draft, 4) < net_rate(busy, 4, draft, 2)


def test_rows_are_priced_by_what_others_lose() -> None:
    draft = prospects([0.8])[-1]
    # A stage whose time is all rows, kept busy by sixteen sessions: a row for us is a token less for others.
    full = costs(fixed_s=0.0, row_s=0.02, stage_row_s=0.01, sessions=16, circulating=2)
    assert net_rate(full, 1, draft) < plain_rate(full)
    # The same stage in a ring so long that it idles.
    idle = costs(fixed_s=10.0, row_s=0.02, stage_row_s=0.01, sessions=16, circulating=16)
    assert net_rate(idle, 1, draft) > 1.5 * plain_rate(idle)
