"""What is counted is what is held: by arithmetic for every stored form, and by what executors really hold."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from shardcompute.backends.footprint import (
    FLOAT32,
    MatrixForm,
    StepShape,
    holding_of,
    matrix_bytes,
    scratch_bytes,
    table_bytes,
)
from shardcompute.backends.matrix import BlockMatrix, DenseMatrix, Matrix, MixedMatrix
from shardcompute.models.layout import TensorPlace
from shardcompute.weights.formats.gguf_blocks import BLOCK_LAYOUTS
from shardcompute.weights.formats.quantise import WEIGHT_FORMS, convert
from shardcompute.weights.formats.tensor_file import TensorEntry
from shardcompute.weights.held import loaded_form, stored_form

ROWS, COLUMNS = 64, 512


def stored(dtype: str) -> Matrix:
    layout = BLOCK_LAYOUTS.get(dtype)
    if layout is not None:
        shape = (ROWS, COLUMNS // layout.block_size)
        codes = np.full((*shape, layout.code_bytes), 3, np.uint8)
        shifts = np.ones(shape, np.float32) if layout.has_shifts else None
        return BlockMatrix(layout.bits, layout.block_size, codes, np.ones(shape, np.float32), shifts)
    noise = np.random.default_rng(0).standard_normal((ROWS, COLUMNS)).astype(np.float32)
    if dtype == "BF16":
        return DenseMatrix((noise.view(np.uint32) >> 16).astype(np.uint16))
    return DenseMatrix(noise.astype(np.float16) if dtype == "F16" else noise)


def form_of(matrix: Matrix) -> MatrixForm:
    if isinstance(matrix, DenseMatrix):
        return MatrixForm(8 * matrix.values.itemsize)
    blocks = matrix.blocks if isinstance(matrix, MixedMatrix) else matrix
    outliers = 0.01 if isinstance(matrix, MixedMatrix) else 0.0
    return MatrixForm(blocks.bits, blocks.block_size, blocks.shifts is not None, outliers)


def as_read(dtype: str) -> MatrixForm:
    return stored_form({"w": TensorEntry("w", dtype, (ROWS, COLUMNS), 0, 0)}, "w")


@pytest.mark.parametrize("form", WEIGHT_FORMS)
@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16", *BLOCK_LAYOUTS])
def test_the_form_that_is_counted_is_the_form_that_is_loaded(dtype: str, form: str) -> None:
    place = TensorPlace("w", (ROWS, COLUMNS))
    assert loaded_form("attention.q", place, as_read(dtype), form) == form_of(convert(stored(dtype), form))


def test_a_router_is_never_rounded_and_a_head_never_in_four_bits() -> None:
    place = TensorPlace("w", (ROWS, COLUMNS))
    assert loaded_form("mlp.router", place, as_read("BF16"), "int8") == FLOAT32
    assert loaded_form("head", place, as_read("BF16"), "int4") == MatrixForm(8, 32)


@pytest.mark.parametrize("dtype", ["F32", "BF16", "Q4_0", "Q5_K", "Q8_0", "Q6_K"])
def test_tables_on_the_host_take_no_more_than_is_counted(dtype: str) -> None:
    matrix = stored(dtype)
    counted = table_bytes("onnx/cpu", form_of(matrix), ROWS, COLUMNS, 0)
    assert counted == matrix.size_bytes


def test_each_holder_has_its_own_costs() -> None:
    weights = ROWS * COLUMNS
    half, four = MatrixForm(16), MatrixForm(4, 32)
    assert matrix_bytes("onnx/cpu", half, ROWS, COLUMNS, 0) == 4 * weights
    assert matrix_bytes("torch/cuda", half, ROWS, COLUMNS, 0) == 2 * weights
    assert matrix_bytes("torch/cpu", four, ROWS, COLUMNS, 0) == 4 * weights
    assert matrix_bytes("onnx/cpu", four, ROWS, COLUMNS, 0) == weights // 2 + 2 * 4 * weights // 32
    assert matrix_bytes("torch/cuda", four, ROWS, COLUMNS, 0) == weights // 2 + 2 * weights // 32
    assert matrix_bytes("llamacpp/any", four, ROWS, COLUMNS, 777) == 777


@pytest.mark.parametrize(
    ("backend", "device", "holding"),
    [
        ("onnx", "cpu", "onnx/cpu"),
        ("torch", "cuda:1", "torch/cuda"),
        ("torch", "mps", "torch/mps"),
        ("mlx", "mlx", "mlx/gpu"),
        ("llamacpp", "cpu", "llamacpp/any"),
        ("unheard-of", "cpu", "onnx/cpu"),
    ],
)
def test_a_holding_is_named_after_backend_and_device(backend: str, device: str, holding: str) -> None:
    assert holding_of(backend, device) == holding


def test_masks_of_a_long_prompt_are_counted_where_they_are_made() -> None:
    """Else a prompt that fills the context goes beyond what was promised."""
    short = StepShape(1024, 16, 4, 64, 2816, 16_384, context_length=2048, max_rows=512)
    long = replace(short, context_length=4096)
    per_token = 4 * short.max_rows + 2 * 4 * short.kv_heads * short.head_dim + 2 * 4 * short.head_dim
    grown = scratch_bytes("onnx/cpu", long, 0) - scratch_bytes("onnx/cpu", short, 0)
    assert grown == per_token * 2048
