"""Every decoded GGUF type means the same numbers as the reference decoders say, to the last bit."""

from __future__ import annotations

import ctypes

import gguf
import numpy as np
import pytest
from numpy.typing import NDArray

from shardcompute.backends.llamacpp.library import is_installed, open_library
from shardcompute.backends.matrix import BlockMatrix
from shardcompute.weights.formats.gguf_blocks import BLOCK_LAYOUTS, BlockLayout
from shardcompute.weights.formats.gguf_file import GGML_TYPES
from support.gguf.blocks import HALVES, random_blocks, with_scales

# Codes are centred, so that the shift is a difference of two products: exact while both are about as large.
WITH_MINIMA = ("Q4_1", "Q5_1", "Q2_K", "Q4_K", "Q5_K")
NOT_IN_PACKAGE = ("Q1_0", "Q2_0")
REMOVED = ("Q4_0_4_4", "Q4_0_4_8", "Q4_0_8_8", "IQ4_NL_4_4", "IQ4_NL_4_8", "IQ4_NL_8_8")


def extreme_blocks(dtype: str) -> NDArray[np.uint8]:
    """Every byte the same, with the largest, smallest, least normal and no scale."""
    rows = []
    for byte in (0x00, 0x01, 0x7F, 0x80, 0xFF):
        for scale in (0.0, -0.0, 65504.0, -65504.0, 2.0**-24, -(2.0**-24), 2.0**-14, 1.0):
            block = np.full((1, BLOCK_LAYOUTS[dtype].file_bytes), byte, np.uint8)
            rows.append(with_scales(dtype, block, np.array([[scale]], "<f2")))
    return np.concatenate(rows)


def decode(layout: BlockLayout, blocks: NDArray[np.uint8]) -> BlockMatrix:
    codes, scales, shifts = layout.decode(blocks)
    return BlockMatrix(layout.bits, layout.block_size, codes, scales, shifts)


def package_says(dtype: str, blocks: NDArray[np.uint8]) -> NDArray[np.float32]:
    values: NDArray[np.float32] = gguf.dequantize(blocks, gguf.GGMLQuantizationType[dtype])
    return values


class _Traits(ctypes.Structure):
    """`ggml_type_traits`."""

    _fields_ = (
        ("type_name", ctypes.c_char_p),
        ("block", ctypes.c_int64),
        ("interleave", ctypes.c_int64),
        ("size", ctypes.c_size_t),
        ("is_quantized", ctypes.c_bool),
        ("to_float", ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)),
    )


@pytest.fixture(scope="module")
def ggml() -> ctypes.CDLL:
    if not is_installed():
        pytest.skip("xllamacpp is not installed")
    library = open_library().c
    library.ggml_get_type_traits.restype = ctypes.POINTER(_Traits)
    return library


def traits(library: ctypes.CDLL, code: int) -> _Traits:
    found: _Traits = library.ggml_get_type_traits(code).contents
    return found


@pytest.mark.parametrize("dtype", [name for name in BLOCK_LAYOUTS if name not in NOT_IN_PACKAGE])
def test_matches_the_reference_bit_for_bit(dtype: str) -> None:
    layout = BLOCK_LAYOUTS[dtype]
    blocks = random_blocks(dtype, 500)
    matrix = decode(layout, blocks)
    assert matrix.shape == (500, layout.file_block)
    assert matrix.codes.dtype == np.uint8
    assert matrix.codes.shape == (500, layout.parts, layout.code_bytes)
    assert matrix.scales.dtype == np.float32
    assert (matrix.shifts is not None) == layout.has_shifts
    np.testing.assert_array_equal(matrix.to_dense(), package_says(dtype, blocks))


@pytest.mark.parametrize("dtype", [name for name in BLOCK_LAYOUTS if name not in NOT_IN_PACKAGE])
def test_extreme_values_are_exact_too(dtype: str) -> None:
    blocks = extreme_blocks(dtype)
    expected = package_says(dtype, blocks)
    np.testing.assert_array_equal(decode(BLOCK_LAYOUTS[dtype], blocks).to_dense(), expected)


@pytest.mark.parametrize("dtype", WITH_MINIMA)
def test_minima_far_from_scales_cost_one_rounding(dtype: str) -> None:
    """Scales and minima of any two sizes: at most what float32 rounds of the larger."""
    layout, random = BLOCK_LAYOUTS[dtype], np.random.default_rng(3)
    blocks = random_blocks(dtype, 500)
    for at in HALVES[dtype]:
        sizes = 2.0 ** random.integers(-14, 10, (500, 1))
        blocks[:, at : at + 2] = sizes.astype("<f2").view(np.uint8)
    matrix = decode(layout, blocks)
    assert matrix.shifts is not None
    reach = np.abs(matrix.scales) * (1 << (matrix.bits - 1)) + np.abs(matrix.shifts)
    found, expected = (
        each.reshape(500, layout.parts, -1) for each in (matrix.to_dense(), package_says(dtype, blocks))
    )
    assert (np.abs(found - expected) <= reach[:, :, None] * np.float32(2.0**-22)).all()


@pytest.mark.parametrize("dtype", BLOCK_LAYOUTS)
def test_matches_llama_cpp_bit_for_bit(dtype: str, ggml: ctypes.CDLL) -> None:
    layout = BLOCK_LAYOUTS[dtype]
    code = next(code for code, (name, _, _) in GGML_TYPES.items() if name == dtype)
    found = traits(ggml, code)
    assert (found.block, found.size) == (layout.file_block, layout.file_bytes)
    for blocks in (random_blocks(dtype, 200, seed=1), extreme_blocks(dtype)):
        expected = np.empty((len(blocks), layout.file_block), np.float32)
        found.to_float(blocks.ctypes.data, expected.ctypes.data, expected.size)
        np.testing.assert_array_equal(decode(layout, blocks).to_dense(), expected)


def test_nothing_that_llama_cpp_stores_is_missing(ggml: ctypes.CDLL) -> None:
    for code, (name, block, size) in GGML_TYPES.items():
        found = traits(ggml, code)
        if name in REMOVED:
            assert b"REMOVED" in found.type_name
            continue
        assert (found.type_name.decode().upper(), found.block, found.size) == (name, block, size)
        # Without a way back to floats (Q8_1, Q8_K) a type is only ever made for a product.
        assert not found.is_quantized or not found.to_float or name in BLOCK_LAYOUTS


@pytest.mark.parametrize("dtype", [name for name in BLOCK_LAYOUTS if name != "Q2_0"])
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
