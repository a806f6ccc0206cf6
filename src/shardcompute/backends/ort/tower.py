"""Towers through ONNX Runtime: a program like that of a slice, over the patches of one picture at a time.

Buffers are there while a picture is encoded: most sessions have none, and those of a large one are as large as the
weights of a few layers.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import cast

import numpy as np
import onnxruntime

from shardcompute.backends.executor import PictureNetwork
from shardcompute.backends.kv import HostKv
from shardcompute.backends.matrix import Float32
from shardcompute.backends.ops import PatchAttention
from shardcompute.backends.ort.graph import CONTRIB, GraphWriter
from shardcompute.backends.ort.ops import OrtOps
from shardcompute.backends.ort.program import Graph, Run, Value, assign_buffers
from shardcompute.core.pictures import MAX_PATCHES, PictureSpan

_SCORE_BYTES = 32 << 20


@dataclass(slots=True, eq=False)
class AttendPatches:
    """All patches of a block attend to all of it."""

    kernel: onnxruntime.InferenceSession
    attention: PatchAttention
    q: Value
    k: Value
    v: Value
    out: Value

    def inputs(self) -> Iterable[Value]:
        return (self.q, self.k, self.v)

    def outputs(self) -> Iterable[Value]:
        return (self.out,)

    def run(self, run: Run) -> None:
        heads, dim = self.attention.heads, self.attention.head_dim
        for start, stop in run.windows if self.attention.is_windowed else [(0, run.rows)]:
            shape = (stop - start, heads, dim)
            keys, values = (each.buffer[start:stop].reshape(shape) for each in (self.k, self.v))
            most = max(2, _SCORE_BYTES // (4 * heads * (stop - start)))
            for first in range(start, stop, most):
                rows = slice(first, min(first + most, stop))
                given = {"q": self.q.buffer[rows], "k": keys, "v": values}
                self.out.buffer[rows] = self.kernel.run(["out"], given)[0]


@dataclass(slots=True, eq=False)
class MergeRows:
    """Neighbouring rows side by side, or their mean; the steps behind it see fewer rows."""

    x: Value
    out: Value
    count: int
    is_mean: bool

    def inputs(self) -> Iterable[Value]:
        return (self.x,)

    def outputs(self) -> Iterable[Value]:
        return (self.out,)

    def run(self, run: Run) -> None:
        merged = run.rows // self.count
        groups = self.x.buffer[: run.rows].reshape(merged, self.count, -1)
        self.out.buffer[:merged] = groups.mean(axis=1) if self.is_mean else groups.reshape(merged, -1)
        run.rows = merged


class OrtPatchOps(OrtOps):
    """Records a tower."""

    def __init__(self, turned: int) -> None:
        numbers = np.arange(MAX_PATCHES, dtype=np.int64)[None]
        super().__init__(0, numbers, np.zeros_like(numbers), "float32")
        shape = (MAX_PATCHES, max(1, turned))
        self.tables: tuple[Float32, Float32] = (
            np.zeros(shape, dtype=np.float32),
            np.zeros(shape, dtype=np.float32),
        )
        self._attention: dict[tuple[int, int], onnxruntime.InferenceSession] = {}

    def turning(self) -> tuple[Float32, Float32]:
        return self.tables

    def attend_patches(self, q: Value, k: Value, v: Value, attention: PatchAttention) -> Value:
        for value in (q, k, v):
            self._export(value)
        self._close()
        key = (attention.heads, attention.head_dim)
        if key not in self._attention:
            self._attention[key] = _open(attention)
        out = Value(self._name("a"), q.width, None)
        self.steps.append(AttendPatches(self._attention[key], attention, q, k, v, out))
        return out

    def merge_rows(self, x: Value, count: int) -> Value:
        return self._merge(x, count, is_mean=False)

    def mean_rows(self, x: Value, count: int) -> Value:
        return self._merge(x, count, is_mean=True)

    def _merge(self, x: Value, count: int, *, is_mean: bool) -> Value:
        self._export(x)
        self._close()
        self._is_narrow = True
        out = Value(self._name("m"), x.width if is_mean else x.width * count, None, is_narrow=True)
        self.steps.append(MergeRows(x, out, count, is_mean))
        return out


class OrtTower:
    """A tower as a program of graphs."""

    def __init__(self, network: PictureNetwork) -> None:
        self._network = network
        self._ops = ops = OrtPatchOps(network.turned)
        self._numbers = ops.source(network.patch_width)
        self._added = None if network.turned else ops.source(network.hidden)
        x = network.front(ops, network.load_front(ops), self._numbers, self._added)
        for layer in range(network.layer_count):
            x = network.layer(ops, network.load_layer(ops, layer), layer, x)
        self._rows = network.back(ops, network.load_back(ops), x)
        ops.finish(self._rows)

    def encode(self, span: PictureSpan, patches: bytes) -> Float32:
        given, steps = self._network.patch_rows(span, patches), self._ops.steps
        sources = [self._numbers, *([] if self._added is None else [self._added])]
        assign_buffers(steps, [*sources, self._rows], span.patch_count, span.count)
        try:
            self._numbers.buffer[:] = given.numbers
            if self._added is not None and given.added is not None:
                self._added.buffer[:] = given.added
            for table, values in zip(self._ops.tables, given.turning or (), strict=False):
                table[: len(values)] = values
            # Nothing of a tower looks at KV.
            run = Run((), span.patch_count, cast(HostKv, None), windows=given.windows)
            for step in steps:
                step.run(run)
            rows: Float32 = self._rows.buffer[: span.count].copy()
        finally:
            self._let_go()
        ordered: Float32 = rows if given.order is None else rows[given.order]
        return ordered

    def _let_go(self) -> None:
        nothing = np.empty((0, 0), dtype=np.float32)
        for step in self._ops.steps:
            if isinstance(step, Graph):
                step.bindings.clear()
            for value in (*step.inputs(), *step.outputs()):
                value.buffer = nothing


def _open(attention: PatchAttention) -> onnxruntime.InferenceSession:
    """`out[rows] = softmax(q·kᵀ·scale)·v`, head by head."""
    graph = GraphWriter()
    heads, dim = attention.heads, attention.head_dim
    q = graph.input("q", ["rows", heads * dim])
    keys, values = (graph.input(name, ["keys", heads, dim]) for name in ("k", "v"))
    q = graph.node("Reshape", [q, graph.integers(-1, heads, dim)])
    q = graph.node("Transpose", [q], perm=[1, 0, 2])
    scores = graph.node(
        "FusedMatMul", [q, keys], domain=CONTRIB, alpha=attention.scale, transB=1, transBatchB=1
    )
    weights = graph.node("Softmax", [scores], axis=-1)
    mixed = graph.node("FusedMatMul", [weights, values], domain=CONTRIB, transBatchB=1)
    mixed = graph.node("Transpose", [mixed], perm=[1, 0, 2])
    graph.rename(graph.node("Reshape", [mixed, graph.integers(-1, heads * dim)]), "out")
    graph.output("out", ["rows", heads * dim])
    return graph.open()
