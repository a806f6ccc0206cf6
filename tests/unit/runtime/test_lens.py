"""Lenses: fitted to what they are shown, and refused when they are damaged."""

from __future__ import annotations

import numpy as np
import pytest

from shardcompute.core.errors import CorruptModelError
from shardcompute.runtime.lens import Lens, LensSums, decode_lens, encode_lens

HIDDEN = 12
RANDOM = np.random.default_rng(5)
STATES = RANDOM.standard_normal((400, HIDDEN)).astype(np.float32)
TRUTH = Lens(RANDOM.standard_normal((HIDDEN + 1, HIDDEN)).astype(np.float32))


def test_a_linear_truth_is_found_from_sums_over_batches() -> None:
    sums = LensSums(HIDDEN)
    for rows in np.split(STATES[:300], 6):
        sums.add(rows, TRUTH.apply(rows))
    assert sums.rows == 300
    found, expected = sums.solve().apply(STATES[300:]), TRUTH.apply(STATES[300:])
    assert np.abs(found - expected).max() < 0.05
    assert np.abs(found - expected.mean(0)).max() > 1, "the truth differs from row to row"


def test_the_scale_of_a_state_does_not_matter() -> None:
    assert np.allclose(TRUTH.apply(STATES), TRUTH.apply(7 * STATES), atol=1e-4)


def test_a_lens_travels_as_bytes() -> None:
    arrived = decode_lens(encode_lens(TRUTH), HIDDEN)
    assert np.allclose(arrived.weights, TRUTH.weights, atol=2e-3)


@pytest.mark.parametrize(
    "content", [b"", b"\0", encode_lens(TRUTH)[:-2], b"\xff\x7e" * HIDDEN * (HIDDEN + 1)]
)
def test_damaged_ones_are_refused(content: bytes) -> None:
    with pytest.raises(CorruptModelError, match="no draft head"):
        decode_lens(content, HIDDEN)
