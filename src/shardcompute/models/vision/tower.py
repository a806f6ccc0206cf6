"""The tower: a transformer over the patches of one picture, written once against PatchOps.

A picture is encoded by itself, so that its rows have the same bits whatever else a step or a prompt holds. Patches that
become one row lie one behind the other; where patches see windows, those of a window do, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardcompute.backends.executor import PatchRows
from shardcompute.backends.host.rotation import rotation_tables
from shardcompute.backends.matrix import DenseMatrix, Float32
from shardcompute.backends.ops import Gate, Handle, PatchAttention, PatchOps, Tensor
from shardcompute.core.pictures import PictureSpan
from shardcompute.models.decoder import TensorSource
from shardcompute.models.layout import TOWER
from shardcompute.models.spec import ModelSpec, VisionSpec
from shardcompute.models.vision.prepare import check_picture, numbers_of
from shardcompute.models.vision.slots import qkv_names

_THETA = 10_000.0
Indices = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class PatchNorm:
    weight: Handle
    bias: Handle | None


@dataclass(frozen=True, slots=True)
class PatchLayer:
    """Handles of one layer."""

    attention_norm: PatchNorm
    qkv: Handle
    out: Handle
    mlp_norm: PatchNorm
    up: Handle
    down: Handle


@dataclass(frozen=True, slots=True)
class PatchBack:
    """Handles behind the last layer; `inner` is None where rows are pooled."""

    norm: PatchNorm
    row_norm: PatchNorm | None
    inner: Handle | None
    out: Handle


class VisionTower:
    """A `PictureNetwork`. Tensors are read where the tower is loaded: with the embedding."""

    def __init__(self, spec: ModelSpec, vision: VisionSpec, source: TensorSource) -> None:
        self._vision = vision
        self._source = source
        self._head_dim = vision.hidden // vision.heads
        self.is_bidirectional = vision.is_bidirectional
        self.has_axes = any(rope.axes for rope in spec.ropes)
        self.merge = vision.merge
        self.row_scale = spec.embedding_scale
        self.layer_count = vision.layers
        self.patch_width = vision.patch_bytes
        self.hidden = vision.hidden
        self.turned = 0 if vision.positions else self._head_dim // 2
        self._positions: Float32 | None = None

    def check(self, span: PictureSpan, patches: bytes | None) -> None:
        check_picture(self._vision, span, patches)

    def patch_rows(self, span: PictureSpan, patches: bytes) -> PatchRows:
        vision, (_, rows, columns) = self._vision, span.grid
        numbers = numbers_of(vision, patches)
        if vision.positions:
            return PatchRows(numbers, self._positions, None, (), None)
        places = _places(rows, columns, vision.merge)
        windows: Sequence[tuple[int, int]] = ()
        order = None
        if vision.window:
            merged, windows = window_order(
                rows // vision.merge, columns // vision.merge, vision.window, vision.merge
            )
            patch_order = (merged[:, None] * vision.merge**2 + np.arange(vision.merge**2)).reshape(-1)
            numbers, places, order = numbers[patch_order], places[patch_order], np.argsort(merged)
        return PatchRows(numbers, None, _turning(places, self._head_dim), windows, order)

    # Loading

    def load_front(self, ops: PatchOps) -> Handle:
        vision = self._vision
        weight = self._source.matrix(f"{TOWER}patch").to_dense()
        if vision.frames > 1:
            # All frames of a picture are equal.
            shape = (len(weight), 3, vision.frames, vision.patch**2)
            weight = np.ascontiguousarray(weight.reshape(shape).sum(axis=2)).reshape(len(weight), -1)
        bias = None
        if vision.positions:
            bias = self._source.vector(f"{TOWER}patch.bias")
            side = vision.size.edge // vision.patch
            order = _places(side, side, vision.merge) @ np.array([side, 1])
            self._positions = self._source.matrix(f"{TOWER}positions").to_dense()[order]
        return ops.matrix([DenseMatrix(weight)], bias)

    def load_layer(self, ops: PatchOps, layer: int) -> PatchLayer:
        names = ["gate", "up"] if self._vision.has_gate else ["up"]
        prefix = f"layers.{layer}."
        return PatchLayer(
            attention_norm=self._load_norm(ops, f"{prefix}attention.norm"),
            qkv=self._load(ops, [f"{prefix}{name}" for name in qkv_names(self._vision)]),
            out=self._load(ops, [f"{prefix}attention.out"]),
            mlp_norm=self._load_norm(ops, f"{prefix}mlp.norm"),
            up=self._load(ops, [f"{prefix}mlp.{name}" for name in names]),
            down=self._load(ops, [f"{prefix}mlp.down"]),
        )

    def load_back(self, ops: PatchOps) -> PatchBack:
        norm = self._load_norm(ops, "norm")
        if self._vision.is_pooled:
            row_norm = PatchNorm(ops.vector(self._source.vector(f"{TOWER}row_norm")), None)
            return PatchBack(
                norm, row_norm, None, ops.matrix([self._source.matrix(f"{TOWER}merge.out")], None)
            )
        return PatchBack(norm, None, self._load(ops, ["merge.inner"]), self._load(ops, ["merge.out"]))

    def _load(self, ops: PatchOps, names: Sequence[str]) -> Handle:
        parts = [self._source.matrix(f"{TOWER}{name}") for name in names]
        return ops.matrix(
            parts, np.concatenate([self._source.vector(f"{TOWER}{name}.bias") for name in names])
        )

    def _load_norm(self, ops: PatchOps, name: str) -> PatchNorm:
        weight = ops.vector(self._source.vector(f"{TOWER}{name}"))
        has_bias = self._vision.norm == "layer"
        return PatchNorm(weight, ops.vector(self._source.vector(f"{TOWER}{name}.bias")) if has_bias else None)

    # Computing

    def front(self, ops: PatchOps, weights: Handle, numbers: Tensor, added: Tensor | None) -> Tensor:
        x = ops.linear(numbers, weights)
        return x if added is None else ops.add(x, added)

    def layer(self, ops: PatchOps, weights: PatchLayer, layer: int, x: Tensor) -> Tensor:
        vision = self._vision
        y = ops.linear(self._norm(ops, x, weights.attention_norm), weights.qkv)
        q, k, v = ops.split(y, [vision.hidden] * 3)
        if self.turned:
            q, k = (ops.rotate(each, self._head_dim, ops.turning()) for each in (q, k))
        is_windowed = bool(vision.window) and layer not in vision.whole_layers
        attention = PatchAttention(vision.heads, self._head_dim, is_windowed)
        x = ops.add(x, ops.linear(ops.attend_patches(q, k, v, attention), weights.out))
        y = ops.linear(self._norm(ops, x, weights.mlp_norm), weights.up)
        act = vision.activation
        y = ops.gated(y, Gate(act)) if vision.has_gate else ops.activate(y, act)
        return ops.add(x, ops.linear(y, weights.down))

    def back(self, ops: PatchOps, weights: PatchBack, x: Tensor) -> Tensor:
        x, count = self._norm(ops, x, weights.norm), self.merge**2
        if weights.row_norm is not None:
            pooled = ops.mean_rows(x, count)
            return ops.linear(
                ops.rms_norm(pooled, weights.row_norm.weight, self._vision.norm_eps), weights.out
            )
        inner = ops.linear(ops.merge_rows(x, count), weights.inner)
        return ops.linear(ops.activate(inner, "gelu"), weights.out)

    def _norm(self, ops: PatchOps, x: Tensor, norm: PatchNorm) -> Tensor:
        eps = self._vision.norm_eps
        if self._vision.norm == "layer":
            return ops.layer_norm(x, norm.weight, norm.bias, eps)
        return ops.rms_norm(x, norm.weight, eps)


def window_order(rows: int, columns: int, window: int, merge: int) -> tuple[Indices, list[tuple[int, int]]]:
    """Merged patches window by window, and which patches each window then has."""
    grid = np.arange(rows * columns).reshape(rows, columns)
    parts, windows, end = [], list[tuple[int, int]](), 0
    for top in range(0, rows, window):
        for left in range(0, columns, window):
            part = grid[top : top + window, left : left + window].reshape(-1)
            parts.append(part)
            windows.append((end, end + part.size * merge**2))
            end = windows[-1][1]
    return np.concatenate(parts), windows


def _places(rows: int, columns: int, merge: int) -> Indices:
    """Row and column of each patch `[patches, 2]`, in the order in which patches lie."""
    grid: Any = np.stack(np.meshgrid(np.arange(rows), np.arange(columns), indexing="ij"), axis=-1)
    blocks = grid.reshape(rows // merge, merge, columns // merge, merge, 2)
    places: Indices = blocks.transpose(0, 2, 1, 3, 4).reshape(-1, 2)
    return places


def _turning(places: Indices, head_dim: int) -> tuple[Float32, Float32]:
    """Cosines and sines of each patch: a half of the pairs turns by its row, the other by its column."""
    width = head_dim // 2
    frequencies = 1.0 / _THETA ** (np.arange(0, width, 2, dtype=np.float32) / np.float32(width))
    tables = rotation_tables(frequencies.astype(np.float32).tolist(), 1.0, int(places.max()) + 1)
    cosines, sines = (np.concatenate([table[places[:, 0]], table[places[:, 1]]], axis=1) for table in tables)
    return cosines, sines
