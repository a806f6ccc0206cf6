"""Numpy backend, the oracle: every primitive in plain numpy, for tests and for reading. Slow, and obviously right."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from shardcompute.backends.executor import ExecutorOptions, Network, PatchRows, SynchronousSteps
from shardcompute.backends.host.eager_tower import EagerTower
from shardcompute.backends.host.low_rank import LowRank
from shardcompute.backends.host.pictures import SessionPictures
from shardcompute.backends.host.routing import choose_experts, sigmoid, softmax
from shardcompute.backends.kv import HostKv, MovableSessions
from shardcompute.backends.matrix import Array, Float32, Matrix
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
from shardcompute.core.batch import Segment, logit_row_indices, row_adapters

GPT_OSS_ALPHA = QUICK_GELU_ALPHA = 1.702


@dataclass(frozen=True, slots=True)
class Rotation:
    """Cosines and sines by position, and the axis that each pair of entries takes its position from."""

    cosines: Float32
    sines: Float32
    axes: Axes = ()

    def at(self, positions: Array) -> tuple[Float32, Float32]:
        """For rows at positions `[3, rows]`."""
        if not self.axes:
            return self.cosines[positions[0]], self.sines[positions[0]]
        places, pairs = positions[list(self.axes)].T, np.arange(len(self.axes))
        return self.cosines[places, pairs], self.sines[places, pairs]


@dataclass(frozen=True, slots=True)
class _Linear:
    weight: Float32
    bias: Float32 | None
    low_rank: LowRank | None = None


@dataclass(frozen=True, slots=True)
class _Table:
    rows: Float32
    first: int | None


class NumpyOps:
    """Computes at once. `begin` says which batch the next calls are about."""

    def __init__(self, kv: HostKv, context_length: int) -> None:
        self._kv = kv
        self._context_length = context_length
        self._segments: Sequence[Segment] = ()
        self._positions: Array = np.empty((3, 0), dtype=np.int64)
        self._ends: Sequence[Array | None] = ()
        self._patches: PatchRows | None = None

    def begin(self, segments: Sequence[Segment], pictures: SessionPictures) -> None:
        self._segments = segments
        self._positions = pictures.positions(segments)
        self._ends = [pictures.ends(segment) for segment in segments]

    def begin_patches(self, patches: PatchRows) -> None:
        """The next calls are about a picture."""
        self._patches = patches
        self._segments = (Segment(0, 0, len(patches.numbers)),)
        self._positions = np.broadcast_to(np.arange(len(patches.numbers)), (3, len(patches.numbers)))

    def matrix(
        self, parts: Sequence[Matrix], bias: Float32 | None, low_rank: LowRank | None = None
    ) -> _Linear:
        return _Linear(np.concatenate([part.to_dense() for part in parts]), bias, low_rank)

    def vector(self, values: Float32) -> Float32:
        return values

    def table(self, matrix: Matrix, first: int | None = None) -> _Table:
        return _Table(matrix.to_dense(), first)

    def rotation(self, tables: RotationTables, axes: Axes = ()) -> Rotation:
        return Rotation(*tables(self._context_length), axes)

    def turning(self) -> Rotation:
        assert self._patches is not None
        assert self._patches.turning is not None
        return Rotation(*self._patches.turning)

    def embed(self, table: _Table, ids: Array) -> Float32:
        if table.first is None:
            return table.rows[ids]
        own = (table.first <= ids) & (ids < table.first + len(table.rows))
        rows: Float32 = np.where(own[:, None], table.rows[np.where(own, ids - table.first, 0)], np.float32(0))
        return rows

    def linear(self, x: Float32, matrix: _Linear) -> Float32:
        y: Float32 = x @ matrix.weight.T
        y = y if matrix.bias is None else y + matrix.bias
        part, adapters = matrix.low_rank, np.asarray(row_adapters(self._segments))
        if part is None or not adapters.any():
            return y
        inner: Float32 = np.where(adapters[:, None] == part.owners, x @ part.down.T, 0).astype(np.float32)
        added: Float32 = y + inner @ part.up.T
        return added

    def rms_norm(self, x: Float32, weight: Float32, eps: float) -> Float32:
        grouped = x.reshape(len(x), x.shape[1] // len(weight), len(weight))
        mean = np.mean(np.square(grouped), axis=-1, keepdims=True)
        normed: Float32 = grouped / np.sqrt(mean + np.float32(eps)) * weight
        return normed.reshape(x.shape)

    def layer_norm(self, x: Float32, weight: Float32, bias: Float32 | None, eps: float) -> Float32:
        normed = self.rms_norm(x - x.mean(axis=-1, keepdims=True), weight, eps)
        return normed if bias is None else normed + bias

    def split(self, x: Float32, sizes: Sequence[int]) -> Sequence[Float32]:
        return np.split(x, np.cumsum(sizes)[:-1], axis=-1)

    def add(self, x: Float32, y: Float32) -> Float32:
        return x + y

    def scale(self, x: Float32, factor: float) -> Float32:
        return x * np.float32(factor)

    def softcap(self, x: Float32, cap: float) -> Float32:
        capped: Float32 = np.tanh(x / np.float32(cap)) * np.float32(cap)
        return capped

    def gated(self, gate_up: Float32, gate: Gate) -> Float32:
        halves = np.split(gate_up, 2, axis=-1)
        left, up = halves[0], halves[1]
        if gate.limit is not None:
            left = np.minimum(left, gate.limit)
            up = np.clip(up, -gate.limit, gate.limit)
            return left * sigmoid(GPT_OSS_ALPHA * left) * (up + 1)
        return self.activate(left, gate.activation) * up

    def activate(self, x: Float32, activation: Activation) -> Float32:
        return _ACTIVATIONS[activation](x)

    def weigh(self, x: Float32, score: Float32) -> Float32:
        return x * sigmoid(score)

    def rotate(self, x: Float32, head_dim: int, rotation: Rotation) -> Float32:
        cosines, sines = (table[:, None, :] for table in rotation.at(self._positions))
        half = cosines.shape[-1]
        heads = x.reshape(len(x), -1, head_dim)
        left, right, rest = heads[..., :half], heads[..., half : 2 * half], heads[..., 2 * half :]
        turned = [left * cosines - right * sines, right * cosines + left * sines, rest]
        return np.concatenate(turned, axis=-1).reshape(x.shape)

    def head_maps(self, weights: Float32) -> Float32:
        return weights

    def per_head(self, x: Float32, maps: Float32) -> Float32:
        heads = x.reshape(len(x), len(maps), -1).transpose(1, 0, 2)
        mapped: Float32 = heads @ maps.transpose(0, 2, 1)
        return mapped.transpose(1, 0, 2).reshape(len(x), -1)

    def join_heads(self, parts: Sequence[Float32], heads: int) -> Float32:
        split = [part.reshape(len(part), heads, -1) for part in parts]
        return np.concatenate(split, axis=-1).reshape(len(parts[0]), -1)

    def attend(self, q: Float32, k: Float32, v: Float32 | None, layer: int, attention: Attention) -> Float32:
        out = np.empty((len(q), attention.width_out), dtype=np.float32)
        row = 0
        for index, segment in enumerate(self._segments):
            rows = slice(row, row + segment.count)
            shape = (segment.count, *attention.kept.grouped)
            keys = self._kv.round(k[rows].reshape(shape))
            values = None if v is None else self._kv.round(v[rows].reshape(shape))
            self._kv.write(segment, layer, keys, values)
            past = self._kv.read(segment.session, layer, segment.stop)
            past = past.reshape(len(past), segment.stop, attention.kv_heads, attention.head_dim)
            seen = past[0][..., : attention.value_dim] if v is None else past[1]
            ends = self._ends[index]
            out[rows] = _attend_one(q[rows], past[0], seen, segment, attention, ends)
            row += segment.count
        return out

    def attend_patches(self, q: Float32, k: Float32, v: Float32, attention: PatchAttention) -> Float32:
        assert self._patches is not None
        out = np.empty_like(q)
        windows = self._patches.windows if attention.is_windowed else [(0, len(q))]
        for start, stop in windows:
            shape = (stop - start, attention.heads, attention.head_dim)
            queries, keys, values = (each[start:stop].reshape(shape).transpose(1, 0, 2) for each in (q, k, v))
            weights = softmax(queries @ keys.transpose(0, 2, 1) * np.float32(attention.scale))
            out[start:stop] = (weights @ values).transpose(1, 0, 2).reshape(stop - start, -1)
        return out

    def upload(self, values: Float32) -> Float32:
        return values

    def download(self, x: Float32) -> Float32:
        return x

    def merge_rows(self, x: Float32, count: int) -> Float32:
        return x.reshape(len(x) // count, -1)

    def mean_rows(self, x: Float32, count: int) -> Float32:
        mean: Float32 = x.reshape(len(x) // count, count, -1).mean(axis=1)
        return mean

    def experts(self, x: Float32, block: ExpertBlock) -> Float32:
        logits = self.linear(x, block.router)
        chosen, weights = choose_experts(logits, block.per_token, block.routing, block.choice_bias)
        out = np.zeros_like(x)
        first, stop = block.owned or (0, len(block.gate_up))
        for expert in np.unique(chosen[(first <= chosen) & (chosen < stop)]):
            rows, ranks = np.nonzero(chosen == expert)
            weight = weights[rows, ranks][:, None]
            inputs = x[rows] * weight if block.routing.weighs_input else x[rows]
            inner = self.gated(self.linear(inputs, block.gate_up[expert - first]), block.gate)
            y = self.linear(inner, block.down[expert - first])
            out[rows] += y if block.routing.weighs_input else y * weight
        return out if block.group is None else block.group.all_reduce(out)

    def logit_rows(self, x: Float32) -> Float32:
        return x[logit_row_indices(self._segments)]

    def all_reduce(self, x: Float32, group: RankGroup) -> Float32:
        return group.all_reduce(x)

    def all_gather(self, x: Float32, group: RankGroup, widths: Sequence[int]) -> Float32:
        return np.asarray(group.gather_columns(x, widths), dtype=np.float32)


def _attend_one(
    q: Float32, keys: Float32, values: Float32, segment: Segment, attention: Attention, ends: Array | None
) -> Float32:
    group = attention.heads // attention.kv_heads
    heads = q.reshape(segment.count, attention.heads, attention.head_dim).transpose(1, 0, 2)
    scores = heads @ np.repeat(keys, group, axis=1).transpose(1, 2, 0) * np.float32(attention.scale)
    if attention.softcap is not None:
        scores = np.tanh(scores / np.float32(attention.softcap)) * np.float32(attention.softcap)
    here = np.arange(segment.start, segment.stop)[:, None]
    there = np.arange(segment.stop)[None, :]
    hidden = there > here if ends is None else there >= ends[:, None]
    if attention.window is not None:
        hidden |= there <= here - attention.window
    if attention.chunk is not None:
        hidden |= there < here // attention.chunk * attention.chunk
    scores = np.where(hidden, np.float32(-np.inf), scores).astype(np.float32)
    if attention.sinks is not None:
        sinks = np.broadcast_to(attention.sinks[:, None, None], (*scores.shape[:2], 1))
        weights = softmax(np.concatenate([scores, sinks], axis=-1))[..., :-1]
    else:
        weights = softmax(scores)
    mixed: Float32 = weights @ np.repeat(values, group, axis=1).transpose(1, 0, 2)
    return mixed.transpose(1, 0, 2).reshape(segment.count, -1)


def _silu(x: Float32) -> Float32:
    return x * sigmoid(x)


def _gelu(x: Float32) -> Float32:
    exact = x * (1 + np.vectorize(math.erf)(x / math.sqrt(2))) / 2
    return np.asarray(exact, dtype=np.float32)


def _gelu_tanh(x: Float32) -> Float32:
    inner = np.float32(math.sqrt(2 / math.pi)) * (x + np.float32(0.044715) * x * x * x)
    active: Float32 = np.float32(0.5) * x * (1 + np.tanh(inner))
    return active


def _gelu_quick(x: Float32) -> Float32:
    return x * sigmoid(np.float32(QUICK_GELU_ALPHA) * x)


def _relu2(x: Float32) -> Float32:
    return np.square(np.maximum(x, np.float32(0)))


_ACTIVATIONS: dict[str, Callable[[Float32], Float32]] = {
    "silu": _silu,
    "gelu": _gelu,
    "gelu_tanh": _gelu_tanh,
    "gelu_quick": _gelu_quick,
    "relu2": _relu2,
}


class NumpyExecutor(MovableSessions[HostKv], SynchronousSteps):
    """Runs a network with NumpyOps, or others of their kind, layer after layer."""

    def __init__(
        self,
        network: Network,
        options: ExecutorOptions,
        make_ops: Callable[[HostKv, int], NumpyOps] | None = None,
    ) -> None:
        self._network = network
        self._kv = HostKv(
            network.layer_count,
            network.kv_shape,
            context_length=options.context_length,
            budget_bytes=options.kv_bytes,
            kv_type=options.kv_type,
        )
        self._ops = (make_ops or NumpyOps)(self._kv, options.context_length)
        self._shared = network.load_shared(self._ops)
        self._embedding = network.load_embedding(self._ops) if network.is_first else None
        self._layers: list[Any] = [network.load_layer(self._ops, i) for i in range(network.layer_count)]
        self._head = network.load_head(self._ops) if network.is_last else None
        self._hidden: Array = np.empty((0, network.hidden), dtype=np.float32)
        self._final = self._hidden
        encode = None
        if network.pictures is not None and network.is_first:
            encode = EagerTower(network.pictures, self._ops).encode
        self._pictures: SessionPictures = SessionPictures(
            network.pictures, encode, max_rows=options.max_rows, context_length=options.context_length
        )

    def step(self, segments: Sequence[Segment], inputs: Array, *, keeps_hidden: bool = False) -> Array:
        network, ops = self._network, self._ops
        self._pictures.check(segments)
        self._kv.take(segments)
        ops.begin(segments, self._pictures)
        x = network.embed(ops, self._embedding, inputs) if network.is_first else inputs
        for place, rows in self._pictures.rows(segments):
            x[place] = rows
        for i, weights in enumerate(self._layers):
            x = network.layer(ops, self._shared, weights, i, x)
        if not network.is_last:
            return np.asarray(x)
        self._final = np.asarray(x)
        self._hidden = network.normed(ops, self._head, x)
        return np.asarray(network.head(ops, self._head, self._hidden))

    def hidden_rows(self) -> Array:
        return self._hidden

    def final_rows(self) -> Array:
        return self._final

    def close(self) -> None:
        self._layers.clear()
