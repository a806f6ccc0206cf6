"""Launching the kernels of sparse feed-forward blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import triton

from shardcompute.backends.ops import ExpertBlock, Gate
from shardcompute.backends.torch.kernels.blocks import unpacking
from shardcompute.backends.torch.kernels.experts import expert_linear, group_pairs, join_pairs
from shardcompute.backends.torch.kernels.launch import activation_of, words_of
from shardcompute.backends.torch.weights import TILE_OUTPUTS, BlockLinear, DenseLinear, DeviceLinear

_TILE_ROWS = 16
_CHUNK = 32


@dataclass(frozen=True, slots=True)
class ExpertMatrices:
    """The matrices of all experts, of one form: the first, and how far the others lie from it."""

    first: DenseLinear | BlockLinear
    count: int
    offsets: torch.Tensor


@dataclass(frozen=True, slots=True)
class PairGroups:
    """See `experts`: pairs by expert, and tiles of them."""

    order: torch.Tensor
    tiles: torch.Tensor
    pairs: int


def gather_matrices(matrices: Sequence[DeviceLinear], *, is_gated: bool) -> ExpertMatrices | None:
    """Matrices as `SparseKernels` take them, or None where they cannot: forms that differ, outliers, odd widths."""
    if len({_form(matrix) for matrix in matrices}) != 1:
        return None
    first = matrices[0]
    if isinstance(first, BlockLinear):
        if first.columns is not None or first.block_size not in (16, 32, 64):
            return None
        if is_gated and first.width_out % (2 * TILE_OUTPUTS):
            return None
    elif not isinstance(first, DenseLinear):
        return None
    rows = [_parts(cast(DenseLinear | BlockLinear, matrix)) for matrix in matrices]
    offsets = [[_distance(part, base) for part, base in zip(row, rows[0], strict=True)] for row in rows]
    return ExpertMatrices(first, len(matrices), torch.tensor(offsets, device=rows[0][0].device))


class SparseKernels:
    """The kernels of one device; `pdl` as `Kernels` launches."""

    def __init__(self, pdl: dict[str, Any]) -> None:
        self._pdl = pdl

    def group(self, chosen: torch.Tensor, experts: int) -> PairGroups:
        """Pairs of `chosen [rows, per token]` by expert."""
        pairs = chosen.numel()
        # Every expert that is chosen at all may have one tile that is not full.
        tiles = min(pairs, experts) + pairs // _TILE_ROWS
        order = torch.empty(pairs, dtype=torch.int32, device=chosen.device)
        table = torch.empty((tiles, 3), dtype=torch.int32, device=chosen.device)
        group_pairs[(1,)](
            chosen.to(torch.int32).contiguous(),
            order,
            table,
            pairs,
            tiles,
            EXPERTS=max(16, triton.next_power_of_2(experts)),
            CHUNK=_CHUNK,
            ROWS=_TILE_ROWS,
            **self._pdl,
        )
        return PairGroups(order, table, pairs)

    def multiply(
        self,
        x: torch.Tensor,
        matrices: ExpertMatrices,
        groups: PairGroups,
        *,
        per_row: int,
        gate: Gate | None,
        dtype: torch.dtype,
    ) -> torch.Tensor:
        """Every pair's row of x, which `per_row` pairs share, through its expert's matrix: `[pairs, out]`."""
        first = matrices.first
        width_out = first.width_out // (1 if gate is None else 2)
        out = torch.empty((groups.pairs, width_out), dtype=dtype, device=x.device)
        weight, scales, shifts, _ = _parts(first)
        is_blocks = isinstance(first, BlockLinear)
        bits, block_size = (first.bits, first.block_size) if isinstance(first, BlockLinear) else (16, 1)
        has_shift = isinstance(first, BlockLinear) and first.shifts is not None
        asm = ("", "", "", "")
        if is_blocks:
            asm = unpacking(bits, is_bfloat16=x.dtype == torch.bfloat16, has_shift=has_shift)
        block_n = 64
        expert_linear[(triton.cdiv(width_out, block_n), len(groups.tiles))](
            x,
            weight,
            scales,
            shifts,
            weight if first.bias is None else first.bias,
            matrices.offsets,
            out,
            groups.order,
            groups.tiles,
            x.shape[1],
            width_out,
            scales.shape[1] if is_blocks else 0,
            scales.shape[0] if is_blocks else 0,
            x.stride(0),
            0.0 if gate is None or gate.limit is None else gate.limit,
            PER_ROW=per_row,
            ROWS=_TILE_ROWS,
            BLOCK_N=block_n,
            BLOCK_K=128 if x.shape[1] >= 512 else 64,
            BITS=bits,
            BLOCK_SIZE=block_size,
            HAS_SHIFT=has_shift,
            GATED=gate is not None,
            ACTIVATION="none" if gate is None else activation_of(gate),
            HAS_BIAS=first.bias is not None,
            ASM_0=asm[0],
            ASM_1=asm[1],
            ASM_2=asm[2],
            ASM_3=asm[3],
            num_warps=2 if is_blocks else 4,
            num_stages=4,
            **self._pdl,
        )
        return out

    def join(self, y: torch.Tensor, weights: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The weighted sum of each row's pairs."""
        rows, per_row = weights.shape
        width = y.shape[1]
        out = torch.empty((rows, width), dtype=dtype, device=y.device)
        block = min(triton.next_power_of_2(width), 1024)
        join_pairs[(rows, triton.cdiv(width, block))](
            y, weights.contiguous(), out, width, PER_ROW=per_row, BLOCK=block, **self._pdl
        )
        return out


def can_run(block: ExpertBlock) -> bool:
    return len(block.gate_up) <= 512 and block.owned is None


def _form(matrix: DeviceLinear) -> tuple[Any, ...]:
    has_bias = matrix.bias is not None
    if isinstance(matrix, BlockLinear):
        return (matrix.bits, matrix.block_size, matrix.shifts is None, matrix.columns is None, has_bias)
    return (type(matrix), has_bias)


def _parts(
    matrix: DenseLinear | BlockLinear,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Weights, scales, shifts and biases as kernels take them; the first again where there is no such thing."""
    if isinstance(matrix, BlockLinear):
        scales, shifts = words_of(matrix)
        return matrix.codes, scales, shifts, matrix.codes if matrix.bias is None else matrix.bias
    return matrix.weight, matrix.weight, matrix.weight, matrix.weight if matrix.bias is None else matrix.bias


def _distance(part: torch.Tensor, base: torch.Tensor) -> int:
    """In elements."""
    return int(part.data_ptr() - base.data_ptr()) // int(part.element_size())
