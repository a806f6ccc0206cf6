"""The primitives for CUDA devices, with our own kernels where torch's launch too often or read too slowly.

The decoder calls one primitive after the other; some results here are only promises (`Product`, `Sum`,
`HeadRows`), so that the next primitive can take over the work in one kernel: a product with its gate, a residual
sum with the norm behind it, norm and rotation of heads with the write to the KV pages. Sums are rounded before
they are normed, so a model cut between two layers computes the same bits as a whole one.

In 16-bit numbers every kernel gives a row the same bits whatever rows stand beside it, and however a prompt was cut
into steps. Nothing here waits for the device, so that it can be captured in a graph, but experts of several forms.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from shardcompute.backends.ops import Attention, ExpertBlock, Gate
from shardcompute.backends.torch.kernels.launch import HeadRows, Kernels, Places
from shardcompute.backends.torch.kernels.sparse import (
    ExpertMatrices,
    SparseKernels,
    can_run,
    gather_matrices,
)
from shardcompute.backends.torch.kernels.tiling import MAX_ROWS
from shardcompute.backends.torch.kernels.tokens import TokenKernels
from shardcompute.backends.torch.kv import PagedKv
from shardcompute.backends.torch.ops import PartialTable, Rotation, TorchOps
from shardcompute.backends.torch.plan import StepPlan, cut_blocks
from shardcompute.backends.torch.weights import (
    AdaptedLinear,
    BlockLinear,
    DenseLinear,
    DeviceLinear,
    StackedLinear,
)
from shardcompute.core.batch import PAGE_TOKENS


@dataclass(frozen=True, slots=True)
class Product:
    """A linear map not applied yet."""

    x: torch.Tensor
    matrix: DeviceLinear


@dataclass(slots=True)
class Sum:
    """x + y, not added yet; `total` once it is."""

    x: torch.Tensor
    y: torch.Tensor
    total: torch.Tensor | None = None


class FusedOps(TorchOps):
    """`begin` or `place` says where the rows of the next calls lie. `use_library` leaves matrices to torch."""

    def __init__(
        self,
        kv: PagedKv,
        context_length: int,
        device: torch.device,
        dtype: torch.dtype,
        *,
        use_library: bool = False,
    ) -> None:
        super().__init__(kv, context_length, device, dtype)
        self._kernels = Kernels(device)
        self._sparse = SparseKernels(self._kernels.pdl, self._kernels.processors, device)
        self.token_kernels = TokenKernels(device, self._kernels.pdl)
        self.picked = torch.zeros(1, dtype=torch.int64, device=device)
        """Tokens by slot, for ids that name one."""
        self._gathered: dict[int, tuple[ExpertMatrices, ExpertMatrices] | None] = {}
        self._use_library = use_library or dtype == torch.float32
        self._places: Any = None
        self._ahead = 0
        """Positions that the rows are further than their plan says."""
        self.has_waited = False
        """Whether a primitive needed the host's answer: what ran cannot be captured."""

    def begin(self, plan: StepPlan) -> None:
        blocks = cut_blocks(plan)
        short = np.arange(plan.short_rows, dtype=np.int32)
        self.place(
            Places(
                positions=self._upload(plan.positions),
                turns=self._upload(
                    np.broadcast_to(plan.positions, (3, plan.rows)).copy()
                    if plan.turns is None
                    else plan.turns
                ),
                owners=self._upload(plan.owners),
                tables=self._upload(plan.tables),
                logit_rows=self._upload(plan.logit_rows),
                short=None if not len(blocks) else self._upload(short),
                blocks=None if not len(blocks) else self._upload(blocks),
                ends=None if plan.ends is None else self._upload(plan.ends),
                adapters=self._adapters_of(plan),
            )
        )
        self._plan = plan

    def place(self, places: Places) -> None:
        self._places = places
        self._positions = places.positions
        self._turns = places.turns
        self._adapters = places.adapters
        self._plan = None
        self._ahead = 0
        self._logit_rows = places.logit_rows

    def advance(self) -> None:
        plan, ahead = self._plan, self._ahead + 1
        # Where they lie stays on the device; the plan itself follows where it is asked for.
        places = self._places
        self.place(replace(places, positions=places.positions + 1, turns=places.turns + 1))
        self._plan, self._ahead = plan, ahead

    def finish(self, x: Any) -> torch.Tensor:
        # Logits come straight from the float32 sums: rounding them first would make ties.
        if isinstance(x, Product):
            return self._apply(x, torch.float32)
        return self._value(x).float()

    def embed(self, table: torch.Tensor | PartialTable, ids: torch.Tensor) -> torch.Tensor:
        if isinstance(table, PartialTable):
            return super().embed(table, ids)
        return self.token_kernels.embed(table, ids, self.picked)

    def linear(self, x: Any, matrix: DeviceLinear) -> Any:
        return Product(self._value(x), matrix)

    def rms_norm(self, x: Any, weight: torch.Tensor, eps: float) -> Any:
        if isinstance(x, Sum) and x.total is None:
            x.total, normed = self._kernels.add_norm(x.x, x.y, weight, eps)
            return normed
        if isinstance(x, HeadRows):  # turned already: our kernel would norm first
            return HeadRows(self._turned(x, len(weight)), norm=weight, eps=eps)
        rows = self._value(x)
        if len(weight) != rows.shape[-1]:
            return HeadRows(rows, norm=weight, eps=eps)
        return self._kernels.add_norm(rows, None, weight, eps)[1]

    def add(self, x: Any, y: Any) -> Any:
        return Sum(self._value(x), self._value(y))

    def gated(self, gate_up: Any, gate: Gate) -> Any:
        if not isinstance(gate_up, Product):
            return self._kernels.gate(self._value(gate_up), gate)
        x, matrix = gate_up.x, gate_up.matrix
        base = matrix.base if isinstance(matrix, AdaptedLinear) else matrix
        if self._use_library or not self._kernels.can_multiply(base, is_gated=True):
            return self._kernels.gate(self._value(gate_up), gate)
        if base is not matrix and self._adapters is not None:
            # In float32, as where a product is gated at once: rows of the base alone are to have its bits.
            return self._kernels.gate(self._apply(gate_up, torch.float32), gate).to(self._dtype)
        return self._kernels.linear(x, base, gate)

    def rotate(self, x: Any, head_dim: int, rotation: Rotation) -> Any:
        heads = x if isinstance(x, HeadRows) else HeadRows(self._value(x))
        return replace(heads, rotation=rotation)

    def attend(self, q: Any, k: Any, v: Any, layer: int, attention: Attention) -> torch.Tensor:
        if attention.value_dim is not None:
            return self._attend_latent(q, k, layer, attention)
        q, k = (x if isinstance(x, HeadRows) else HeadRows(self._value(x)) for x in (q, k))
        if q.rotation is not k.rotation:  # our kernel turns both alike
            q, k = (HeadRows(self._turned(x, attention.head_dim)) for x in (q, k))
        assert self._kv is not None
        pool = self._kv.pool[layer]
        values = self._value(v)
        axes = None if q.rotation is None else self._axes.get(id(q.rotation[0]))
        queries = self._kernels.place_heads(q, k, values, pool, self._places, attention, axes)
        return self._kernels.attend(queries, pool, self._places, attention)

    def _turned(self, heads: HeadRows, head_dim: int) -> torch.Tensor:
        """Heads normed and turned by torch, in the order in which `place_heads` would."""
        rows: Any = heads.rows
        if heads.norm is not None:
            rows = super().rms_norm(rows, heads.norm, heads.eps)
        return rows if heads.rotation is None else super().rotate(rows, head_dim, heads.rotation)

    def _attend_latent(self, q: Any, k: Any, layer: int, attention: Attention) -> torch.Tensor:
        """By torch's library, segment by segment: our kernels have no keys that are values too."""
        self.has_waited = True
        places = self._places
        if self._plan is None:  # a graph is tried: it will not be one
            return torch.zeros((len(q), attention.width_out), dtype=self._dtype, device=self._device)
        if self._ahead:
            self._plan, self._ahead = self._plan.later(self._ahead), 0
        positions = places.positions.long()
        pages = places.tables.long()[places.owners.long(), positions // PAGE_TOKENS]
        at = pages * PAGE_TOKENS + positions % PAGE_TOKENS
        return self._attend_segments(q, k, None, layer, attention, at, places.tables.long())

    def experts(self, x: Any, block: ExpertBlock) -> torch.Tensor:
        rows = self._value(x)
        matrices = self._expert_matrices(block)
        if matrices is None:
            self.has_waited = True
            return super().experts(rows, block)
        parts = [self._sparse_rows(cut, block, *matrices) for cut in rows.split(MAX_ROWS)]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _expert_matrices(self, block: ExpertBlock) -> tuple[ExpertMatrices, ExpertMatrices] | None:
        """A block's matrices as our kernels take them; looked up once."""
        if self._use_library or not can_run(block):
            return None
        if id(block) not in self._gathered:
            gate_up = gather_matrices(block.gate_up, is_gated=True)
            down = gather_matrices(block.down, is_gated=False)
            self._gathered[id(block)] = None if gate_up is None or down is None else (gate_up, down)
        return self._gathered[id(block)]

    def _sparse_rows(
        self, x: torch.Tensor, block: ExpertBlock, gate_up: ExpertMatrices, down: ExpertMatrices
    ) -> torch.Tensor:
        groups = None
        if block.routing.groups > 1:
            chosen, weights = self._choose_experts(x, block)
        else:
            chosen, weights, groups = self._sparse.choose(self.finish(self.linear(x, block.router)), block)
        groups = groups or self._sparse.group(chosen, gate_up.count)
        each = chosen.shape[1]
        if block.routing.weighs_input:
            x = (x[:, None] * weights[..., None]).to(self._dtype).flatten(0, 1)
            weights, each = torch.ones_like(weights), 1
        y = self._sparse.multiply(x, gate_up, groups, per_row=each, gate=block.gate, dtype=self._dtype)
        joined = None
        if len(weights) == 1 and len(groups.tiles) == groups.pairs:
            joined = (
                weights.contiguous(),
                torch.empty((1, down.first.width_out), dtype=self._dtype, device=self._device),
            )
        y = self._sparse.multiply(y, down, groups, per_row=1, gate=None, dtype=torch.float32, joined=joined)
        return self._sparse.join(y, weights, self._dtype) if joined is None else joined[1]

    def _upload(self, values: Any) -> torch.Tensor:
        return torch.from_numpy(values).to(self._device, non_blocking=True)

    def _apply(self, product: Product, dtype: torch.dtype) -> torch.Tensor:
        x, matrix = product.x, product.matrix
        if isinstance(matrix, AdaptedLinear):
            return self._apply_adapted(x, matrix, dtype)
        if isinstance(matrix, StackedLinear):
            return torch.cat([self._apply(Product(x, part), dtype) for part in matrix.parts], dim=-1)
        if isinstance(matrix, BlockLinear) and matrix.columns is not None and matrix.outliers is not None:
            blocks = replace(matrix, columns=None, outliers=None)
            outlying = Product(x.index_select(1, matrix.columns), DenseLinear(matrix.outliers, None))
            return self._apply(Product(x, blocks), dtype) + self._apply(outlying, dtype)
        if self._use_library or not self._kernels.can_multiply(matrix):
            return self._by_library(x, matrix, dtype)
        return self._kernels.linear(x, matrix, dtype=dtype)

    def _apply_adapted(self, x: torch.Tensor, matrix: AdaptedLinear, dtype: torch.dtype) -> torch.Tensor:
        if self._adapters is None:
            return self._apply(Product(x, matrix.base), dtype)
        base = self._apply(Product(x, matrix.base), dtype)
        inner = self._apply(Product(x, DenseLinear(matrix.down, None)), torch.float32)
        inner = matrix.own_ranks(inner, self._adapters).to(x.dtype)
        added = self._apply(Product(inner, DenseLinear(matrix.up, None)), torch.float32)
        return (base.float() + added).to(dtype)

    def _by_library(self, x: torch.Tensor, matrix: DeviceLinear, dtype: torch.dtype) -> torch.Tensor:
        if isinstance(matrix, BlockLinear) and x.dtype != torch.float32:
            weight = self._kernels.widen(matrix, x.dtype)
            return functional.linear(x, weight, matrix.bias).to(dtype)
        return matrix.apply(x).to(dtype)

    def _value(self, x: Any) -> torch.Tensor:
        if isinstance(x, Product):
            return self._apply(x, self._dtype)
        if isinstance(x, HeadRows):  # the rotated part of a latent head, which turns from end to end
            return self._turned(x, 0 if x.rotation is None else 2 * x.rotation[0].shape[1])
        if isinstance(x, Sum):
            if x.total is None:
                x.total = x.x + x.y
            return x.total
        tensor: torch.Tensor = x
        return tensor
