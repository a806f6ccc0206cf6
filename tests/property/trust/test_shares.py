"""Shares of any numbers: joined they give the products within the stated bound, alone they are nobody's, and a wrong
product is refused."""

from __future__ import annotations

import os

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as st_numpy

from shardcompute.trust.shares import ring
from shardcompute.trust.shares.fixed_point import (
    Ring,
    RingMatrix,
    decode_products,
    encode_matrix,
    encode_rows,
    error_bound,
    row_shape,
)
from shardcompute.trust.shares.freivalds import CHECKS, make_check
from shardcompute.trust.shares.ring import join, multiply, split

Float32 = npt.NDArray[np.float32]
MOST = float(np.float32(1e15))
ELEMENTS = st.one_of(
    st.floats(-4, 4, width=32),
    st.sampled_from([0.0, -0.0, 1e4, -1e4, 1e-40, -1e-45, 65504.0]),
    st.floats(-MOST, MOST, width=32),
)


@st.composite
def maps_and_rows(draw: st.DrawFn) -> tuple[Float32, Float32]:
    outputs, inputs, rows = draw(st.integers(1, 9)), draw(st.integers(1, 33)), draw(st.integers(1, 4))
    shapes = (outputs, inputs), (rows, inputs)
    one, other = (draw(st_numpy.arrays(np.float32, shape, elements=ELEMENTS)) for shape in shapes)
    return one, other


def by_python(rows: Ring, matrix: RingMatrix) -> list[list[int]]:
    weights = [[int(each) for each in row] for row in matrix.integers]
    numbers = [[int(each) for each in row] for row in rows]
    return [
        [sum(x * w for x, w in zip(row, weight, strict=True)) % (1 << 64) for weight in weights]
        for row in numbers
    ]


@settings(max_examples=60, deadline=None)
@given(maps_and_rows())
def test_joined_products_are_within_the_bound(drawn: tuple[Float32, Float32]) -> None:
    weights, rows = drawn
    matrix = encode_matrix(weights)
    shape = row_shape(matrix)
    encoded = encode_rows(rows, shape)
    one, other = split(encoded.integers)
    found = decode_products(join(multiply(one, matrix), multiply(other, matrix)), encoded, shape)
    exact = rows.astype(np.float64) @ weights.astype(np.float64).T
    assert (np.abs(found - exact) <= error_bound(rows, encoded, shape)).all()


@settings(max_examples=40, deadline=None)
@given(maps_and_rows(), st.integers(0, 2**32 - 1))
def test_multiplying_is_that_of_whole_numbers(drawn: tuple[Float32, Float32], seed: int) -> None:
    matrix = encode_matrix(drawn[0])
    rows = np.random.default_rng(seed).integers(0, 1 << 64, (2, matrix.inputs), dtype=np.uint64)
    assert multiply(rows, matrix).tolist() == by_python(rows, matrix)


def test_sums_of_many_columns_are_exact_at_their_largest() -> None:
    matrix = encode_matrix(np.ones((2, 40_000), np.float32))
    rows = np.full((1, 40_000), (1 << 64) - 1, dtype=np.uint64)
    assert multiply(rows, matrix).tolist() == by_python(rows, matrix)


def test_products_at_the_largest_do_not_wrap() -> None:
    weights = np.ones((1, 5000), np.float32)
    matrix = encode_matrix(weights)
    shape = row_shape(matrix)
    rows = np.full((1, 5000), 3.0, np.float32)
    encoded = encode_rows(rows, shape)
    assert decode_products(multiply(encoded.integers, matrix), encoded, shape)[0, 0] == 15_000


def test_a_row_of_float32_keeps_nearly_all_of_its_bits() -> None:
    chance = np.random.default_rng(1)
    weights = chance.standard_normal((96, 576)).astype(np.float32)
    rows = chance.standard_normal((4, 576)).astype(np.float32)
    matrix = encode_matrix(weights)
    shape = row_shape(matrix)
    encoded = encode_rows(rows, shape)
    found = decode_products(multiply(encoded.integers, matrix), encoded, shape)
    exact = rows.astype(np.float64) @ weights.astype(np.float64).T
    assert np.abs(found - exact).max() < 5e-5
    assert error_bound(rows, encoded, shape).max() < 2e-3


def test_a_share_is_uniform_whatever_is_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of the two is a bijection of the drawn pad, so its distribution is the pad's: for any value there is exactly
    one pad that gives a seen share."""
    pads = np.arange(64, dtype=np.uint64)
    for value in (0, 1, 7, (1 << 64) - 1):
        monkeypatch.setattr(os, "urandom", lambda size: pads.tobytes())
        first, second = split(np.full(64, value, dtype=np.uint64))
        assert first.tolist() == pads.tolist()
        assert sorted(second.tolist()) == sorted((value - pad) % (1 << 64) for pad in range(64))


def test_shares_of_one_row_differ_each_time_and_have_all_bits() -> None:
    zeros = np.zeros(4096, dtype=np.uint64)
    one, other = split(zeros)
    again, _ = split(zeros)
    assert not np.array_equal(one, again)
    for share in (one, other):
        bits = np.unpackbits(share.view(np.uint8)).mean()
        assert 0.49 < bits < 0.51
        assert abs(np.corrcoef(share.astype(np.float64), np.arange(4096))[0, 1]) < 0.1
    assert not ring.join(one, other).any()


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from([1, 1 << 20, 1 << 32, 1 << 62, 1 << 63]))
def test_a_wrong_product_is_refused(seed: int, error: int) -> None:
    chance = np.random.default_rng(seed)
    matrix = encode_matrix(chance.standard_normal((12, 20)).astype(np.float32))
    check = make_check(matrix)
    rows = chance.integers(0, 1 << 64, (3, 20), dtype=np.uint64)
    products = multiply(rows, matrix)
    assert check.accepts(rows, products)
    wrong = products.copy()
    row, column = chance.integers(3), chance.integers(12)
    wrong[row : row + 1, column : column + 1] += np.uint64(error)
    assert not check.accepts(rows, wrong)
    assert not check.accepts(rows, products[:, :-1])


def test_one_vector_misses_the_worst_error_half_of_the_time() -> None:
    """The error that wraps soonest, 2^63: the stated probability is met, and not better by accident."""
    chance = np.random.default_rng(5)
    matrix = encode_matrix(chance.standard_normal((2000, 4)).astype(np.float32))
    check = make_check(matrix)
    missed = (check.bits << np.uint64(63)) == 0
    assert missed.shape == (2000, CHECKS)
    assert 0.48 < missed.mean() < 0.52


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_numbers_that_are_none_are_refused(bad: float) -> None:
    weights = np.ones((2, 3), np.float32)
    with pytest.raises(ValueError, match="finite"):
        encode_matrix(np.where(np.eye(2, 3) > 0, bad, weights).astype(np.float32))
    with pytest.raises(ValueError, match="finite"):
        encode_rows(np.full((1, 3), bad, np.float32), row_shape(encode_matrix(weights)))


def test_digests_tell_maps_apart() -> None:
    weights = np.random.default_rng(2).standard_normal((4, 8)).astype(np.float32)
    changed = weights.copy()
    changed[1, 2] += np.float32(1e-3)
    assert encode_matrix(weights).digest() == encode_matrix(weights.copy()).digest()
    assert len({encode_matrix(each).digest() for each in (weights, changed, 2 * weights)}) == 3
