"""Every primitive in MLX, recorded as MLX records and computed when a step is waited for.

Activations are in the executor's number format; norms, rotations, activations, scores and routing are computed in
float32. Which rows a call is about is told by `begin`, with arrays: so a call can be traced once and compiled.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from shardcompute.backends.host.low_rank import LowRank
from shardcompute.backends.matrix import Float32, Matrix
from shardcompute.backends.mlx.attention import attend_group
from shardcompute.backends.mlx.padded_step import PaddedStep
from shardcompute.backends.mlx.routing import choose_experts
from shardcompute.backends.mlx.weights import (
    ExpertMap,
    LinearMap,
    Part,
    load_map,
    load_table,
    stack_experts,
)
from shardcompute.backends.ops import (
    Activation,
    Attention,
    Axes,
    ExpertBlock,
    Gate,
    RankGroup,
    RotationTables,
)

GPT_OSS_ALPHA = QUICK_GELU_ALPHA = 1.702
StepArrays = tuple[Any, ...]
Rotation = tuple[Any, Any, Any | None]
"""Cosines and sines by position, and the axis of a picture that each pair of entries turns by, or None."""


def step_arrays(step: PaddedStep) -> StepArrays:
    """A padded step as a tree of device arrays, which compiled functions take."""
    groups = tuple((mx.array(group.rows), mx.array(group.tables)) for group in step.groups)
    rows = (step.positions, step.places, step.logit_rows, step.order)
    seen = tuple(mx.array(each) for each in (step.turns, step.ends) if each is not None)
    return tuple(mx.array(each) for each in rows), groups, seen


@dataclass(slots=True)
class LayerKv:
    """The pools of one layer, replaced when they are written."""

    keys: Any
    values: Any


@dataclass(frozen=True, slots=True)
class PartialRows:
    """Rows of an embedding table from id `first` on; other ids are rows of zeros."""

    part: Any
    first: int
    count: int

    def rows(self, ids: Any) -> Any:
        own = (ids >= self.first) & (ids < self.first + self.count)
        return mx.where(own[:, None], self.part.rows(mx.where(own, ids - self.first, 0)), 0)


class MlxOps:
    """`begin` says which step, and which layer's KV, the next calls are about."""

    def __init__(self, context_length: int, dtype: Any) -> None:
        self._context_length = context_length
        self._dtype = dtype
        self._experts: dict[int, tuple[ExpertMap, ExpertMap]] = {}
        self.row_count = 0
        """Rows of the step that are no padding: those that ranks exchange."""

    def begin(self, step: StepArrays, kv: LayerKv | None = None) -> None:
        (self._positions, self._places, self._logit_rows, self._order), self._groups, self._seen = step
        self._kv = kv

    def accept(self, inputs: Any) -> Any:
        """Hidden rows from another slice, in the form that is computed with."""
        return inputs.astype(self._dtype)

    # Loading

    def matrix(
        self, parts: Sequence[Matrix], bias: Float32 | None, low_rank: LowRank | None = None
    ) -> LinearMap:
        if low_rank is not None:
            raise ValueError("MLX adds nothing of adapters: whoever has some asks another backend")
        return load_map(parts, bias, self._dtype)

    def vector(self, values: Float32) -> Any:
        return mx.array(values)

    def table(self, matrix: Matrix, first: int | None = None) -> Part | PartialRows:
        rows = load_table(matrix, self._dtype)
        return rows if first is None else PartialRows(rows, first, matrix.shape[0])

    def rotation(self, tables: RotationTables, axes: Axes = ()) -> Rotation:
        cosines, sines = tables(self._context_length)
        return mx.array(cosines), mx.array(sines), mx.array(list(axes)) if axes else None

    def stack(self, block: ExpertBlock) -> None:
        """Lay a block's experts one behind the other, which is how they are computed; single ones are let go."""
        pair = stack_experts(block.gate_up, self._dtype), stack_experts(block.down, self._dtype)
        self._experts[id(block)] = pair
        for maps in (block.gate_up, block.down):
            if isinstance(maps, list):
                maps.clear()

    # Computing

    def embed(self, table: Any, ids: Any) -> Any:
        return table.rows(ids).astype(self._dtype)

    def linear(self, x: Any, matrix: LinearMap) -> Any:
        return matrix.apply(x)

    def rms_norm(self, x: Any, weight: Any, eps: float) -> Any:
        grouped = x.astype(mx.float32).reshape(len(x), -1, len(weight))
        return mx.fast.rms_norm(grouped, weight, eps).reshape(x.shape).astype(self._dtype)

    def layer_norm(self, x: Any, weight: Any, bias: Any | None, eps: float) -> Any:
        return mx.fast.layer_norm(x.astype(mx.float32), weight, bias, eps).astype(self._dtype)

    def split(self, x: Any, sizes: Sequence[int]) -> Sequence[Any]:
        ends = [sum(sizes[: i + 1]) for i in range(len(sizes) - 1)]
        split: Any = mx.split(x, ends, axis=-1)
        parts: Sequence[Any] = split
        return parts

    def add(self, x: Any, y: Any) -> Any:
        return x + y

    def scale(self, x: Any, factor: float) -> Any:
        return x * factor

    def softcap(self, x: Any, cap: float) -> Any:
        return mx.tanh(x.astype(mx.float32) / cap) * cap

    def gated(self, gate_up: Any, gate: Gate) -> Any:
        left, up = mx.split(gate_up.astype(mx.float32), 2, axis=-1)
        if gate.limit is not None:
            left = mx.minimum(left, gate.limit)
            up = mx.clip(up, -gate.limit, gate.limit)
            return (left * mx.sigmoid(GPT_OSS_ALPHA * left) * (up + 1)).astype(self._dtype)
        return (_activate(left, gate.activation) * up).astype(self._dtype)

    def activate(self, x: Any, activation: Activation) -> Any:
        return _activate(x.astype(mx.float32), activation).astype(self._dtype)

    def weigh(self, x: Any, score: Any) -> Any:
        return (x * mx.sigmoid(score.astype(mx.float32))).astype(self._dtype)

    def rotate(self, x: Any, head_dim: int, rotation: Rotation) -> Any:
        cosines, sines = (table[:, None, :] for table in self._row_turns(rotation))
        half = cosines.shape[-1]
        heads = x.astype(mx.float32).reshape(len(x), -1, head_dim)
        left, right, rest = heads[..., :half], heads[..., half : 2 * half], heads[..., 2 * half :]
        turned = [left * cosines - right * sines, right * cosines + left * sines, rest]
        return mx.concatenate(turned, axis=-1).reshape(x.shape).astype(self._dtype)

    def _row_turns(self, rotation: Rotation) -> tuple[Any, Any]:
        cosines, sines, axes = rotation
        if not self._seen or axes is None:
            return cosines[self._positions], sines[self._positions]
        places, pairs = self._seen[0][axes].T, mx.arange(len(axes))
        return cosines[places, pairs], sines[places, pairs]

    def head_maps(self, weights: Float32) -> Any:
        return mx.array(weights).astype(self._dtype)

    def per_head(self, x: Any, maps: Any) -> Any:
        heads = x.reshape(len(x), len(maps), 1, -1)
        return (heads @ maps.swapaxes(1, 2)[None]).reshape(len(x), -1)

    def join_heads(self, parts: Sequence[Any], heads: int) -> Any:
        split = [part.reshape(len(part), heads, -1) for part in parts]
        return mx.concatenate(split, axis=-1).reshape(len(parts[0]), -1)

    def attend(self, q: Any, k: Any, v: Any, layer: int, attention: Attention) -> Any:
        kv = self._kv
        assert kv is not None
        shape = (-1, attention.kv_heads, attention.head_dim)
        kv.keys[self._places] = k.reshape(shape)
        if v is not None:
            kv.values[self._places] = v.reshape(shape)
        values = None if v is None else kv.values
        mixed = []
        for rows, tables in self._groups:
            ends = self._seen[1][rows] if self._seen else None
            part = attend_group(q[rows], self._positions[rows], kv.keys, values, tables, attention, ends)
            mixed.append(part.reshape(-1, part.shape[-1]))
        return (mixed[0] if len(mixed) == 1 else mx.concatenate(mixed))[self._order]

    def experts(self, x: Any, block: ExpertBlock) -> Any:
        gate_up, down = self._experts[id(block)]
        chosen, weights = self._choose_experts(x, block)
        inputs = x[:, None, None, :]
        if block.routing.weighs_input:
            inputs = (inputs * weights[:, :, None, None]).astype(self._dtype)
            weights = mx.ones_like(weights)
        if block.owned is not None:
            # Where an expert is another rank's, one of ours is asked for nothing: what it says is not counted.
            first, stop = block.owned
            weights = mx.where((chosen >= first) & (chosen < stop), weights, 0)
            chosen = mx.clip(chosen, first, stop - 1) - first
        y = self.gated(gate_up.apply(inputs, chosen), block.gate)
        y = down.apply(y, chosen).squeeze(2).astype(mx.float32)
        answer = (y * weights[:, :, None]).sum(axis=1).astype(self._dtype)
        return answer if block.group is None else self.all_reduce(answer, block.group)

    def all_reduce(self, x: Any, group: RankGroup) -> Any:
        return self._received(x, group.all_reduce(self._sent(x)))

    def all_gather(self, x: Any, group: RankGroup, widths: Sequence[int]) -> Any:
        return self._received(x, group.gather_columns(self._sent(x), widths))

    def _sent(self, x: Any) -> Float32:
        """Computed now, so that this cannot be part of a compiled function."""
        return np.array(x.astype(mx.float32))[: self.row_count]

    def _received(self, x: Any, values: Float32) -> Any:
        padded = np.zeros((len(x), values.shape[1]), dtype=np.float32)
        padded[: len(values)] = values
        return mx.array(padded).astype(self._dtype)

    def logit_rows(self, x: Any) -> Any:
        return x[self._logit_rows]

    def _choose_experts(self, x: Any, block: ExpertBlock) -> tuple[Any, Any]:
        """Expert numbers and weights `[rows, per_token]`, best first."""
        return choose_experts(self.linear(x, block.router).astype(mx.float32), block)


def _activate(x: Any, activation: Activation) -> Any:
    if activation == "silu":
        return x * mx.sigmoid(x)
    if activation == "gelu_quick":
        return x * mx.sigmoid(QUICK_GELU_ALPHA * x)
    if activation == "relu2":
        return mx.square(mx.maximum(x, 0))
    if activation == "gelu":
        return x * (1 + mx.erf(x / math.sqrt(2))) / 2
    return 0.5 * x * (1 + mx.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)))
