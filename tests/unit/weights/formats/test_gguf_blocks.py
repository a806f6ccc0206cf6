"""Every decoded GGUF type means the same numbers as the reference decoder says."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
from numpy.typing import NDArray

from shardcompute.backends.matrix import BlockMatrix
from shardcompute.weights.formats.gguf_blocks import BLOCK_LAYOUTS, BlockLayout

# Where each type keeps its float16 numbers, so that random blocks get sane ones.
HALVES = {
    "Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q8_0": [0], "Q4_K": [0, 2], "Q5_K": [0, 2],
    "Q6_K": [208],
}  # fmt: skip


def random_blocks(dtype: str, count: int, seed: int = 0) -> NDArray[np.uint8]:
    random = np.random.default_rng(seed)
    blocks = random.integers(0, 256, (count, BLOCK_LAYOUTS[dtype].file_bytes), dtype=np.uint8)
    for at in HALVES[dtype]:
        halves = random.uniform(-0.1, 0.1, (count, 1)).astype("<f2")
        blocks[:, at : at + 2] = halves.view(np.uint8)
    return blocks


def decode(layout: BlockLayout, blocks: NDArray[np.uint8]) -> BlockMatrix:
    codes, scales, shifts = layout.decode(blocks)
    return BlockMatrix(layout.bits, layout.block_size, codes, scales, shifts)


@pytest.mark.parametrize("dtype", BLOCK_LAYOUTS)
def test_matches_the_reference(dtype: str) -> None:
    layout = BLOCK_LAYOUTS[dtype]
    blocks = random_blocks(dtype, 50)
    matrix = decode(layout, blocks)
    expected = gguf.dequantize(blocks, gguf.GGMLQuantizationType[dtype])
    assert matrix.shape == (50, layout.file_block)
    assert matrix.codes.dtype == np.uint8
    assert matrix.codes.shape == (50, layout.parts, layout.code_bytes)
    assert matrix.scales.dtype == np.float32
    assert (matrix.shifts is not None) == layout.has_shifts
    np.testing.assert_allclose(matrix.to_dense(), expected, rtol=1e-6, atol=1e-6 * np.abs(expected).max())


@pytest.mark.parametrize("dtype", ["Q4_0", "Q5_0", "Q8_0", "Q6_K"])
def test_types_without_a_minimum_are_exact(dtype: str) -> None:
    blocks = random_blocks(dtype, 50, seed=1)
    expected = gguf.dequantize(blocks, gguf.GGMLQuantizationType[dtype])
    np.testing.assert_array_equal(decode(BLOCK_LAYOUTS[dtype], blocks).to_dense(), expected)


@pytest.mark.parametrize("dtype", BLOCK_LAYOUTS)
def test_layouts_agree_with_the_format(dtype: str) -> None:
    layout = BLOCK_LAYOUTS[dtype]
    size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[dtype]]
    assert (layout.file_block, layout.file_bytes) == size


def test_neighbours_share_a_byte() -> None:
    """Q4_0 keeps element i and i + 16 in one byte; ours keeps 2i and 2i + 1."""
    elements = np.arange(32) % 16
    packed = (elements[:16] | (elements[16:] << 4)).astype(np.uint8)
    block = np.concatenate([np.ones(1, "<f2").view(np.uint8), packed])[None]
    codes, _, _ = BLOCK_LAYOUTS["Q4_0"].decode(block)
    assert codes.ravel().tolist() == [(2 * i % 16) | ((2 * i + 1) % 16) << 4 for i in range(16)]
