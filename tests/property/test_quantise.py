"""Quantisation of any finite weights: bounded errors, grids found again, slices that equal the whole."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from shardcompute.backends.matrix import BlockMatrix, DenseMatrix, Float32, Matrix, MixedMatrix
from shardcompute.weights.formats.quantise import convert

FORMS = st.sampled_from(["int8", "int4"])


@st.composite
def weight_rows(draw: st.DrawFn) -> Float32:
    """Random weights of very different magnitudes, some of them replaced by numbers of hypothesis' own."""
    rows, blocks = draw(st.integers(1, 9)), draw(st.integers(1, 6))
    random = np.random.default_rng(draw(st.integers(0, 1 << 32)))
    magnitudes = 10.0 ** random.integers(-12, 12, (rows, blocks)).repeat(32, axis=1)
    weights = (random.standard_normal((rows, blocks * 32)) * magnitudes).astype(np.float32)
    limit = float(np.float32(1e38))
    own = st.floats(-limit, limit, width=32)
    strange = draw(arrays(np.float32, (3,), elements=own))
    places = draw(arrays(np.int64, (3,), elements=st.integers(0, weights.size - 1)))
    if draw(st.booleans()):
        weights.reshape(-1)[places] = strange
    return weights


def activation_scales(width: int) -> st.SearchStrategy[Float32 | None]:
    seeds = st.integers(0, 1 << 32)
    return st.none() | seeds.map(
        lambda seed: np.exp(2 * np.random.default_rng(seed).standard_normal(width)).astype(np.float32)
    )


def parts(matrix: Matrix) -> list[Any]:
    if isinstance(matrix, DenseMatrix):
        return [matrix.values]
    if isinstance(matrix, MixedMatrix):
        return [matrix.columns, matrix.values, *parts(matrix.blocks)]
    return [matrix.codes, matrix.scales] + ([] if matrix.shifts is None else [matrix.shifts])


@settings(max_examples=60, deadline=None)
@given(weights=weight_rows(), form=FORMS, draw=st.data())
def test_slices_equal_the_whole(weights: Float32, form: str, draw: st.DataObject) -> None:
    rows, width = weights.shape
    scale = draw.draw(activation_scales(width))
    top, bottom = sorted(draw.draw(st.tuples(st.integers(0, rows), st.integers(0, rows))))
    left, right = sorted(draw.draw(st.tuples(*[st.integers(0, width // 32)] * 2)))
    columns = slice(left * 32, right * 32)
    whole = convert(DenseMatrix(weights), form, scale)
    cut = convert(DenseMatrix(weights[top:bottom, columns]), form, None if scale is None else scale[columns])
    for part, of_whole in zip(parts(cut), parts(whole), strict=True):
        np.testing.assert_array_equal(part, of_whole[top:bottom, left:right])


@settings(max_examples=40, deadline=None)
@given(rows=st.integers(1, 6), blocks=st.integers(1, 6), seed=st.integers(0, 1 << 32), draw=st.data())
def test_rows_of_mixed_equal_the_whole(rows: int, blocks: int, seed: int, draw: st.DataObject) -> None:
    random = np.random.default_rng(seed)
    weights = random.standard_normal((rows, blocks * 16)).astype(np.float32)
    scale = random.uniform(0, 3, blocks * 16).astype(np.float32)
    start = draw.draw(st.integers(0, rows - 1))
    whole = convert(DenseMatrix(weights), "mixed", scale)
    cut = convert(DenseMatrix(weights[start : start + 1]), "mixed", scale)
    np.testing.assert_array_equal(cut.to_dense(), whole.to_dense()[start : start + 1])


@settings(max_examples=60, deadline=None)
@given(weights=weight_rows())
def test_int8_errors_are_half_a_step(weights: Float32) -> None:
    blocks = convert(DenseMatrix(weights), "int8")
    assert isinstance(blocks, BlockMatrix)
    error = np.abs(blocks.to_dense() - weights).reshape(len(weights), -1, 32).max(axis=2)
    assert (error <= blocks.scales.astype(np.float64) * 0.5001 + 1e-30).all()


@settings(max_examples=60, deadline=None)
@given(weights=weight_rows())
def test_int4_is_never_worse_than_plain_rounding(weights: Float32) -> None:
    fitted = convert(DenseMatrix(weights), "int4").to_dense().astype(np.float64).reshape(-1, 32)
    exact = weights.astype(np.float64).reshape(-1, 32)
    low, high = exact.min(axis=1, keepdims=True), exact.max(axis=1, keepdims=True)
    scale = np.maximum((high - low) / 15, 1e-300)
    rounded = np.rint((exact - low) / scale) * scale + low
    reach = np.maximum((high - low)[:, 0], 1e-30)
    error = np.linalg.norm((fitted - exact) / reach[:, None], axis=1)
    plain = np.linalg.norm((rounded - exact) / reach[:, None], axis=1)
    magnitude = np.abs(exact).max(axis=1) / reach
    assert (error <= plain * 1.001 + 1e-5 + 1e-6 * magnitude).all()


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 1 << 32),
    levels=st.integers(14, 16),
    exponent=st.integers(-20, 20),
    offset=st.floats(-20, 20, width=32),
    draw=st.data(),
)
def test_int4_finds_grids_again(
    seed: int, levels: int, exponent: int, offset: float, draw: st.DataObject
) -> None:
    random = np.random.default_rng(seed)
    codes = random.integers(0, levels, (4, 64))
    codes[:, [1, 33]], codes[:, [9, 41]] = 0, levels - 1
    step = np.float32(2.0**exponent)
    weights = (codes * step + np.float32(offset) * step).astype(np.float32)
    dense = convert(DenseMatrix(weights), "int4", draw.draw(activation_scales(64))).to_dense()
    np.testing.assert_allclose(dense, weights, atol=float(step) * 1e-4)
