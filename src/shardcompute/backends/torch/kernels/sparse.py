"""Launching the kernels of sparse feed-forward blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import triton

from shardcompute.backends.ops import ExpertBlock, Gate
from shardcompute.backends.torch.kernels.blocks import unpacking
from shardcompute.backends.torch.kernels.experts import (
    choose_experts,
    expert_linear,
    group_pairs,
    join_pairs,
)
from shardcompute.backends.torch.kernels.launch import activation_of, words_of
from shardcompute.backends.torch.kernels.tiling import choose_expert_tiling
from shardcompute.backends.torch.kernels.workspace import Workspace
from shardcompute.backends.torch.weights import TILE_OUTPUTS, BlockLinear, DenseLinear, DeviceLinear
from shardcompute.core.expert_routing import LEAST_SUM

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
    per_token: int


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

    def __init__(self, pdl: dict[str, Any], processors: int, device: torch.device) -> None:
        self._pdl = pdl
        self._processors = processors
        self._space = Workspace(device)

    def choose(
        self, logits: torch.Tensor, block: ExpertBlock
    ) -> tuple[torch.Tensor, torch.Tensor, PairGroups | None]:
        """What `routing.choose_experts` gives for a block without groups of experts, and the pairs of a single row."""
        rows, experts = logits.shape
        each, routing = block.per_token, block.routing
        chosen = torch.empty((rows, each), dtype=torch.int32, device=logits.device)
        weights = torch.empty((rows, each), dtype=torch.float32, device=logits.device)
        order = torch.empty(each, dtype=torch.int32, device=logits.device)
        tiles = torch.empty((each, 3), dtype=torch.int32, device=logits.device)
        choose_experts[(rows,)](
            logits,
            logits if block.choice_bias is None else block.choice_bias,
            chosen,
            weights,
            order,
            tiles,
            experts,
            routing.scale,
            EXPERTS=triton.next_power_of_2(experts),
            PER_TOKEN=each,
            SLOTS=max(2, triton.next_power_of_2(each)),
            IS_SIGMOID=routing.scores == "sigmoid",
            BY_LOGITS=routing.chooses_by_logits,
            HAS_BIAS=block.choice_bias is not None,
            OVER_CHOSEN=routing.weights_over == "chosen",
            KEEPS_LOGITS=routing.weights_over == "chosen" and routing.scores == "softmax",
            LEAST_SUM=LEAST_SUM,
            IS_SINGLE=rows == 1,
            num_warps=1 if experts <= 128 else 4,
            **self._pdl,
        )
        return chosen, weights, PairGroups(order, tiles, each, each) if rows == 1 else None

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
        return PairGroups(order, table, pairs, chosen.shape[1])

    def multiply(
        self,
        x: torch.Tensor,
        matrices: ExpertMatrices,
        groups: PairGroups,
        *,
        per_row: int,
        gate: Gate | None,
        dtype: torch.dtype,
        joined: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """Every pair's row of x, which `per_row` pairs share, through its expert's matrix: `[parts, pairs, out]`, or
        `[pairs, out]` if they are gated. With `joined`, weights and a row `[1, out]`, the pairs of a single row are
        added up there, as `join` would."""
        first = matrices.first
        width_out = first.width_out // (1 if gate is None else 2)
        weight, scales, shifts, _ = _parts(first)
        is_blocks = isinstance(first, BlockLinear)
        bits, block_size = (first.bits, first.block_size) if isinstance(first, BlockLinear) else (16, 1)
        has_shift = isinstance(first, BlockLinear) and first.shifts is not None
        asm = ("", "", "", "")
        if is_blocks:
            asm = unpacking(bits, is_bfloat16=x.dtype == torch.bfloat16, has_shift=has_shift)
        tiling = choose_expert_tiling(
            width_out,
            x.shape[1],
            groups.per_token,
            bits=bits,
            groups=scales.shape[0] if is_blocks else 0,
            is_gated=gate is not None,
            processors=self._processors,
        )
        padded_groups = scales.shape[0] if is_blocks else 0
        out = torch.empty((tiling.split, groups.pairs, width_out), dtype=dtype, device=x.device)
        expert_linear[(triton.cdiv(width_out, tiling.block_n), len(groups.tiles), tiling.split)](
            x,
            weight,
            scales,
            shifts,
            weight if first.bias is None else first.bias,
            matrices.offsets,
            out,
            groups.order,
            groups.tiles,
            weight if joined is None else joined[0],
            weight if joined is None else joined[1],
            groups.tiles if joined is None else self._space.counters(triton.cdiv(width_out, tiling.block_n)),
            groups.pairs,
            x.shape[1],
            width_out,
            scales.shape[1] if is_blocks else 0,
            padded_groups,
            x.stride(0),
            0.0 if gate is None or gate.limit is None else gate.limit,
            PER_ROW=per_row,
            ROWS=_TILE_ROWS,
            BLOCK_N=tiling.block_n,
            BLOCK_K=tiling.block_k,
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
            IS_EVEN=x.shape[1] == padded_groups * block_size * (16 // bits),
            STAGES=tiling.stages,
            SPLIT=tiling.split,
            JOINED=0 if joined is None else groups.pairs,
            num_warps=tiling.warps,
            num_stages=tiling.stages,
            # As with quantised matrices that all rows go through: programs that start early crowd on few processors.
            **({"PDL": False} if is_blocks and gate is None else self._pdl),
        )
        return out[0] if gate is not None else out

    def join(self, y: torch.Tensor, weights: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The weighted sum of each row's pairs, of which `y [parts, pairs, width]` has the parts."""
        rows, per_row = weights.shape
        split, pairs, width = y.shape
        out = torch.empty((rows, width), dtype=dtype, device=y.device)
        block = min(triton.next_power_of_2(width), 1024)
        join_pairs[(rows, triton.cdiv(width, block))](
            y,
            weights.contiguous(),
            out,
            width,
            pairs * width,
            PER_ROW=per_row,
            SPLIT=split,
            BLOCK=block,
            **self._pdl,
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
