"""Weights in eight-bit floats with scales: for the whole matrix, for each row, or for rectangular blocks.

DeepSeek's and Qwen's FP8 checkpoints keep `m.weight` in F8_E4M3 and `m.weight_scale_inv`, one scale for a block of
128×128 (despite the name it multiplies); others `m.weight_scale`, a number or one for each row. No kernel here
multiplies eight-bit floats: they are widened to float32, `w = value · scale` as one product, which is what a
reference computes. Scales of activations are not used: activations are not rounded here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from shardcompute.backends.footprint import FLOAT32
from shardcompute.backends.matrix import DenseMatrix, Float32, Matrix
from shardcompute.core.errors import CorruptModelError, UnsupportedModelError
from shardcompute.weights.formats.tensor_file import Span, TensorEntry, TensorFile
from shardcompute.weights.quantised.affine import MAX_WIDTH, pieces
from shardcompute.weights.quantised.numbers import (
    FLOAT8_TYPES,
    float8_table,
    read_scales,
)
from shardcompute.weights.quantised.scheme import PartNames, Parts, QuantisedMatrix, Scheme

Tile = tuple[int, int]
ACTIVATION_SCALES = (
    ".input_scale",
    ".input_scale_ub",
    ".input_zero_point",
    ".input_global_scale",
    ".activation_scale",
    ".output_scale",
    ".q_scale",
    ".k_scale",
    ".v_scale",
    ".prob_scale",
)
"""Ends of the names of what belongs to activations or to a quantised KV cache."""
ACTIVATION_NOTE = "activations are not rounded to what its config says of them, and their scales are not used"


def fp8_scheme(config: Mapping[str, Any]) -> Scheme:
    """`quant_method: fp8` (with blocks, or a scale for all of a matrix) and `fbgemm_fp8` (a scale for each row)."""
    form = str(config.get("fmt") or "e4m3").lower()
    if form not in ("e4m3", "e5m2", "float8_e4m3fn", "float8_e5m2"):
        raise UnsupportedModelError(
            f"config.json: FP8 weights of the format {form[:32]!r} cannot be run here",
            hint="use a version in e4m3, or a GGUF file",
        )
    tile = configured_tile(config.get("weight_block_size"))

    def fold(parts: Parts) -> QuantisedMatrix:
        return fold_float8(parts, "", parts.entries.keys() & {"_scale_inv", "_scale"}, tile)

    names = tuple(PartNames("", marker, ("",), fold) for marker in ("_scale_inv", "_scale"))
    return Scheme("fp8", names, ACTIVATION_SCALES, note=ACTIVATION_NOTE)


def configured_tile(value: Any) -> Tile | None:
    """Rows and columns of a block that has one scale, as configs write it."""
    if value is None:
        return None
    if (
        not isinstance(value, list)
        or len(value) != 2
        or not all(type(each) is int and 0 < each <= MAX_WIDTH for each in value)
    ):
        raise UnsupportedModelError(
            f"config.json: blocks of {str(value)[:32]} are none that scales can have",
            hint="they are two whole numbers such as [128, 128]; fetch the model again",
        )
    return value[0], value[1]


def fold_float8(parts: Parts, codes_end: str, scale_ends: set[str], tile: Tile | None) -> QuantisedMatrix:
    """A matrix, or stacked ones, whose codes and scales have names with these ends."""
    codes, scales = parts.entry(codes_end), parts.entry(min(scale_ends))
    if codes.dtype not in FLOAT8_TYPES or len(codes.shape) not in (2, 3) or 0 in codes.shape:
        raise parts.corrupt(f"has scales beside {codes.dtype} numbers of the shape {list(codes.shape)}")
    grid = _grid(parts, codes.shape, scales.shape, tile)
    height, width = codes.shape[-2:]
    size = (-(-height // grid[0]), -(-width // grid[1]))
    if tile is not None and grid not in ((1, 1), (height, 1)):
        size = tile
    kind = "TENSOR" if grid == (1, 1) else "ROW" if grid == (height, 1) else f"{size[0]}x{size[1]}"
    return QuantisedMatrix(
        f"{codes.dtype}_{kind}",
        codes.shape,
        FLOAT32,
        lambda file, rows, columns: _read(file, codes, scales, grid, size, rows, columns),
    )


def _grid(parts: Parts, shape: tuple[int, ...], scales: tuple[int, ...], tile: Tile | None) -> Tile:
    """How many scales stand below and beside each other for one matrix."""
    experts, (height, width) = shape[:-2], shape[-2:]
    own = scales[len(experts) :] if experts and scales[:1] == experts else scales
    if experts and own is scales and scales not in ((), (1,)):
        raise parts.corrupt(f"has scales {list(scales)} for {experts[0]} stacked matrices")
    if own in ((), (1,), (1, 1)):
        return 1, 1
    if own in ((height,), (height, 1)):
        return height, 1
    rows, columns = tile or (-(-height // own[0]), -(-width // own[-1]))
    if len(own) != 2 or own != (-(-height // rows), -(-width // columns)):
        raise parts.corrupt(
            f"has scales {list(scales)} for a matrix of {height}×{width} in blocks of {rows}×{columns}"
        )
    return own[0], own[1]


def _read(
    file: TensorFile,
    codes: TensorEntry,
    scales: TensorEntry,
    grid: Tile,
    size: Tile,
    rows: Span,
    columns: Span,
) -> Matrix:
    height, width = codes.shape[-2:]
    factors = read_scales(file, scales, is_power=True)
    factors = factors.reshape(-1, *grid)
    expert, first = divmod(rows[0], height)
    here = factors[expert if len(factors) > 1 else 0]
    table = float8_table(codes.dtype)
    values = np.empty((rows[1] - rows[0], columns[1] - columns[0]), np.float32)
    for start, stop in pieces(rows, width):
        raw = file.read_bytes(codes.name, start * width, (stop - start) * width)
        piece = np.frombuffer(raw, np.uint8).reshape(-1, width)[:, slice(*columns)]
        lines = (np.arange(start, stop) - rows[0] + first) // size[0]
        factor = here[lines][:, np.arange(*columns) // size[1]] if grid[1] > 1 else here[lines]
        values[start - rows[0] : stop - rows[0]] = table[piece] * factor
    _check_numbers(codes, values)
    return DenseMatrix(values)


def _check_numbers(codes: TensorEntry, values: Float32) -> None:
    if not np.isfinite(values).all():
        raise CorruptModelError(
            f"{codes.name!r} holds codes or scales that give no numbers",
            hint="fetch the file again; it is damaged",
        )
