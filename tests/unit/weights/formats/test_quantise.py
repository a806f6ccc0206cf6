"""Each form's shape, exactness and errors; what must stay untouched; what the fallbacks are."""

from __future__ import annotations

import tracemalloc
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from shardcompute.backends.matrix import BlockMatrix, DenseMatrix, Float32, Matrix, MixedMatrix
from shardcompute.core.errors import CorruptModelError, UsageError
from shardcompute.weights.formats.quantise import WEIGHT_FORMS, convert


def random_weights(rows: int, width: int, seed: int = 0) -> Float32:
    return np.random.default_rng(seed).standard_normal((rows, width)).astype(np.float32)


def random_blocks(bits: int, has_shifts: bool, block_size: int = 32) -> BlockMatrix:
    random = np.random.default_rng(bits)
    codes = random.integers(0, 256, (6, 4, block_size * bits // 8), dtype=np.uint8)
    codes[:, :, 0] = 0xF0  # as 4-bit codes: the lowest and the highest
    scales = random.uniform(0.01, 0.02, (6, 4)).astype(np.float32)
    shifts = random.standard_normal((6, 4)).astype(np.float32) if has_shifts else None
    return BlockMatrix(bits, block_size, codes, scales, shifts)


def as_blocks(matrix: Matrix) -> BlockMatrix:
    assert isinstance(matrix, BlockMatrix)
    return matrix


def as_mixed(matrix: Matrix) -> MixedMatrix:
    assert isinstance(matrix, MixedMatrix)
    return matrix


def relative_error(matrix: Matrix, weights: Float32, columns: Float32 | None = None) -> float:
    counted: Any = 1 if columns is None else columns
    return float(np.linalg.norm((matrix.to_dense() - weights) * counted) / np.linalg.norm(weights * counted))


def min_max_rounding(weights: Float32) -> Float32:
    blocks = weights.reshape(-1, 32)
    low = blocks.min(axis=1, keepdims=True)
    scale = (blocks.max(axis=1, keepdims=True) - low) / 15
    dense: Float32 = (np.rint((blocks - low) / scale) * scale + low).reshape(weights.shape)
    return dense


def test_an_unknown_form_is_refused_with_the_known_ones() -> None:
    with pytest.raises(UsageError, match="native, float32, int8, int4, mixed"):
        convert(DenseMatrix(random_weights(2, 32)), "int3")


@pytest.mark.parametrize("form", WEIGHT_FORMS[1:])
def test_the_given_matrix_is_not_written_to(form: str) -> None:
    weights = random_weights(5, 64)
    before = weights.copy()
    convert(DenseMatrix(weights), form)
    np.testing.assert_array_equal(weights, before)


@pytest.mark.parametrize("form", WEIGHT_FORMS)
def test_16_bit_weights_count_as_the_numbers_they_are(form: str) -> None:
    halves = random_weights(4, 64).astype(np.float16)
    expected = convert(DenseMatrix(halves.astype(np.float32)), form).to_dense()
    np.testing.assert_array_equal(convert(DenseMatrix(halves), form).to_dense(), expected)
    raw = (random_weights(4, 64).view(np.uint32) >> 16).astype(np.uint16)
    brain = DenseMatrix(raw)
    expected = convert(DenseMatrix(brain.to_dense()), form).to_dense()
    np.testing.assert_array_equal(convert(brain, form).to_dense(), expected)


@pytest.mark.parametrize("matrix", [random_blocks(4, True), DenseMatrix(random_weights(2, 20))])
def test_native_is_what_the_file_has(matrix: Matrix) -> None:
    assert convert(matrix, "native") is matrix


def test_float32_widens_and_leaves_float32_alone() -> None:
    blocks = random_blocks(4, True)
    widened = convert(blocks, "float32")
    assert isinstance(widened, DenseMatrix)
    assert widened.values.dtype == np.float32
    np.testing.assert_array_equal(widened.values, blocks.to_dense())
    assert convert(widened, "float32") is widened


@pytest.mark.parametrize(
    ("form", "width", "bits", "block_size"),
    [("int8", 96, 8, 32), ("int8", 48, 8, 16), ("int4", 96, 4, 32), ("int4", 48, 8, 16)],
)
def test_blocks_that_divide_the_width(form: str, width: int, bits: int, block_size: int) -> None:
    blocks = as_blocks(convert(DenseMatrix(random_weights(3, width)), form))
    assert (blocks.bits, blocks.block_size, blocks.shape) == (bits, block_size, (3, width))


@pytest.mark.parametrize("form", ["int8", "int4", "mixed"])
def test_a_width_that_no_block_divides_stays_dense(form: str) -> None:
    weights = random_weights(3, 40)
    converted = convert(DenseMatrix(weights.astype(np.float16)), form)
    assert isinstance(converted, DenseMatrix)
    np.testing.assert_array_equal(converted.values, weights.astype(np.float16).astype(np.float32))


@pytest.mark.parametrize("form", ["int8", "int4"])
def test_a_block_alone_equals_the_block_among_others(form: str) -> None:
    weights = random_weights(10, 320)
    scale = np.random.default_rng(1).uniform(0.1, 3, 320).astype(np.float32)
    whole = as_blocks(convert(DenseMatrix(weights), form, scale))
    for row in range(10):
        for block in range(10):
            columns = slice(block * 32, block * 32 + 32)
            alone = as_blocks(convert(DenseMatrix(weights[row : row + 1, columns]), form, scale[columns]))
            np.testing.assert_array_equal(alone.codes[0, 0], whole.codes[row, block])
            assert alone.scales[0, 0] == whole.scales[row, block]
            assert (alone.shifts is None) == (whole.shifts is None)
            if alone.shifts is not None and whole.shifts is not None:
                assert alone.shifts[0, 0] == whole.shifts[row, block]


@pytest.mark.parametrize("form", ["int8", "int4", "mixed"])
def test_no_rows(form: str) -> None:
    assert convert(DenseMatrix(np.empty((0, 64), np.float32)), form).shape == (0, 64)


@pytest.mark.parametrize("form", ["int8", "int4", "mixed"])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_weights_that_are_no_numbers_are_refused(form: str, bad: float) -> None:
    weights = random_weights(3, 64)
    weights[1, 40] = bad
    with pytest.raises(CorruptModelError, match="not numbers"):
        convert(DenseMatrix(weights), form)


def test_int8_is_symmetric_and_rounds_to_nearest() -> None:
    weights = random_weights(50, 192)
    blocks = as_blocks(convert(DenseMatrix(weights), "int8"))
    assert blocks.shifts is None
    error = np.abs(blocks.to_dense() - weights).reshape(50, -1, 32).max(axis=2)
    assert (error <= blocks.scales * 0.5001).all()
    assert relative_error(blocks, weights) < 0.006


@pytest.mark.parametrize("has_shifts", [False, True])
@pytest.mark.parametrize("bits", [4, 8])
def test_int8_holds_any_blocks_without_rounding(bits: int, has_shifts: bool) -> None:
    blocks = random_blocks(bits, has_shifts)
    widened = as_blocks(convert(blocks, "int8"))
    assert widened.bits == 8
    np.testing.assert_array_equal(widened.to_dense(), blocks.to_dense())


def test_int8_finds_an_int8_grid_again() -> None:
    codes = np.random.default_rng(0).integers(1, 256, (4, 2, 32), dtype=np.uint8)
    codes[:, :, 5] = 255
    grid = BlockMatrix(8, 32, codes, np.full((4, 2), 0.125, np.float32))
    found = as_blocks(convert(DenseMatrix(grid.to_dense()), "int8"))
    np.testing.assert_array_equal(found.codes, codes)
    np.testing.assert_allclose(found.scales, grid.scales, rtol=1e-6)


def test_int4_leaves_int4_blocks_alone() -> None:
    blocks = random_blocks(4, True)
    assert convert(blocks, "int4") is blocks
    assert as_blocks(convert(random_blocks(4, False, block_size=16), "int4")).block_size == 32


def test_int4_finds_an_int4_grid_again() -> None:
    blocks = random_blocks(4, True)
    found = as_blocks(convert(DenseMatrix(blocks.to_dense()), "int4"))
    np.testing.assert_array_equal(found.codes, blocks.codes)
    np.testing.assert_allclose(found.to_dense(), blocks.to_dense(), atol=1e-6)


def test_int4_beats_plain_rounding() -> None:
    weights = random_weights(100, 256)
    rounded = DenseMatrix(min_max_rounding(weights))
    assert relative_error(convert(DenseMatrix(weights), "int4"), weights) < 0.91 * relative_error(
        rounded, weights
    )


def test_int4_spends_its_accuracy_where_activations_are_large() -> None:
    weights = random_weights(100, 256)
    scale = np.exp(2 * np.random.default_rng(1).standard_normal(256)).astype(np.float32)
    plain = relative_error(convert(DenseMatrix(weights), "int4"), weights, scale)
    informed = relative_error(convert(DenseMatrix(weights), "int4", scale), weights, scale)
    assert informed < 0.5 * plain


def test_int4_with_equal_activations_is_int4_without() -> None:
    weights = random_weights(9, 64)
    for level in (0.0, 1.0, 1e30):
        same = convert(DenseMatrix(weights), "int4", np.full(64, level, np.float32))
        np.testing.assert_allclose(
            same.to_dense(), convert(DenseMatrix(weights), "int4").to_dense(), atol=1e-5
        )


@pytest.mark.parametrize(
    ("form", "level"),
    [(form, level) for form in ("int8", "int4", "mixed") for level in (0.0, 1.5, 1e-42)]
    + [("int8", -3e38), ("int4", -3e38)],
)
def test_blocks_of_one_number(form: str, level: float) -> None:
    weights = np.full((2, 64), level, np.float32)
    dense = convert(DenseMatrix(weights), form).to_dense()
    np.testing.assert_allclose(dense, weights, rtol=1e-5, atol=1e-30)


def test_mixed_keeps_the_loudest_columns_in_16_bit() -> None:
    weights = random_weights(20, 320)
    weights[:, [7, 100, 301]] *= 50
    mixed = as_mixed(convert(DenseMatrix(weights), "mixed"))
    np.testing.assert_array_equal(mixed.columns, [7, 100, 301])
    np.testing.assert_array_equal(mixed.values, weights[:, mixed.columns].astype(np.float16))
    assert mixed.blocks.shifts is None
    codes: NDArray[np.uint8] = mixed.blocks.codes.reshape(20, 320)
    assert (codes[:, mixed.columns] == 128).all()
    assert relative_error(mixed, weights) < 0.1 * relative_error(
        convert(DenseMatrix(weights), "int8"), weights
    )


def test_mixed_prefers_measured_activations() -> None:
    weights = random_weights(4, 64)
    weights[:, 3] *= 50
    scale = np.ones(64, np.float32)
    scale[40] = 9
    np.testing.assert_array_equal(as_mixed(convert(DenseMatrix(weights), "mixed", scale)).columns, [40])


def test_mixed_takes_blocks_and_leaves_mixed_alone() -> None:
    blocks = random_blocks(4, True)
    mixed = as_mixed(convert(blocks, "mixed"))
    assert relative_error(mixed, blocks.to_dense()) < 0.01
    assert convert(mixed, "mixed") is mixed
    np.testing.assert_array_equal(as_blocks(convert(mixed, "int8")).shape, mixed.shape)


@pytest.mark.parametrize(
    ("scale", "complaint"),
    [(np.ones(32), "64 input columns"), (np.full(64, -1.0), "negative"), (np.full(64, np.nan), "negative")],
)
def test_activation_scales_that_make_no_sense(scale: NDArray[Any], complaint: str) -> None:
    with pytest.raises(UsageError, match=complaint):
        convert(DenseMatrix(random_weights(2, 64)), "int4", scale.astype(np.float32))


@pytest.mark.parametrize("form", ["int8", "int4", "mixed"])
def test_memory_is_the_result_and_a_few_rows(form: str) -> None:
    matrix = DenseMatrix(random_weights(4096, 1024).astype(np.float16))
    tracemalloc.start()
    converted = convert(matrix, form)
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak_bytes < converted.size_bytes + (8 << 20)
