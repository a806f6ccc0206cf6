"""Every primitive in plain torch, computed at once: the path of CPUs, Apple GPUs, and CUDA without Triton.

Activations are in the executor's number format; norms, attention scores and routing are computed in float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from shardcompute.backends.executor import PatchRows
from shardcompute.backends.host.low_rank import LowRank
from shardcompute.backends.matrix import Float32, Matrix
from shardcompute.backends.ops import (
    Activation,
    Attention,
    Axes,
    ExpertBlock,
    Gate,
    PatchAttention,
    RankGroup,
    RotationTables,
)
from shardcompute.backends.torch.attention import attend_one
from shardcompute.backends.torch.kv import PagedKv
from shardcompute.backends.torch.plan import StepPlan
from shardcompute.backends.torch.routing import choose_experts
from shardcompute.backends.torch.weights import (
    AdaptedLinear,
    DeviceLinear,
    load_adapted,
    load_dense,
    load_linear,
    to_tensor,
)
from shardcompute.core.batch import PAGE_TOKENS, row_adapters

GPT_OSS_ALPHA = QUICK_GELU_ALPHA = 1.702
Rotation = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, slots=True)
class PartialTable:
    """Rows of an embedding table from id `first` on; other ids are rows of zeros."""

    rows: torch.Tensor
    first: int

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        own = (self.first <= ids) & (ids < self.first + len(self.rows))
        found = functional.embedding(torch.where(own, ids - self.first, 0), self.rows)
        return torch.where(own[:, None], found, 0)


class TorchOps:
    """`begin` says which batch the next calls are about."""

    def __init__(
        self, kv: PagedKv | None, context_length: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        """Without `kv`, `attend` has to be another's (see `finetune.training_ops`)."""
        self._kv = kv
        self._context_length = context_length
        self._device = device
        self._dtype = dtype
        self._plan: StepPlan | None = None
        self._axes: dict[int, torch.Tensor] = {}
        """By rotation, of those that turn rows of pictures by several axes."""
        self._turns: torch.Tensor | None = None
        self._ends: torch.Tensor | None = None
        self._adapters: torch.Tensor | None = None
        self.has_adapters = False
        """Whether there are maps that rows may have more of."""
        self._patches: PatchRows | None = None

    def begin(self, plan: StepPlan) -> None:
        self._plan = plan
        self._positions = torch.from_numpy(plan.positions).to(self._device, torch.int64)
        self._logit_rows = torch.from_numpy(plan.logit_rows).to(self._device, torch.int64)
        tables = torch.from_numpy(plan.tables).to(self._device, torch.int64)
        owners = torch.from_numpy(plan.owners).to(self._device, torch.int64)
        pages = tables[owners, self._positions // PAGE_TOKENS]
        self._places = pages * PAGE_TOKENS + self._positions % PAGE_TOKENS
        self._tables = tables
        self._turns, self._ends = (
            None if each is None else torch.from_numpy(each).to(self._device, torch.int64)
            for each in (plan.turns, plan.ends)
        )
        self._adapters = self._adapters_of(plan)

    def _adapters_of(self, plan: StepPlan) -> torch.Tensor | None:
        """The numbers of the rows' adapters, None where none was chosen."""
        if not plan.has_adapters:
            return None
        return torch.tensor(row_adapters(plan.segments), device=self._device)

    def advance(self) -> None:
        """The rows of the next calls are as many as those of the last ones, of the same sessions, one position on."""
        assert self._plan is not None
        self.begin(self._plan.later(1))

    def accept(self, inputs: torch.Tensor) -> torch.Tensor:
        """Token ids, or hidden rows from another slice, in the form that is computed with."""
        return inputs if not inputs.is_floating_point() else inputs.to(self._dtype)

    def computed(self, x: Any) -> torch.Tensor:
        """A result that may be a promise, as a tensor."""
        return self._value(x)

    def finish(self, x: Any) -> torch.Tensor:
        """A computed result in float32."""
        return self._value(x).float()

    # Loading

    def matrix(
        self, parts: Sequence[Matrix], bias: Float32 | None, low_rank: LowRank | None = None
    ) -> DeviceLinear:
        linear = load_linear(parts, bias, device=self._device, dtype=self._dtype)
        if low_rank is None:
            return linear
        self.has_adapters = True
        return load_adapted(linear, low_rank, device=self._device, dtype=self._dtype)

    def vector(self, values: Float32) -> torch.Tensor:
        return to_tensor(values, self._device, torch.float32)

    def table(self, matrix: Matrix, first: int | None = None) -> torch.Tensor | PartialTable:
        rows = load_dense(matrix, self._device, self._dtype)
        return rows if first is None else PartialTable(rows, first)

    def rotation(self, tables: RotationTables, axes: Axes = ()) -> Rotation:
        cosines, sines = tables(self._context_length)
        rotation = to_tensor(cosines, self._device), to_tensor(sines, self._device)
        if axes:
            self._axes[id(rotation[0])] = torch.tensor(list(axes), device=self._device)
        return rotation

    # Computing

    def embed(self, table: torch.Tensor | PartialTable, ids: torch.Tensor) -> torch.Tensor:
        return table.embed(ids) if isinstance(table, PartialTable) else functional.embedding(ids, table)

    def linear(self, x: Any, matrix: DeviceLinear) -> Any:
        if isinstance(matrix, AdaptedLinear) and self._adapters is not None:
            return matrix.apply_adapted(self._value(x), self._adapters)
        return matrix.apply(self._value(x))

    def rms_norm(self, x: Any, weight: torch.Tensor, eps: float) -> Any:
        grouped = self._value(x).float().unflatten(-1, (-1, len(weight)))
        mean = grouped.square().mean(dim=-1, keepdim=True)
        return (grouped * torch.rsqrt(mean + eps) * weight).flatten(-2).to(self._dtype)

    def layer_norm(self, x: Any, weight: torch.Tensor, bias: torch.Tensor | None, eps: float) -> Any:
        rows = self._value(x).float()
        return functional.layer_norm(rows, weight.shape, weight, bias, eps).to(self._dtype)

    def split(self, x: Any, sizes: Sequence[int]) -> Sequence[torch.Tensor]:
        parts: Sequence[torch.Tensor] = torch.split(self._value(x), list(sizes), dim=-1)
        return parts

    def add(self, x: Any, y: Any) -> Any:
        return self._value(x) + self._value(y)

    def scale(self, x: Any, factor: float) -> torch.Tensor:
        return self._value(x) * factor

    def softcap(self, x: Any, cap: float) -> torch.Tensor:
        return torch.tanh(self.finish(x) / cap) * cap

    def gated(self, gate_up: Any, gate: Gate) -> Any:
        left, up = self._value(gate_up).chunk(2, dim=-1)
        if gate.limit is not None:
            left = left.clamp(max=gate.limit)
            up = up.clamp(-gate.limit, gate.limit)
            return left * torch.sigmoid(GPT_OSS_ALPHA * left) * (up + 1)
        return self.activate(left, gate.activation) * up

    def activate(self, x: Any, activation: Activation) -> torch.Tensor:
        rows = self._value(x)
        if activation == "silu":
            return functional.silu(rows)
        if activation == "gelu_quick":
            return rows * torch.sigmoid(QUICK_GELU_ALPHA * rows)
        if activation == "relu2":
            return functional.relu(rows).square()
        return functional.gelu(rows, approximate="tanh" if activation == "gelu_tanh" else "none")

    def weigh(self, x: Any, score: Any) -> Any:
        return (self._value(x) * torch.sigmoid(self.finish(score))).to(self._dtype)

    def rotate(self, x: Any, head_dim: int, rotation: Rotation) -> Any:
        cosines, sines = (table[:, None, :] for table in self._row_turns(rotation))
        half = cosines.shape[-1]
        heads = self._value(x).float().unflatten(-1, (-1, head_dim))
        left, right, rest = heads[..., :half], heads[..., half : 2 * half], heads[..., 2 * half :]
        turned = [left * cosines - right * sines, right * cosines + left * sines, rest]
        return torch.cat(turned, dim=-1).flatten(-2).to(self._dtype)

    def _row_turns(self, rotation: Rotation) -> Rotation:
        """Cosines and sines of the step's rows."""
        if self._turns is None:
            return rotation[0][self._positions], rotation[1][self._positions]
        axes = self._axes.get(id(rotation[0]))
        if axes is None:
            return rotation[0][self._turns[0]], rotation[1][self._turns[0]]
        places, pairs = self._turns[axes].T, torch.arange(len(axes), device=self._device)
        return rotation[0][places, pairs], rotation[1][places, pairs]

    # Patches of a picture

    def begin_patches(self, patches: PatchRows) -> None:
        self._patches = patches
        self._turns, self._adapters = None, None
        self._positions = torch.arange(len(patches.numbers), device=self._device)

    def upload(self, values: Float32) -> torch.Tensor:
        return to_tensor(values, self._device, self._dtype)

    def download(self, x: Any) -> Float32:
        rows: Float32 = self.finish(x).cpu().numpy()
        return rows

    def turning(self) -> Rotation:
        assert self._patches is not None
        assert self._patches.turning is not None
        cosines, sines = self._patches.turning
        return to_tensor(cosines, self._device), to_tensor(sines, self._device)

    def attend_patches(self, q: Any, k: Any, v: Any, attention: PatchAttention) -> torch.Tensor:
        assert self._patches is not None
        # With an axis for batches, without which torch takes kernels that keep all scores.
        parts = [
            self._value(each).unflatten(-1, (attention.heads, -1)).transpose(0, 1)[None] for each in (q, k, v)
        ]
        blocks = self._patches.windows if attention.is_windowed else [(0, parts[0].shape[2])]
        out = [
            functional.scaled_dot_product_attention(*(part[:, :, start:stop] for part in parts))
            for start, stop in blocks
        ]
        return torch.cat(out, dim=2)[0].transpose(0, 1).flatten(1)

    def merge_rows(self, x: Any, count: int) -> torch.Tensor:
        rows = self._value(x)
        return rows.reshape(len(rows) // count, -1)

    def mean_rows(self, x: Any, count: int) -> torch.Tensor:
        rows = self._value(x)
        return rows.float().unflatten(0, (-1, count)).mean(dim=1).to(self._dtype)

    def head_maps(self, weights: Float32) -> torch.Tensor:
        return to_tensor(weights, self._device, self._dtype)

    def per_head(self, x: Any, maps: torch.Tensor) -> torch.Tensor:
        heads = self._value(x).unflatten(-1, (len(maps), -1)).transpose(0, 1)
        return torch.bmm(heads, maps.transpose(1, 2)).transpose(0, 1).flatten(1)

    def join_heads(self, parts: Sequence[Any], heads: int) -> torch.Tensor:
        split = [self._value(part).unflatten(-1, (heads, -1)) for part in parts]
        return torch.cat(split, dim=-1).flatten(-2)

    def attend(self, q: Any, k: Any, v: Any, layer: int, attention: Attention) -> torch.Tensor:
        return self._attend_segments(q, k, v, layer, attention, self._places, self._tables)

    def _attend_segments(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor | None,
        layer: int,
        attention: Attention,
        places: torch.Tensor,
        tables: torch.Tensor,
    ) -> torch.Tensor:
        assert self._plan is not None
        assert self._kv is not None
        shape = (-1, (attention.kv_heads, attention.head_dim))
        values = None if v is None else v.unflatten(*shape)
        self._kv.write(layer, places, k.unflatten(*shape), values)
        rows, out = 0, []
        for index, segment in enumerate(self._plan.segments):
            pages = tables[index, : -(-segment.stop // PAGE_TOKENS)]
            keys, values = self._kv.read(layer, pages, segment.stop)
            part = q[rows : rows + segment.count].contiguous()
            ends = None if self._ends is None else self._ends[rows : rows + segment.count]
            out.append(attend_one(part, keys, values, segment, attention, ends))
            rows += segment.count
        return out[0] if len(out) == 1 else torch.cat(out)

    def experts(self, x: Any, block: ExpertBlock) -> torch.Tensor:
        rows_in = self._value(x)
        chosen, weights = self._choose_experts(rows_in, block)
        out = torch.zeros_like(rows_in, dtype=torch.float32)
        first, stop = block.owned or (0, len(block.gate_up))
        for expert in torch.unique(chosen).tolist():
            if not first <= expert < stop:
                continue
            rows, ranks = torch.nonzero(chosen == expert, as_tuple=True)
            weight = weights[rows, ranks][:, None]
            inputs = rows_in[rows]
            if block.routing.weighs_input:
                inputs = (inputs * weight).to(self._dtype)
            y = self.gated(self.linear(inputs, block.gate_up[expert - first]), block.gate)
            y = self.finish(self.linear(y, block.down[expert - first]))
            out[rows] += y if block.routing.weighs_input else y * weight
        if block.group is not None:
            return self.all_reduce(out, block.group)
        return out.to(self._dtype)

    def logit_rows(self, x: Any) -> torch.Tensor:
        return self._value(x).index_select(0, self._logit_rows)

    def all_reduce(self, x: Any, group: RankGroup) -> torch.Tensor:
        return self._received(group.all_reduce(self._sent(x)))

    def all_gather(self, x: Any, group: RankGroup, widths: Sequence[int]) -> torch.Tensor:
        return self._received(group.gather_columns(self._sent(x), widths))

    def _sent(self, x: Any) -> Float32:
        """A value for other ranks, on the host and in float32: sums are rounded once."""
        values: Float32 = self.finish(x).contiguous().cpu().numpy()
        return values

    def _received(self, values: Float32) -> torch.Tensor:
        return torch.from_numpy(values).to(self._device, self._dtype)

    def _value(self, x: Any) -> torch.Tensor:
        tensor: torch.Tensor = x
        return tensor

    def _choose_experts(self, x: torch.Tensor, block: ExpertBlock) -> tuple[torch.Tensor, torch.Tensor]:
        """Expert numbers and weights `[rows, per_token]`, best first; ties go to the lower number."""
        return choose_experts(self.finish(self.linear(x, block.router)), block)
