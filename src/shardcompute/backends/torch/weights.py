"""Linear maps on the device, made from weight matrices in any form.

Dense matrices are held in the number format that is computed in; a bfloat16 checkpoint on a bfloat16 device is
taken bit by bit. Quantised matrices keep their codes on CUDA devices, where our kernels multiply with them
directly and large batches widen one matrix at a time; elsewhere they are widened once, at loading, since widening
at every use would cost a CPU several times what it saves. What a handle occupies is its `size_bytes`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch.nn import functional

from shardcompute.backends.matrix import Array, BlockMatrix, DenseMatrix, Float32, Matrix, MixedMatrix


@dataclass(frozen=True, slots=True)
class TensorMatrix:
    """A matrix `[out, in]` that already is a tensor on the device: it is taken as it is."""

    values: torch.Tensor

    @property
    def shape(self) -> tuple[int, int]:
        return (self.values.shape[0], self.values.shape[1])

    @property
    def size_bytes(self) -> int:
        return int(self.values.nbytes)


class DeviceLinear(Protocol):
    """A linear map `[rows, in] → [rows, out]`."""

    @property
    def bias(self) -> torch.Tensor | None: ...

    @property
    def size_bytes(self) -> int: ...

    def apply(self, x: torch.Tensor) -> torch.Tensor: ...


@dataclass(frozen=True, slots=True)
class DenseLinear:
    weight: torch.Tensor
    bias: torch.Tensor | None

    @property
    def size_bytes(self) -> int:
        return int(self.weight.nbytes)

    def apply(self, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, self.weight, self.bias)


@dataclass(frozen=True, slots=True)
class BlockLinear:
    """Codes `[out, in · bits / 8]` with scales and shifts `[out, blocks]` (see BlockMatrix).

    `columns` and `outliers [out, columns]` are the input columns that were kept apart, or None.
    """

    bits: int
    block_size: int
    codes: torch.Tensor
    scales: torch.Tensor
    shifts: torch.Tensor | None
    bias: torch.Tensor | None
    columns: torch.Tensor | None = None
    outliers: torch.Tensor | None = None

    @property
    def size_bytes(self) -> int:
        parts = (self.codes, self.scales, self.shifts, self.columns, self.outliers)
        return sum(part.nbytes for part in parts if part is not None)

    def apply(self, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, self.widen(x.dtype), self.bias)

    def widen(self, dtype: torch.dtype) -> torch.Tensor:
        """The dense weight, rounded once."""
        out = self.codes.shape[0]
        codes = self.codes
        if self.bits == 4:
            codes = torch.stack([codes & 0x0F, codes >> 4], dim=-1)
        dense = codes.view(out, -1, self.block_size).float() - float(1 << (self.bits - 1))
        dense *= self.scales.float()[:, :, None]
        if self.shifts is not None:
            dense += self.shifts.float()[:, :, None]
        dense = dense.view(out, -1)
        if self.columns is not None and self.outliers is not None:
            dense[:, self.columns] += self.outliers.float()
        return dense.to(dtype)


@dataclass(frozen=True, slots=True)
class StackedLinear:
    """Maps of different form, one output after the other."""

    parts: Sequence[DeviceLinear]
    bias: torch.Tensor | None = None

    @property
    def size_bytes(self) -> int:
        return sum(part.size_bytes for part in self.parts)

    def apply(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([part.apply(x) for part in self.parts], dim=-1)


def load_linear(
    parts: Sequence[Matrix | TensorMatrix],
    bias: Float32 | None,
    *,
    device: torch.device,
    dtype: torch.dtype,
) -> DeviceLinear:
    """One map from matrices stacked along their outputs."""
    on_device = None if bias is None else to_tensor(bias, device, dtype)
    if device.type != "cuda" or not any(isinstance(part, BlockMatrix | MixedMatrix) for part in parts):
        weights = [load_dense(part, device, dtype) for part in parts]
        return DenseLinear(weights[0] if len(weights) == 1 else torch.cat(weights), on_device)
    if all(isinstance(part, BlockMatrix) for part in parts) and _are_alike(parts):
        return _load_blocks(_stack(parts), on_device, device)
    return StackedLinear(
        [
            _load_one(part, piece, device, dtype)
            for part, piece in zip(parts, _pieces(parts, on_device), strict=True)
        ]
    )


def load_dense(matrix: Matrix | TensorMatrix, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """A dense weight, widened if it was quantised."""
    if isinstance(matrix, TensorMatrix):
        return matrix.values.to(device, dtype)
    if isinstance(matrix, DenseMatrix):
        return to_tensor(matrix.values, device, dtype)
    return to_tensor(matrix.to_dense(), device, dtype)


def to_tensor(values: Array, device: torch.device, dtype: torch.dtype | None = None) -> torch.Tensor:
    """An array on the device; raw bfloat16 (uint16) is known for what it is. Never shares memory with it."""
    if values.dtype == np.uint16:
        tensor = torch.from_numpy(np.array(values).view(np.int16)).view(torch.bfloat16)
    else:
        tensor = torch.from_numpy(np.array(values))
    return tensor.to(device, dtype)


def _load_one(
    part: Matrix | TensorMatrix, bias: torch.Tensor | None, device: torch.device, dtype: torch.dtype
) -> DeviceLinear:
    if isinstance(part, BlockMatrix):
        return _load_blocks(part, bias, device)
    if isinstance(part, MixedMatrix):
        columns = to_tensor(part.columns, device)
        return _load_blocks(part.blocks, bias, device, columns, to_tensor(part.values, device, dtype))
    return DenseLinear(load_dense(part, device, dtype), bias)


def _load_blocks(
    matrix: BlockMatrix,
    bias: torch.Tensor | None,
    device: torch.device,
    columns: torch.Tensor | None = None,
    outliers: torch.Tensor | None = None,
) -> BlockLinear:
    return BlockLinear(
        bits=matrix.bits,
        block_size=matrix.block_size,
        codes=to_tensor(matrix.codes.reshape(matrix.codes.shape[0], -1), device),
        scales=to_tensor(matrix.scales, device),
        shifts=None if matrix.shifts is None else to_tensor(matrix.shifts, device),
        bias=bias,
        columns=columns,
        outliers=outliers,
    )


def _are_alike(parts: Sequence[Any]) -> bool:
    return len({(part.bits, part.block_size, part.shifts is None) for part in parts}) == 1


def _stack(parts: Sequence[Any]) -> BlockMatrix:
    first = parts[0]
    return BlockMatrix(
        bits=first.bits,
        block_size=first.block_size,
        codes=np.concatenate([part.codes for part in parts]),
        scales=np.concatenate([part.scales for part in parts]),
        shifts=None if first.shifts is None else np.concatenate([part.shifts for part in parts]),
    )


def _pieces(parts: Sequence[Any], bias: torch.Tensor | None) -> Sequence[torch.Tensor | None]:
    if bias is None:
        return [None] * len(parts)
    pieces: Sequence[torch.Tensor] = torch.split(bias, [part.shape[0] for part in parts])
    return pieces
