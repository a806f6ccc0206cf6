"""Checkpoints that MLX has quantised: every bit width, group size and number type reads as the numbers it means."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save

from shardcompute.backends.matrix import Array, BlockMatrix
from shardcompute.core.errors import CorruptModelError, UnsupportedModelError
from shardcompute.weights.formats.mlx_blocks import MLX_BITS, MLX_GROUPS
from shardcompute.weights.formats.mlx_file import MlxTensorFile, open_mlx, without_mlx
from shardcompute.weights.formats.safetensors_file import open_safetensors
from shardcompute.weights.formats.tensor_file import read_expert_matrix, read_matrix, read_vector
from support.models.mlx_checkpoint import SCALE_TYPES, pack, quantise


class StoredBytes:
    """A file in memory."""

    name = "model.safetensors"

    def __init__(self, content: bytes) -> None:
        self._content = content
        self.size = len(content)

    def read(self, offset: int, length: int) -> memoryview:
        return memoryview(self._content)[offset : offset + length]

    def close(self) -> None:
        pass


def opened(tensors: dict[str, Array], **quantization: Any) -> MlxTensorFile:
    return open_mlx(open_safetensors(StoredBytes(save(tensors))), quantization)


def stored(
    weights: Array, bits: int, group_size: int, scale_type: str = "F16"
) -> tuple[dict[str, Array], Array]:
    codes, scales, biases, meant = quantise(weights.astype(np.float32), bits, group_size, scale_type)
    return {"m.weight": codes, "m.scales": scales, "m.biases": biases}, meant


def random(*shape: int) -> Array:
    return np.random.default_rng(3).standard_normal(shape)


@pytest.mark.parametrize("scale_type", SCALE_TYPES)
@pytest.mark.parametrize("group_size", MLX_GROUPS)
@pytest.mark.parametrize("bits", MLX_BITS)
def test_numbers_are_those_that_are_meant(bits: int, group_size: int, scale_type: str) -> None:
    tensors, meant = stored(random(6, 256), bits, group_size, scale_type)
    file = opened(tensors, bits=bits, group_size=group_size)
    assert file.entries["m.weight"].shape == (6, 256)
    assert list(file.entries) == ["m.weight"]
    assert file.entries["m.weight"].size_bytes == sum(part.nbytes for part in tensors.values())
    matrix = read_matrix(file, "m.weight")
    assert isinstance(matrix, BlockMatrix)
    # `q · scale + bias` and `(q − half) · scale + shift` round in other places: at most in the last bit.
    np.testing.assert_allclose(matrix.to_dense(), meant, rtol=0, atol=np.abs(meant).max() * 2**-22)
    part = read_matrix(file, "m.weight", (2, 5), (128, 256))
    np.testing.assert_array_equal(part.to_dense(), matrix.to_dense()[2:5, 128:])


@pytest.mark.parametrize("bits", MLX_BITS)
def test_codes_and_scales_are_taken_bit_by_bit(bits: int) -> None:
    codes = np.random.default_rng(bits).integers(0, 1 << bits, (4, 128), dtype=np.uint8)
    scales, biases = np.float32([[0.5, 2.0]] * 4), np.float32([[-1.0, 3.0]] * 4)
    tensors = {"m.weight": pack(codes, bits), "m.scales": scales, "m.biases": biases}
    file = opened(tensors, bits=bits, group_size=64)
    expected = codes * np.repeat(scales, 64, axis=1) + np.repeat(biases, 64, axis=1)
    np.testing.assert_array_equal(read_matrix(file, "m.weight").to_dense(), expected)


def test_any_range_of_bytes_is_part_of_the_whole() -> None:
    tensors, _ = stored(random(3, 64), 3, 32)
    file = opened(tensors, bits=3, group_size=32)
    whole = bytes(file.read_rows("m.weight"))
    assert len(whole) == file.entries["m.weight"].size_bytes
    for offset, length in ((0, 1), (5, 40), (15, 17), (len(whole) - 1, 1), (7, 0)):
        assert bytes(file.read_bytes("m.weight", offset, length)) == whole[offset : offset + length]
    assert bytes(file.read_rows("m.weight", 1, 2)) == whole[len(whole) // 3 : 2 * len(whole) // 3]
    with pytest.raises(CorruptModelError, match="do not exist"):
        file.read_bytes("m.weight", len(whole), 1)


def test_experts_overrides_and_plain_tensors() -> None:
    tensors, meant = stored(random(3, 4, 64), 8, 64)
    tensors |= {"n.weight": np.float32([1, 2, 3])}
    override = {"bits": 8, "group_size": 64}
    file = opened(tensors, bits=4, group_size=32, m=override, n=False)
    np.testing.assert_allclose(read_expert_matrix(file, "m.weight", 2).to_dense(), meant[2], atol=1e-6)
    assert read_vector(file, "n.weight").tolist() == [1, 2, 3]


def test_parts_that_do_not_agree_are_refused() -> None:
    tensors, _ = stored(random(3, 64), 4, 32)
    file = opened(tensors, bits=8, group_size=32)
    with pytest.raises(CorruptModelError, match="do not make a matrix of 8 bits in groups of 32"):
        read_matrix(file, "m.weight")


@pytest.mark.parametrize(
    ("quantization", "problem"),
    [
        ({"bits": 4, "group_size": 32, "mode": "mxfp4"}, "mxfp4"),
        ({"bits": 7, "group_size": 64}, "7 bits"),
        ({"bits": 4, "group_size": 16}, "groups of 16"),
        ({"bits": 4, "group_size": 64, "m": {"bits": True, "group_size": 64}}, "True bits"),
    ],
)
def test_what_cannot_be_run_is_said(quantization: dict[str, Any], problem: str) -> None:
    with pytest.raises(UnsupportedModelError, match=problem):
        opened({"n": np.zeros(1, np.float32)}, **quantization)


def test_only_what_mlx_wrote_is_taken_for_it() -> None:
    groups = {"bits": 4, "group_size": 64}
    assert without_mlx({"a": 1, "quantization": groups, "quantization_config": groups}) == ({"a": 1}, groups)
    other = {"quantization_config": {**groups, "quant_method": "awq"}}
    assert without_mlx(other) == (other, None)


@pytest.mark.parametrize("bits", MLX_BITS)
def test_mlx_packs_and_means_the_same(bits: int) -> None:
    mx = pytest.importorskip("mlx.core", reason="mlx is not installed (pip install 'shardcompute[mlx]')")
    weights = random(5, 128).astype(np.float32)
    codes, scales, biases = mx.quantize(mx.array(weights), group_size=64, bits=bits)
    names = ("m.weight", "m.scales", "m.biases")
    tensors = {name: np.array(each) for name, each in zip(names, (codes, scales, biases), strict=True)}
    file = opened(tensors, bits=bits, group_size=64)
    theirs = np.array(mx.dequantize(codes, scales, biases, group_size=64, bits=bits))
    np.testing.assert_allclose(read_matrix(file, "m.weight").to_dense(), theirs, atol=1e-6)
    own_codes, own_scales, own_biases, meant = quantise(weights, bits, 64, "F32")
    arrays = (mx.array(each) for each in (own_codes, own_scales, own_biases))
    np.testing.assert_allclose(np.array(mx.dequantize(*arrays, group_size=64, bits=bits)), meant, atol=1e-6)
