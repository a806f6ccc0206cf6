"""Launching our kernels: which tiles, which workspace, which grid."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeGuard

import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

from shardcompute.backends.ops import Attention, Gate
from shardcompute.backends.torch.kernels.attention import attend_blocks, attend_rows
from shardcompute.backends.torch.kernels.blocks import skinny_blocks, unpacking, widen_blocks
from shardcompute.backends.torch.kernels.heads import add_norm, gate_rows, place_heads
from shardcompute.backends.torch.kernels.linear import skinny_linear
from shardcompute.backends.torch.kernels.tiling import (
    Tiling,
    choose_block_tiling,
    choose_tiling,
    choose_wide_tiling,
    is_wide,
    pad_block_rows,
    pad_rows,
)
from shardcompute.backends.torch.kernels.wide import wide_linear
from shardcompute.backends.torch.kernels.workspace import Workspace
from shardcompute.backends.torch.weights import TILE_OUTPUTS, BlockLinear, DenseLinear, DeviceLinear
from shardcompute.core.batch import PAGE_TOKENS

KV_SPLITS = 16
MANY_ROWS_SPLITS = 4
ROW_WARPS = 4
ROW_STAGES = 2


@dataclass(frozen=True, slots=True)
class Places:
    """Where the rows of a step lie, on the device, int32: their positions, and those `[3, rows]` by which they turn.

    `short` are the rows for `attend_rows` (None: all of them; -1: none), `blocks [n, 2]` the first row and row count
    (0: none) of each piece for `attend_blocks`. `ends` are where what rows see ends, None: behind themselves.
    `adapters` are those that rows chose, None: nobody did.
    """

    positions: torch.Tensor
    turns: torch.Tensor
    owners: torch.Tensor
    tables: torch.Tensor
    logit_rows: torch.Tensor
    short: torch.Tensor | None = None
    blocks: torch.Tensor | None = None
    ends: torch.Tensor | None = None
    adapters: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class HeadRows:
    """Heads of every row, still to be normed and turned: a view `[rows, heads · head_dim]` and how."""

    rows: torch.Tensor
    norm: torch.Tensor | None = None
    eps: float = 0.0
    rotation: tuple[torch.Tensor, torch.Tensor] | None = None


class Kernels:
    """The kernels of one device."""

    def __init__(self, device: torch.device) -> None:
        properties = torch.cuda.get_device_properties(device)
        self.processors = properties.multi_processor_count
        self._shared_bytes = properties.shared_memory_per_block_optin
        self.pdl: dict[str, Any] = {"PDL": False}
        """How kernels are launched: before the one before them ends, where the chip can do that."""
        if torch.cuda.get_device_capability(device)[0] >= 9:
            self.pdl = {"PDL": True, "launch_pdl": True}
        self._linear_space = Workspace(device)
        self._attention_space = Workspace(device)

    def can_multiply(
        self, matrix: DeviceLinear, *, is_gated: bool = False
    ) -> TypeGuard[DenseLinear | BlockLinear]:
        """Whether `linear` takes this form; a gated pair must not share a tile of quantised outputs."""
        if not isinstance(matrix, BlockLinear):
            return isinstance(matrix, DenseLinear)
        if is_gated and matrix.width_out % (2 * TILE_OUTPUTS):
            return False
        return matrix.columns is None and matrix.block_size in (16, 32, 64)

    def linear(
        self,
        x: torch.Tensor,
        matrix: DenseLinear | BlockLinear,
        gate: Gate | None = None,
        dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        """The map of any rows, each of which has the same bits in any company; with `gate`, the two halves of its
        outputs joined."""
        width_out = matrix.width_out // (1 if gate is None else 2)
        out = torch.empty((len(x), width_out), dtype=dtype or x.dtype, device=x.device)
        rows = len(x)
        if not rows:
            return out
        if isinstance(matrix, BlockLinear):
            few = self._block_tiling(matrix, pad_block_rows(rows, width_out), gate)
            if is_wide(rows):
                self._multiply_many(x, DenseLinear(self.widen(matrix, x.dtype), matrix.bias), out, gate, few)
            else:
                self._multiply_blocks(x, matrix, out, gate, few)
        else:
            few = self._dense_tiling(matrix, pad_rows(rows), gate)
            if is_wide(rows, few):
                self._multiply_many(x, matrix, out, gate, few)
            else:
                self._multiply_dense(x, matrix, out, gate, few)
        return out

    def _multiply_many(
        self, x: torch.Tensor, matrix: DenseLinear, out: torch.Tensor, gate: Gate | None, few: Tiling
    ) -> None:
        (rows, width_in), width_out, weight = x.shape, out.shape[1], matrix.weight
        tiling = choose_wide_tiling(rows, few, is_gated=gate is not None, shared_bytes=self._shared_bytes)
        has_tma = (
            self.pdl["PDL"] and width_in % tiling.block_k == 0 and can_describe(x) and can_describe(weight)
        )
        row_blocks = triton.cdiv(rows, tiling.rows)
        wide_linear[(triton.cdiv(width_out, tiling.block_n) * row_blocks,)](
            describe(x, tiling.rows, tiling.block_k) if has_tma else x,
            describe(weight, tiling.block_n, tiling.block_k) if has_tma else weight,
            weight if matrix.bias is None else matrix.bias,
            out,
            rows,
            width_in,
            width_out,
            few.part_inputs(width_in),
            x.stride(0),
            0.0 if gate is None or gate.limit is None else gate.limit,
            row_blocks,
            ROWS=tiling.rows,
            BLOCK_N=tiling.block_n,
            BLOCK_K=tiling.block_k,
            PARTS=few.split,
            GATED=gate is not None,
            ACTIVATION="none" if gate is None else activation_of(gate),
            HAS_BIAS=matrix.bias is not None,
            IS_EVEN=width_in % tiling.block_k == 0,
            TMA=has_tma,
            num_warps=tiling.warps,
            num_stages=tiling.stages,
            **self.pdl,
        )

    def _dense_tiling(self, matrix: DenseLinear, tile_rows: int, gate: Gate | None) -> Tiling:
        return choose_tiling(
            tile_rows,
            matrix.width_out // (1 if gate is None else 2),
            matrix.weight.shape[1],
            is_gated=gate is not None,
            processors=self.processors,
            shared_bytes=self._shared_bytes,
        )

    def _block_tiling(self, matrix: BlockLinear, tile_rows: int, gate: Gate | None) -> Tiling:
        return choose_block_tiling(
            tile_rows,
            matrix.width_out // (1 if gate is None else 2),
            matrix.scales.shape[0],
            bits=matrix.bits,
            block_size=matrix.block_size,
            is_gated=gate is not None,
            processors=self.processors,
            shared_bytes=self._shared_bytes,
        )

    def _multiply_dense(
        self, x: torch.Tensor, matrix: DenseLinear, out: torch.Tensor, gate: Gate | None, tiling: Tiling
    ) -> None:
        (rows, width_in), width_out = x.shape, out.shape[1]
        tile_rows = pad_rows(rows)
        row_blocks = triton.cdiv(rows, tile_rows)
        tiles = triton.cdiv(width_out, tiling.block_n) * row_blocks
        skinny_linear[(tiles, tiling.split)](
            x,
            matrix.weight,
            matrix.weight if matrix.bias is None else matrix.bias,
            out,
            *self._split_space(tiles, tiling, tile_rows, gate),
            rows,
            width_in,
            width_out,
            x.stride(0),
            0.0 if gate is None or gate.limit is None else gate.limit,
            row_blocks,
            ROWS=tile_rows,
            BLOCK_N=tiling.block_n,
            BLOCK_K=tiling.block_k,
            SPLIT=tiling.split,
            GATED=gate is not None,
            ACTIVATION="none" if gate is None else activation_of(gate),
            HAS_BIAS=matrix.bias is not None,
            IS_EVEN=width_in % tiling.block_k == 0 and width_out % tiling.block_n == 0,
            PREFETCH=tiling.prefetch if self.pdl["PDL"] else 0,
            num_warps=tiling.warps,
            num_stages=tiling.stages,
            **self.pdl,
        )

    def _multiply_blocks(
        self, x: torch.Tensor, matrix: BlockLinear, out: torch.Tensor, gate: Gate | None, tiling: Tiling
    ) -> None:
        (rows, width_in), width_out = x.shape, out.shape[1]
        groups, padded_out = matrix.scales.shape[:2]
        tile_rows = pad_block_rows(rows, width_out)
        row_blocks = triton.cdiv(rows, tile_rows)
        tiles = triton.cdiv(width_out, tiling.block_n) * row_blocks
        scales, shifts = words_of(matrix)
        asm = unpacking(
            matrix.bits, is_bfloat16=x.dtype == torch.bfloat16, has_shift=matrix.shifts is not None
        )
        skinny_blocks[(tiles, tiling.split)](
            x,
            matrix.codes,
            scales,
            shifts,
            matrix.codes if matrix.bias is None else matrix.bias,
            out,
            *self._split_space(tiles, tiling, tile_rows, gate),
            rows,
            width_in,
            width_out,
            padded_out,
            groups,
            x.stride(0),
            0.0 if gate is None or gate.limit is None else gate.limit,
            row_blocks,
            ROWS=tile_rows,
            BLOCK_N=tiling.block_n,
            SPLIT=tiling.split,
            BITS=matrix.bits,
            BLOCK_SIZE=matrix.block_size,
            GATED=gate is not None,
            ACTIVATION="none" if gate is None else activation_of(gate),
            HAS_SHIFT=matrix.shifts is not None,
            HAS_BIAS=matrix.bias is not None,
            IS_EVEN=width_in == groups * matrix.block_size * (16 // matrix.bits),
            ASM_0=asm[0],
            ASM_1=asm[1],
            ASM_2=asm[2],
            ASM_3=asm[3],
            STAGES=tiling.stages,
            JOINED=tile_rows >= 64,
            num_warps=tiling.warps,
            num_stages=tiling.stages,
            # Programs that start while a gated product's still run crowd on few processors: 25 us instead of 14. Asking
            # for codes before the wait, as `_multiply_dense` does, costs time here (8 layers: 626 us instead of 614).
            **({"PDL": False} if gate is None and width_in > width_out else self.pdl),
        )

    def _split_space(
        self, tiles: int, tiling: Tiling, tile_rows: int, gate: Gate | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Room for the parts of sums that several programs make, and a counter for each tile."""
        size = tiles * tiling.split * tile_rows * tiling.block_n * (1 if gate is None else 2)
        return self._linear_space.parts(size if tiling.split > 1 else 1), self._linear_space.counters(tiles)

    def widen(self, matrix: BlockLinear, dtype: torch.dtype) -> torch.Tensor:
        """The dense weight, rounded once, as `_multiply_blocks` rounds it."""
        groups, padded_out = matrix.scales.shape[:2]
        out = torch.empty((matrix.width_out, matrix.width_in), dtype=dtype, device=matrix.codes.device)
        scales, shifts = words_of(matrix)
        asm = unpacking(matrix.bits, is_bfloat16=dtype == torch.bfloat16, has_shift=matrix.shifts is not None)
        widen_blocks[(len(matrix.codes), groups)](
            matrix.codes,
            scales,
            shifts,
            out,
            matrix.width_in,
            matrix.width_out,
            padded_out,
            groups,
            BITS=matrix.bits,
            BLOCK_SIZE=matrix.block_size,
            HAS_SHIFT=matrix.shifts is not None,
            ASM_0=asm[0],
            ASM_1=asm[1],
            ASM_2=asm[2],
            ASM_3=asm[3],
        )
        return matrix.with_outliers(out)

    def gate(self, x: torch.Tensor, gate: Gate) -> torch.Tensor:
        """The two halves of every row joined."""
        rows, width = len(x), x.shape[1] // 2
        out = torch.empty((rows, width), dtype=x.dtype, device=x.device)
        block = min(triton.next_power_of_2(width), 2048)
        gate_rows[(rows, triton.cdiv(width, block))](
            x, out, width, gate.limit or 0.0, ACTIVATION=activation_of(gate), BLOCK=block, **self.pdl
        )
        return out

    def add_norm(
        self, x: torch.Tensor, y: torch.Tensor | None, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """x + y (or just x) and its root-mean-square norm over the whole row."""
        rows, width = x.shape
        out = torch.empty((rows, width), dtype=x.dtype, device=x.device)
        total = x if y is None else torch.empty_like(out)
        block = triton.next_power_of_2(width)
        add_norm[(rows,)](
            x,
            x if y is None else y,
            weight,
            total,
            out,
            x.stride(0),
            width,
            eps,
            BLOCK=block,
            HAS_ADD=y is not None,
            num_warps=min(max(block // 256, 1), 16),
            **self.pdl,
        )
        return total, out

    def place_heads(
        self,
        q: HeadRows,
        k: HeadRows,
        v: torch.Tensor,
        pool: torch.Tensor,
        places: Places,
        attention: Attention,
        axes: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Norm and turn q and k, put k and v into their pages; returns the queries. `axes` say which of a row's turns
        each pair of entries takes, None: all the first."""
        rows = len(v)
        out = torch.empty((rows, attention.heads * attention.head_dim), dtype=q.rows.dtype, device=v.device)
        rotation = q.rotation or (q.rows, q.rows)
        head_block = min(8, triton.next_power_of_2(attention.kv_heads))
        blocks = triton.cdiv(attention.heads, head_block) + 2 * triton.cdiv(attention.kv_heads, head_block)
        place_heads[(rows, blocks)](
            q.rows,
            k.rows,
            v,
            q.rows.stride(0),
            k.rows.stride(0),
            v.stride(0),
            q.rows if q.norm is None else q.norm,
            k.rows if k.norm is None else k.norm,
            rotation[0],
            rotation[1],
            out,
            pool,
            places.positions,
            places.turns,
            places.turns if axes is None else axes,
            places.owners,
            places.tables,
            places.turns.stride(0),
            places.tables.stride(0),
            pool.stride(1),
            pool.stride(0),
            q.eps,
            HEADS=attention.heads,
            KV_HEADS=attention.kv_heads,
            HEAD_DIM=attention.head_dim,
            D_BLOCK=triton.next_power_of_2(attention.head_dim),
            HEAD_BLOCK=head_block,
            HALF=0 if q.rotation is None else q.rotation[0].shape[-1],
            PAGE=PAGE_TOKENS,
            HAS_NORM=q.norm is not None,
            HAS_AXES=axes is not None,
            num_warps=max(1, head_block // 2),
            **self.pdl,
        )
        return out

    def attend(
        self, q: torch.Tensor, pool: torch.Tensor, places: Places, attention: Attention
    ) -> torch.Tensor:
        """Attention of every row over its session's pages, whose keys and values are already placed."""
        out = torch.empty_like(q)
        if places.blocks is not None:
            self._attend_blocks(q, pool, out, places, places.blocks, attention)
        count = len(q) if places.short is None else len(places.short)
        if count:
            self._attend_rows(q, pool, out, places, count, attention)
        return out

    def _attend_rows(
        self,
        q: torch.Tensor,
        pool: torch.Tensor,
        out: torch.Tensor,
        places: Places,
        count: int,
        attention: Attention,
    ) -> None:
        group = attention.heads // attention.kv_heads
        group_block = max(16, triton.next_power_of_2(group))
        d_block = triton.next_power_of_2(attention.head_dim)
        slots = count * attention.kv_heads * KV_SPLITS
        parts = self._attention_space.parts(slots * (group * d_block + 2 * group_block))
        # Many rows fill the chip: a program then takes several parts of its row, one after the other, or all.
        waves = count * attention.kv_heads / self.processors
        programs = KV_SPLITS if waves < 2 else MANY_ROWS_SPLITS if waves < 3 else 1
        attend_rows[(count, attention.kv_heads, programs)](
            q,
            pool,
            out,
            places.positions if places.short is None else places.short,
            places.positions,
            places.positions if places.ends is None else places.ends,
            places.owners,
            places.tables,
            q if attention.sinks is None else attention.sinks,
            parts,
            parts[slots * group * d_block :],
            self._attention_space.counters(count * attention.kv_heads),
            *self._sizes(pool, places, attention),
            GROUP_BLOCK=group_block,
            SPLITS=KV_SPLITS,
            PROGRAMS=programs,
            HAS_ROWS=places.short is not None,
            HAS_ENDS=places.ends is not None,
            **self._forms(attention),
            num_warps=ROW_WARPS,
            num_stages=ROW_STAGES,
            **self.pdl,
        )

    def _attend_blocks(
        self,
        q: torch.Tensor,
        pool: torch.Tensor,
        out: torch.Tensor,
        places: Places,
        blocks: torch.Tensor,
        attention: Attention,
    ) -> None:
        attend_blocks[(len(blocks), attention.heads)](
            q,
            pool,
            out,
            blocks,
            places.positions,
            places.positions if places.ends is None else places.ends,
            places.owners,
            places.tables,
            q if attention.sinks is None else attention.sinks,
            *self._sizes(pool, places, attention),
            SPLITS=KV_SPLITS,
            BLOCK_M=PAGE_TOKENS,
            HAS_ENDS=places.ends is not None,
            **self._forms(attention),
            num_warps=4,
            num_stages=2,
            **self.pdl,
        )

    def _sizes(self, pool: torch.Tensor, places: Places, attention: Attention) -> tuple[float, ...]:
        return (
            places.tables.stride(0),
            pool.stride(1),
            pool.stride(0),
            attention.scale,
            attention.softcap or 0.0,
            attention.chunk or attention.window or 0,
        )

    def _forms(self, attention: Attention) -> dict[str, Any]:
        return {
            "HEADS": attention.heads,
            "KV_HEADS": attention.kv_heads,
            "HEAD_DIM": attention.head_dim,
            "D_BLOCK": triton.next_power_of_2(attention.head_dim),
            "PAGE": PAGE_TOKENS,
            "HAS_CAP": attention.softcap is not None,
            "HAS_WINDOW": attention.window is not None or attention.chunk is not None,
            "IS_CHUNKED": attention.chunk is not None,
            "HAS_SINKS": attention.sinks is not None,
        }


def words_of(matrix: BlockLinear) -> tuple[torch.Tensor, torch.Tensor]:
    """A group's scales and shifts, a word for each output; scales twice where there are no shifts."""
    word = torch.int64 if matrix.bits == 4 else torch.int32
    scales = matrix.scales.view(word)
    return scales, scales if matrix.shifts is None else matrix.shifts.view(word)


def activation_of(gate: Gate) -> str:
    return gate.activation if gate.limit is None else "clamped"


def can_describe(x: torch.Tensor) -> bool:
    return bool(x.data_ptr() % 16 == 0 and x.stride(0) * x.element_size() % 16 == 0)


def describe(x: torch.Tensor, rows: int, columns: int) -> Any:
    """A matrix as the chip's own copying takes it, in tiles; past its end are zeros."""
    return TensorDescriptor(x, list(x.shape), list(x.stride()), [rows, columns])
