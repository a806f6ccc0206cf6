"""The primitives for CUDA devices, with our own kernels where torch's launch too often or read too slowly.

The decoder calls one primitive after the other; some results here are only promises (`Product`, `Sum`,
`HeadRows`), so that the next primitive can take over the work in one kernel: a product with its gate, a residual
sum with the norm behind it, norm and rotation of heads with the write to the KV pages. Sums are rounded before
they are normed, so a model cut between two layers computes the same bits as a whole one.

Up to `MAX_ROWS` rows, matrices are read by our kernels, which give each row the same result in any batch; above,
by torch's library. Nothing here but `experts` waits for the device, so all else can be captured in a graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from shardcompute.backends.ops import Attention, ExpertBlock, Gate
from shardcompute.backends.torch.kernels.launch import BLOCK_ROWS, HeadRows, Kernels, Places
from shardcompute.backends.torch.kernels.tiling import MAX_ROWS
from shardcompute.backends.torch.kv import PagedKv
from shardcompute.backends.torch.ops import Rotation, TorchOps
from shardcompute.backends.torch.plan import StepPlan
from shardcompute.backends.torch.weights import BlockLinear, DeviceLinear, StackedLinear

SHORT_SEGMENT = 16


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
        self._use_library = use_library or dtype == torch.float32
        self._places: Any = None
        self.has_waited = False
        """Whether a primitive needed the host's answer: what ran cannot be captured."""

    def begin(self, plan: StepPlan) -> None:
        short, blocks = _cut_blocks(plan)
        self.place(
            Places(
                positions=self._upload(plan.positions),
                owners=self._upload(plan.owners),
                tables=self._upload(plan.tables),
                logit_rows=self._upload(plan.logit_rows),
                short=None if not blocks else self._upload(np.asarray(short, dtype=np.int32)),
                blocks=None if not blocks else self._upload(np.asarray(blocks, dtype=np.int32)),
            )
        )

    def place(self, places: Places) -> None:
        self._places = places
        self._logit_rows = places.logit_rows

    def finish(self, x: Any) -> torch.Tensor:
        # Logits come straight from the float32 sums: rounding them first would make ties.
        if isinstance(x, Product):
            return self._apply(x, torch.float32)
        return self._value(x).float()

    def linear(self, x: Any, matrix: DeviceLinear) -> Any:
        return Product(self._value(x), matrix)

    def rms_norm(self, x: Any, weight: torch.Tensor, eps: float) -> Any:
        if isinstance(x, Sum) and x.total is None:
            x.total, normed = self._kernels.add_norm(x.x, x.y, weight, eps)
            return normed
        rows = self._value(x)
        if len(weight) != rows.shape[-1]:
            return HeadRows(rows, norm=weight, eps=eps)
        return self._kernels.add_norm(rows, None, weight, eps)[1]

    def add(self, x: Any, y: Any) -> Any:
        return Sum(self._value(x), self._value(y))

    def gated(self, gate_up: Any, gate: Gate) -> Any:
        if isinstance(gate_up, Product):
            matrix = gate_up.matrix
            if self._is_skinny(gate_up.x) and self._kernels.can_multiply(matrix):
                return self._kernels.linear(gate_up.x, matrix, gate)
        return self._kernels.gate(self._value(gate_up), gate)

    def rotate(self, x: Any, head_dim: int, rotation: Rotation) -> Any:
        heads = x if isinstance(x, HeadRows) else HeadRows(self._value(x))
        return replace(heads, rotation=rotation)

    def attend(self, q: Any, k: Any, v: Any, layer: int, attention: Attention) -> torch.Tensor:
        q, k = (x if isinstance(x, HeadRows) else HeadRows(self._value(x)) for x in (q, k))
        pool = self._kv.pool[layer]
        queries = self._kernels.place_heads(q, k, self._value(v), pool, self._places, attention)
        return self._kernels.attend(queries, pool, self._places, attention)

    def experts(self, x: Any, block: ExpertBlock) -> torch.Tensor:
        self.has_waited = True
        return super().experts(x, block)

    def _upload(self, values: Any) -> torch.Tensor:
        return torch.from_numpy(values).to(self._device, non_blocking=True)

    def _is_skinny(self, x: torch.Tensor) -> bool:
        return not self._use_library and 0 < len(x) <= MAX_ROWS

    def _apply(self, product: Product, dtype: torch.dtype) -> torch.Tensor:
        x, matrix = product.x, product.matrix
        if self._is_skinny(x) and self._kernels.can_multiply(matrix):
            return self._kernels.linear(x, matrix, dtype=dtype)
        if isinstance(matrix, StackedLinear):
            return torch.cat([self._apply(Product(x, part), dtype) for part in matrix.parts], dim=-1)
        if isinstance(matrix, BlockLinear) and matrix.columns is not None and matrix.outliers is not None:
            blocks = replace(matrix, columns=None, outliers=None)
            outlying = functional.linear(x.index_select(1, matrix.columns), matrix.outliers)
            return self._apply(Product(x, blocks), dtype) + outlying
        return matrix.apply(x).to(dtype)

    def _value(self, x: Any) -> torch.Tensor:
        if isinstance(x, Product):
            return self._apply(x, self._dtype)
        if isinstance(x, Sum):
            if x.total is None:
                x.total = x.x + x.y
            return x.total
        tensor: torch.Tensor = x
        return tensor


def _cut_blocks(plan: StepPlan) -> tuple[Sequence[int], Sequence[tuple[int, int]]]:
    """Rows of short segments, and long segments in blocks of (first row, rows).

    Few rows are all short, as they are in a graph, so that a step is computed the same way with and without one.
    """
    if plan.rows <= MAX_ROWS:
        return (), ()
    short: list[int] = []
    blocks: list[tuple[int, int]] = []
    row = 0
    for segment in plan.segments:
        end = row + segment.count
        if segment.count <= SHORT_SEGMENT:
            short.extend(range(row, end))
        else:
            blocks.extend((at, min(BLOCK_ROWS, end - at)) for at in range(row, end, BLOCK_ROWS))
        row = end
    return short, blocks
