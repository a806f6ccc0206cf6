"""Linear maps on the device, made from weight matrices in any form.

Dense matrices are held in the number format that is computed in; a bfloat16 checkpoint on a bfloat16 device is
taken bit by bit. Quantised matrices keep their codes on CUDA devices, where our kernels multiply with them
directly and large batches widen one matrix at a time; elsewhere they are widened once, at loading, since widening
at every use would cost a CPU several times what it saves. What a handle occupies is its `size_bytes`.

Scales and shifts of quantised matrices are held in that number format too, as weights are rounded to it anyway.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch.nn import functional

from shardcompute.backends.host.low_rank import LowRank
from shardcompute.backends.matrix import Array, BlockMatrix, DenseMatrix, Float32, Matrix, MixedMatrix
from shardcompute.backends.torch.transfers import upload_weights

TILE_OUTPUTS = 64
_PIECE_TILES = 64


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
    def width_out(self) -> int:
        return int(self.weight.shape[0])

    @property
    def size_bytes(self) -> int:
        return int(self.weight.nbytes)

    def apply(self, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, self.weight, self.bias)


@dataclass(frozen=True, slots=True)
class BlockLinear:
    """A quantised matrix (see BlockMatrix) in the order in which kernels read it.

    `codes` are words of 16 bits `[tiles, groups, TILE_OUTPUTS, block_size]`. A group is `16 / bits` neighbouring
    blocks, and a word holds the codes of one place in each of them, the first block's lowest. `scales` and `shifts`
    are `[groups, tiles · TILE_OUTPUTS, 16 / bits]`. Outputs and blocks that only fill up are zero.
    `columns` and `outliers [out, columns]` are the input columns that were kept apart, or None.
    """

    bits: int
    block_size: int
    width_out: int
    width_in: int
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
        tiles, groups = self.codes.shape[:2]
        words = self.codes.permute(0, 2, 1, 3).reshape(tiles * TILE_OUTPUTS, groups, 1, -1).to(torch.int32)
        places = torch.arange(0, 16, self.bits, device=words.device)[:, None]
        codes = (words >> places) & ((1 << self.bits) - 1)
        dense = (codes - (1 << (self.bits - 1))) * self._by_block(self.scales)
        if self.shifts is not None:
            dense += self._by_block(self.shifts)
        dense = dense.view(tiles * TILE_OUTPUTS, -1)[: self.width_out, : self.width_in]
        return self.with_outliers(dense.to(dtype))

    def with_outliers(self, dense: torch.Tensor) -> torch.Tensor:
        """The columns that were kept apart, put into the dense weight."""
        if self.columns is not None and self.outliers is not None:
            dense[:, self.columns] += self.outliers
        return dense

    def _by_block(self, values: torch.Tensor) -> torch.Tensor:
        return values.float().transpose(0, 1)[..., None]


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


@dataclass(frozen=True, slots=True)
class AdaptedLinear:
    """A map with what adapters add to it (`backends.host.low_rank`); `apply` is the base alone."""

    base: DeviceLinear
    down: torch.Tensor
    up: torch.Tensor
    owners: torch.Tensor

    @property
    def bias(self) -> torch.Tensor | None:
        return self.base.bias

    @property
    def size_bytes(self) -> int:
        return self.base.size_bytes + int(self.down.nbytes + self.up.nbytes + self.owners.nbytes)

    def apply(self, x: torch.Tensor) -> torch.Tensor:
        return self.base.apply(x)

    def apply_adapted(self, x: torch.Tensor, adapters: torch.Tensor) -> torch.Tensor:
        """With the numbers of the rows' adapters."""
        inner = self.own_ranks(functional.linear(x, self.down), adapters)
        return self.base.apply(x) + functional.linear(inner, self.up)

    def own_ranks(self, inner: torch.Tensor, adapters: torch.Tensor) -> torch.Tensor:
        """Of `down · x`, what belongs to each row's adapter; zeros elsewhere."""
        return torch.where(adapters[:, None] == self.owners, inner, torch.zeros_like(inner))


def load_adapted(
    base: DeviceLinear, low_rank: LowRank, *, device: torch.device, dtype: torch.dtype
) -> AdaptedLinear:
    down, up = (to_tensor(each, device, dtype) for each in (low_rank.down, low_rank.up))
    return AdaptedLinear(base, down, up, to_tensor(low_rank.owners, device))


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
        return _load_blocks(_stack(parts), on_device, device, dtype)
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
    if not values.flags.writeable or not values.flags.c_contiguous:
        # Torch takes no others without complaint.
        values = np.array(values, order="C")
    if values.dtype == np.uint16:
        tensor = torch.from_numpy(values.view(np.int16)).view(torch.bfloat16)
    else:
        tensor = torch.from_numpy(values)
    if device.type == "cuda":
        return upload_weights(tensor, device).to(dtype=dtype)
    moved = tensor.to(device, dtype)
    return moved.clone() if moved.data_ptr() == tensor.data_ptr() else moved


def _load_one(
    part: Matrix | TensorMatrix, bias: torch.Tensor | None, device: torch.device, dtype: torch.dtype
) -> DeviceLinear:
    if isinstance(part, BlockMatrix):
        return _load_blocks(part, bias, device, dtype)
    if isinstance(part, MixedMatrix):
        columns = to_tensor(part.columns, device)
        return _load_blocks(part.blocks, bias, device, dtype, columns, to_tensor(part.values, device, dtype))
    return DenseLinear(load_dense(part, device, dtype), bias)


def _load_blocks(
    matrix: BlockMatrix,
    bias: torch.Tensor | None,
    device: torch.device,
    dtype: torch.dtype,
    columns: torch.Tensor | None = None,
    outliers: torch.Tensor | None = None,
) -> BlockLinear:
    width_out, width_in = matrix.shape
    return BlockLinear(
        bits=matrix.bits,
        block_size=matrix.block_size,
        width_out=width_out,
        width_in=width_in,
        codes=pack_codes(to_tensor(matrix.codes, device), matrix.bits),
        scales=pack_scales(to_tensor(matrix.scales, device, dtype), matrix.bits),
        shifts=None
        if matrix.shifts is None
        else pack_scales(to_tensor(matrix.shifts, device, dtype), matrix.bits),
        bias=bias,
        columns=columns,
        outliers=outliers,
    )


def pack_codes(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Codes as a BlockMatrix has them, `[out, blocks, bytes]`, in the order of a BlockLinear."""
    out, blocks, width = codes.shape
    block_size, share = width * 8 // bits, 16 // bits
    tiles, groups = -(-out // TILE_OUTPUTS), -(-blocks // share)
    packed = torch.zeros((tiles, groups, TILE_OUTPUTS, block_size), dtype=torch.int16, device=codes.device)
    # A piece at a time: codes spread out take eight times their room.
    for first in range(0, tiles, _PIECE_TILES):
        piece = codes[first * TILE_OUTPUTS : (first + _PIECE_TILES) * TILE_OUTPUTS]
        if bits == 4:
            piece = torch.stack([piece & 0x0F, piece >> 4], dim=-1).flatten(2)
        count = -(-len(piece) // TILE_OUTPUTS)
        spread = torch.zeros(
            (count * TILE_OUTPUTS, groups * share, block_size), dtype=torch.int32, device=codes.device
        )
        spread[: len(piece), :blocks] = piece
        spread = spread.view(count, TILE_OUTPUTS, groups, share, block_size)
        words = spread[:, :, :, 0]
        for at in range(1, share):
            words = words | spread[:, :, :, at] << (at * bits)
        packed[first : first + count] = words.permute(0, 2, 1, 3).to(torch.int16)
    return packed


def pack_scales(scales: torch.Tensor, bits: int) -> torch.Tensor:
    """Scales or shifts `[out, blocks]` in the order of a BlockLinear."""
    out, blocks = scales.shape
    share = 16 // bits
    groups = -(-blocks // share)
    tiles = -(-out // TILE_OUTPUTS)
    packed = torch.zeros((groups, tiles * TILE_OUTPUTS, share), dtype=scales.dtype, device=scales.device)
    padded = functional.pad(scales, (0, groups * share - blocks))
    packed[:, :out] = padded.view(out, groups, share).transpose(0, 1)
    return packed


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
