"""Every form reads as the number that its own reference implementation computes from the same tensors.

`reference.safetensors` holds, by case, tensors that compressed-tensors 0.20, bitsandbytes 0.50, AutoAWQ 0.2.9,
GPTQModel 7.7 and transformers 5.22 wrote or were given, and as `meant` the weights that they dequantised in float32.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from shardcompute.backends.matrix import BlockMatrix, DenseMatrix
from shardcompute.weights.formats.bytes import LocalBytes
from shardcompute.weights.formats.safetensors_file import open_safetensors
from shardcompute.weights.formats.tensor_file import TensorFile, read_expert_matrix, read_matrix
from shardcompute.weights.quantised.numbers import read_array
from shardcompute.weights.quantised.schemes import open_quantised

PATH = Path(__file__).parent / "reference.safetensors"
with LocalBytes(PATH) as source:
    CONFIGS = open_safetensors(source).metadata
WIDENED = ("bnb-nf4", "bnb-fp4", "fp8", "ct-fp8", "gptq4-ordered")
# Two roundings of float32 where the reference has one: scales of 32 bits with a zero, and a division by 127.
NEARLY = ("ct-int4-asym", "ct-int8-asym", "bnb-int8")


@pytest.fixture(scope="module")
def reference() -> Iterator[TensorFile]:
    with LocalBytes(PATH) as source:
        yield open_safetensors(source)


@pytest.mark.parametrize("case", CONFIGS)
def test_numbers_are_those_of_the_reference(case: str, reference: TensorFile) -> None:
    file = open_quantised(reference, CONFIGS[case])
    name = f"{case}/m_blocks" if case == "mxfp4" else f"{case}/m.weight"
    meant = read_array(reference, reference.entries[f"{case}/meant"])
    assert file.entries[name].shape == meant.shape
    if meant.ndim == 3:
        matrices = [read_expert_matrix(file, name, expert) for expert in range(len(meant))]
        read = np.stack([matrix.to_dense() for matrix in matrices])
        matrix = matrices[0]
    else:
        matrix = read_matrix(file, name)
        read = matrix.to_dense()
    assert isinstance(matrix, DenseMatrix if case.startswith(WIDENED) else BlockMatrix)
    if case in NEARLY:
        np.testing.assert_allclose(read, meant, rtol=0, atol=np.abs(meant).max() * 2**-22)
    elif case == "ct-nvfp4":  # the reference rounds its result to bfloat16
        np.testing.assert_array_equal(read.astype(ml_dtypes.bfloat16).astype(np.float32), meant)
    else:
        np.testing.assert_array_equal(read, meant)


@pytest.mark.parametrize("case", [case for case in CONFIGS if case != "mxfp4"])
def test_any_rows_and_columns_are_part_of_the_whole(case: str, reference: TensorFile) -> None:
    file = open_quantised(reference, CONFIGS[case])
    name = f"{case}/m.weight"
    whole = read_matrix(file, name).to_dense()
    for rows in ((0, 1), (5, 14), (23, 24)):
        part = read_matrix(file, name, rows, (32, 64))
        np.testing.assert_array_equal(part.to_dense(), whole[rows[0] : rows[1], 32:])


def test_rows_of_experts_are_part_of_the_whole(reference: TensorFile) -> None:
    file = open_quantised(reference, CONFIGS["mxfp4"])
    whole = read_expert_matrix(file, "mxfp4/m_blocks", 1).to_dense()
    part = read_expert_matrix(file, "mxfp4/m_blocks", 1, (3, 7), (32, 64))
    np.testing.assert_array_equal(part.to_dense(), whole[3:7, 32:])


def test_parts_count_as_one_tensor_of_all_their_bytes(reference: TensorFile) -> None:
    file = open_quantised(reference, CONFIGS["awq"])
    parts = [reference.entries[f"awq/m.{part}"] for part in ("qweight", "qzeros", "scales")]
    assert file.entries["awq/m.weight"].size_bytes == sum(part.size_bytes for part in parts)
    assert "awq/m.qweight" not in file.entries
    assert "awq/meant" in file.entries
