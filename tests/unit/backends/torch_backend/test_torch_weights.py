"""Weight matrices on their way to the device keep their values."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from shardcompute.backends.matrix import BlockMatrix, DenseMatrix, MixedMatrix
from shardcompute.core.errors import BackendError, UsageError

torch = pytest.importorskip("torch")
from shardcompute.backends.torch import transfers  # noqa: E402
from shardcompute.backends.torch.device import can_fuse, choose_device, choose_dtype  # noqa: E402
from shardcompute.backends.torch.weights import (  # noqa: E402
    DenseLinear,
    TensorMatrix,
    _load_blocks,
    load_linear,
    to_tensor,
)

CPU = torch.device("cpu")


def blocks(bits: int, has_shift: bool = True) -> BlockMatrix:
    chance = np.random.default_rng(bits)
    codes = chance.integers(0, 256, (6, 2, 32 * bits // 8), dtype=np.uint8)
    shifts = chance.standard_normal((6, 2)).astype(np.float32) if has_shift else None
    return BlockMatrix(bits, 32, codes, chance.random((6, 2)).astype(np.float32), shifts)


def test_raw_bfloat16_keeps_every_bit() -> None:
    raw = np.asarray([[0x3F80, 0xC049, 0x7F7F]], dtype=np.uint16)
    taken = to_tensor(raw, CPU, torch.bfloat16)
    assert taken.view(torch.int16).numpy().view(np.uint16).tolist() == raw.tolist()
    assert to_tensor(raw, CPU, torch.float32)[0, 0] == 1.0


def test_arrays_are_not_shared() -> None:
    values = np.ones(3, dtype=np.float32)
    values.flags.writeable = False
    taken = to_tensor(values, CPU)
    taken += 1
    assert values.tolist() == [1, 1, 1]


def test_parts_are_stacked_with_their_bias() -> None:
    chance = np.random.default_rng(0)
    dense = DenseMatrix(chance.standard_normal((3, 64)).astype(np.float32))
    mixed = MixedMatrix(blocks(4), np.asarray([1, 40]), chance.standard_normal((6, 2)).astype(np.float16))
    bias = chance.standard_normal(15).astype(np.float32)
    parts: list[Any] = [dense, blocks(8), mixed]
    linear = load_linear(parts, bias, device=CPU, dtype=torch.float32)
    x = chance.standard_normal((2, 64)).astype(np.float32)
    expected = x @ np.concatenate([part.to_dense() for part in parts]).T + bias
    np.testing.assert_allclose(linear.apply(torch.from_numpy(x)).numpy(), expected, rtol=1e-4, atol=1e-4)
    assert linear.size_bytes == 15 * 64 * 4


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("has_shift", [True, False])
def test_codes_widen_to_what_they_mean(bits: int, has_shift: bool) -> None:
    """Rows that fill no tile, blocks that fill no group."""
    matrix = blocks(bits, has_shift)
    columns, outliers = torch.tensor([5]), torch.ones(6, 1)
    linear = _load_blocks(matrix, None, CPU, torch.float32, columns, outliers)
    expected = matrix.to_dense()
    expected[:, 5] += 1
    np.testing.assert_allclose(linear.widen(torch.float32).numpy(), expected, rtol=1e-6, atol=1e-6)
    rounded = _load_blocks(matrix, None, CPU, torch.bfloat16)
    np.testing.assert_allclose(
        rounded.widen(torch.float32).numpy(), matrix.to_dense(), rtol=2**-8, atol=2**-6
    )


def test_a_tensor_is_taken_as_it_is() -> None:
    values = torch.randn(4, 8)
    linear = load_linear([TensorMatrix(values)], None, device=CPU, dtype=torch.float32)
    assert isinstance(linear, DenseLinear)
    assert linear.weight.data_ptr() == values.data_ptr()


def test_number_formats() -> None:
    assert choose_dtype("auto", CPU) == torch.float32
    assert choose_dtype("bfloat16", CPU) == torch.bfloat16
    with pytest.raises(UsageError):
        choose_dtype("float8", CPU)
    assert not can_fuse(CPU)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_missing_device_is_named() -> None:
    with pytest.raises(BackendError, match="CUDA"):
        choose_device("cuda")


@pytest.mark.parametrize("dtype", [np.float32, np.uint16, np.int64])
@pytest.mark.parametrize("is_writeable", [True, False])
def test_a_tensor_has_memory_of_its_own(dtype: type, is_writeable: bool) -> None:
    """Raw bfloat16 comes as uint16; arrays over bytes of others cannot be written to."""
    values = np.arange(12, dtype=dtype).reshape(3, 4)
    kept = values.copy()
    given = values[:]
    given.flags.writeable = is_writeable
    tensor = to_tensor(given, CPU)
    values[:] = 0
    found = tensor.view(torch.int16).numpy().view(np.uint16) if dtype is np.uint16 else tensor.numpy()
    np.testing.assert_array_equal(found, kept)
    every_other = to_tensor(kept[:, ::2], CPU)
    assert every_other.shape == (3, 2)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("rows", [3, 5000])
def test_weights_pass_through_pinned_memory_unchanged(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many times round the pieces that are pinned, the last of them short."""
    monkeypatch.setattr(transfers, "_STAGE_BYTES", 100_003)
    values = torch.randint(-32768, 32767, (rows, 1001), dtype=torch.int16).view(torch.bfloat16)
    uploaded = transfers.upload_weights(values, torch.device("cuda"))
    assert uploaded.dtype == torch.bfloat16
    assert torch.equal(uploaded.cpu().view(torch.int16), values.view(torch.int16))
