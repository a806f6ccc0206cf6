"""Draws, distances, thresholds, reputations and judgements: numbers in, numbers out."""

from __future__ import annotations

import numpy as np
import pytest

from shardcompute.trust.calibration import calibrate, tail_probability
from shardcompute.trust.distributions import FAR_GAP, ScoredPick, mean_gap, mean_kl, mean_tv
from shardcompute.trust.draws import commit_secret, draw_number, is_drawn
from shardcompute.trust.fingerprints import (
    RowFingerprint,
    fingerprint_distance,
    fingerprint_rows,
    peak_distance,
    row_distance,
)
from shardcompute.trust.judgement import contradiction, judge, withheld
from shardcompute.trust.reputation import NEW, after_audit, audit_rate, is_expelled
from shardcompute.trust.thresholds import gap_limit, peak_limit, row_limit

RNG = np.random.default_rng(3)
ROWS = RNG.standard_normal((32, 200)).astype(np.float32)
FLOATS = ("float32", "float32")


def test_draws_depend_on_the_secret_and_on_what_was_signed() -> None:
    numbers = [draw_number(b"s" * 32, str(at).encode()) for at in range(4000)]
    assert numbers == [draw_number(b"s" * 32, str(at).encode()) for at in range(4000)]
    assert 0.45 < float(np.mean(numbers)) < 0.55
    assert draw_number(b"t" * 32, b"0") != numbers[0]
    drawn = sum(is_drawn(b"s" * 32, str(at).encode(), 0.05) for at in range(4000))
    assert 140 < drawn < 260
    assert not is_drawn(b"s" * 32, b"x", 0.0)
    assert is_drawn(b"s" * 32, b"x", 1.0)
    assert commit_secret(b"s" * 32) != commit_secret(b"t" * 32)


def test_a_fingerprint_knows_its_own_rows_and_no_others() -> None:
    small = fingerprint_rows(ROWS)
    assert small.size_bytes < ROWS.nbytes / 8
    assert fingerprint_distance(small, ROWS) < 1e-3, "float16 is all that is lost"
    near = ROWS + np.float32(0.01) * RNG.standard_normal(ROWS.shape).astype(np.float32)
    far = ROWS + np.float32(0.5) * RNG.standard_normal(ROWS.shape).astype(np.float32)
    assert fingerprint_distance(small, near) < 0.02 < fingerprint_distance(small, far)
    assert fingerprint_distance(small, ROWS[:31]) == np.inf
    assert fingerprint_distance(small, np.full_like(ROWS, np.nan)) == np.inf
    again = RowFingerprint.from_bytes(small.to_bytes())
    assert fingerprint_distance(again, ROWS) == fingerprint_distance(small, ROWS)
    with pytest.raises(ValueError, match="fingerprint"):
        RowFingerprint.from_bytes(small.to_bytes()[:-1])


def test_distances_are_nothing_between_equals_and_grow_with_noise() -> None:
    noise = RNG.standard_normal(ROWS.shape).astype(np.float32)
    assert row_distance(ROWS, ROWS) == 0.0
    assert row_distance(ROWS + np.float32(0.05) * noise, ROWS) == pytest.approx(0.05, rel=0.2)
    assert row_distance(ROWS[:, :100], ROWS) == np.inf
    assert mean_kl(ROWS, ROWS) == mean_tv(ROWS, ROWS) == 0.0
    assert 0 < mean_kl(ROWS, ROWS + noise) < mean_kl(ROWS, ROWS + 3 * noise)
    assert 0 < mean_tv(ROWS, ROWS + noise) < mean_tv(ROWS, ROWS + 3 * noise) < 1


def test_the_gap_of_a_pick_is_by_how_much_it_was_beaten() -> None:
    assert ScoredPick(1, 2.0, {1: 2.0, 2: 1.0}).gap == 0.0
    assert ScoredPick(2, 1.0, {1: 2.5}).gap == 1.5
    assert ScoredPick(3, None, {1: 2.5}).gap == FAR_GAP
    assert mean_gap([ScoredPick(1, 2.0, {2: 2.0}), ScoredPick(1, 1.0, {2: 2.0})]) == 0.5


def test_thresholds_leave_room_beyond_what_was_measured() -> None:
    honest = np.exp(RNG.normal(-4, 0.1, 2000)).tolist()
    found = calibrate(honest[:1000], 1e-4)
    assert found.limit > max(honest[:1000])
    assert not any(found.is_beyond(each) for each in honest[1000:])
    assert found.is_beyond(3 * max(honest))
    assert found.is_beyond(float("nan"))
    assert tail_probability(honest, found.limit) < 1e-3 < tail_probability(honest, float(np.median(honest)))
    with pytest.raises(ValueError, match="too few"):
        calibrate(honest[:5], 1e-4)


def test_limits_are_known_of_measured_pairs_alone() -> None:
    limit = row_limit("onnx", "torch", FLOATS, "exact", 10)
    assert limit is not None
    assert row_limit("torch", "onnx", FLOATS, "exact", 5) == limit
    assert row_limit("onnx", "torch", FLOATS, "exact", 30) == 3 * limit
    assert row_limit("onnx", "mlx", FLOATS, "exact", 10) is None
    assert row_limit("onnx", "torch", ("float32", "bfloat16"), "exact", 10) is None
    assert row_limit("onnx", "torch", FLOATS, "unheard of", 10) is None
    assert gap_limit("onnx", "torch", FLOATS) is not None
    assert gap_limit("onnx", "llamacpp", FLOATS) is None


def test_reputation_falls_fast_and_grows_slowly() -> None:
    grown = NEW
    for _ in range(40):
        grown = after_audit(grown, "passed")
    assert 0.85 < grown < 1.0
    assert is_expelled(after_audit(grown, "failed"))
    halved = after_audit(grown, "withheld")
    assert not is_expelled(halved)
    assert is_expelled(after_audit(after_audit(NEW, "disputed"), "withheld"))
    assert audit_rate(0.05, NEW) > 5 * audit_rate(0.05, 1.0) == pytest.approx(0.25)
    assert audit_rate(0.9, 0.0) == 1.0
    assert audit_rate(0.0, 0.0) == 0.0


def test_blame_falls_on_whom_a_third_contradicts() -> None:
    def blamed(judgement: object) -> list[tuple[str, str]]:
        return [(each.node, each.finding) for each in judgement.blames]  # type: ignore[attr-defined]

    assert blamed(judge("b", "c", "near")) == [("b", "passed")]
    assert judge("b", "c", "unknown").outcome == "inconclusive"
    guilty = judge("b", "c", "far", arbiter="a", against_audited="far", against_auditor="equal")
    assert (guilty.outcome, blamed(guilty)) == ("failed", [("b", "failed")])
    slander = judge("b", "c", "far", arbiter="a", against_audited="equal", against_auditor="far")
    assert (slander.outcome, blamed(slander)) == ("passed", [("b", "passed"), ("c", "failed")])
    for alone in (
        judge("b", "c", "far"),
        judge("b", "c", "far", arbiter="a", against_audited="far", against_auditor="far"),
    ):
        assert blamed(alone) == [("b", "disputed"), ("c", "disputed")]
    assert blamed(contradiction("a", "b", "")) == [("a", "disputed"), ("b", "disputed")]
    assert blamed(withheld("a", "")) == [("a", "withheld")]


def test_a_single_row_that_is_far_off_shows_in_the_peak_and_not_in_the_median() -> None:
    sent = ROWS.copy()
    sent[7] = -sent[7]
    assert row_distance(sent, ROWS) == 0.0
    assert peak_distance(sent, ROWS) == pytest.approx(2.0)
    assert peak_distance(ROWS, ROWS) == 0.0
    assert peak_distance(np.full_like(ROWS, np.nan), ROWS) == np.inf
    assert peak_distance(ROWS[:, :100], ROWS) == np.inf
    limit, peak = (of("onnx", "torch", FLOATS, "int8", 10) for of in (row_limit, peak_limit))
    assert limit is not None
    assert peak is not None
    assert limit < peak < 0.16, "the median row of windows with one layer skipped is further off than that"
    assert peak_limit("onnx", "mlx", FLOATS, "int8", 10) is None
