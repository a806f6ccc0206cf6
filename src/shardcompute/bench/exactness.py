"""`bench exactness`: what rows with equal bits cost, against one fused graph with ONNX Runtime's own attention.

Both arms run the same random weights of the given shape in one process, in turns. The fused graph is the fastest
that this backend could be; it decides nothing but this comparison.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shardcompute.backends.executor import ExecutorOptions
from shardcompute.backends.host.rotation import rotation_tables
from shardcompute.backends.matrix import Array, BlockMatrix, DenseMatrix, Float32, Matrix
from shardcompute.backends.ops import Gate
from shardcompute.backends.ort import OrtExecutor
from shardcompute.backends.ort.activation import write_gated
from shardcompute.backends.ort.graph import CONTRIB, GraphWriter
from shardcompute.backends.ort.linear import Linear, stack, write_linear
from shardcompute.backends.ort.model_bytes import INT32
from shardcompute.bench.report import Result, Say, median_ratio
from shardcompute.core.batch import Segment
from shardcompute.models.decoder import Decoder
from shardcompute.models.spec import Layer, ModelSpec, Rope, whole

_CONTEXT = 2048


@dataclass(frozen=True, slots=True)
class ExactnessBench:
    bits: int = 8
    threads: int = 1
    batches: Sequence[int] = (1, 4, 8)
    pasts: Sequence[int] = (64, 512)
    steps: int = 8
    rounds: int = 7


def small_llama() -> ModelSpec:
    """The shape of SmolLM2-135M."""
    frequencies = 100_000.0 ** (-np.arange(0, 64, 2) / 64)
    return ModelSpec(
        "llama",
        (Layer(),) * 30,
        hidden=576,
        heads=9,
        kv_heads=3,
        head_dim=64,
        intermediate=1536,
        vocab_size=49_152,
        context_length=_CONTEXT,
        ropes=(Rope(tuple(float(f) for f in frequencies)),),
        norm_eps=1e-5,
        attention_scale=64**-0.5,
    )


@dataclass(frozen=True, slots=True)
class RandomTensors:
    """Weights that depend on their names alone, so that both arms have the same."""

    spec: ModelSpec
    bits: int

    def matrix(self, name: str, layer: int | None = None) -> Matrix:
        spec, kind = self.spec, name.rsplit(".", 1)[-1]
        q, kv = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
        rows, columns = {
            "q": (q, spec.hidden),
            "k": (kv, spec.hidden),
            "v": (kv, spec.hidden),
            "out": (spec.hidden, q),
            "gate": (spec.intermediate, spec.hidden),
            "up": (spec.intermediate, spec.hidden),
            "down": (spec.hidden, spec.intermediate),
        }.get(kind, (spec.vocab_size, spec.hidden))
        random = np.random.default_rng([ord(c) for c in name] + [layer or 0])
        if self.bits == 32 or kind == "embedding":
            return DenseMatrix(random.standard_normal((rows, columns), dtype=np.float32) * np.float32(0.03))
        codes = random.integers(0, 256, (rows, columns // 32, 4 * self.bits), dtype=np.uint8)
        scales = np.full((rows, columns // 32), 0.05 / 2 ** (self.bits - 1), dtype=np.float32)
        return BlockMatrix(self.bits, 32, codes, scales)

    def vector(self, name: str, layer: int | None = None) -> Float32:
        return np.ones(self.spec.hidden, dtype=np.float32)


class FusedModel:
    """The whole model as one graph with `GroupQueryAttention`; sessions are rows of one batch, of equal length."""

    def __init__(self, spec: ModelSpec, tensors: RandomTensors, most: int) -> None:
        self._spec = spec
        graph = GraphWriter()
        self._outputs: list[str] = []
        x = graph.input("x", ["batch", "rows", spec.hidden])
        graph.input("lengths", ["batch"], INT32)
        graph.input("total", [1], INT32)
        rope = spec.ropes[0]
        tables = [
            graph.constant(t) for t in rotation_tables(rope.inverse_frequencies, rope.amplitude, _CONTEXT)
        ]
        for layer in range(spec.layer_count):
            x = self._layer(graph, tensors, layer, x, tables)
        self._logits = self._linear(graph, tensors, self._norm(graph, x), ["head"], None)
        graph.output(self._logits, ["batch", "rows", spec.vocab_size])
        self._session = graph.open()
        shape = (spec.layer_count, 2, most, spec.kv_heads, _CONTEXT, spec.head_dim)
        self._kv = np.zeros(shape, dtype=np.float32)

    def step(self, x: Float32, past: int) -> Array:
        """Rows `[batch, rows, hidden]` at position `past` of every session."""
        batch, rows, _ = x.shape
        binding = self._session.io_binding()
        lengths = np.full(batch, past + rows - 1, dtype=np.int32)
        total = np.array([past + rows], dtype=np.int32)
        logits = np.empty((batch, rows, self._spec.vocab_size), dtype=np.float32)
        for name, array in (("x", x), ("lengths", lengths), ("total", total)):
            binding.bind_input(name, "cpu", 0, array.dtype.type, array.shape, array.ctypes.data)
        binding.bind_output(self._logits, "cpu", 0, np.float32, logits.shape, logits.ctypes.data)
        for layer in range(self._spec.layer_count):
            for part, kind in enumerate("kv"):
                room = self._kv[layer, part, :batch]
                place = ("cpu", 0, np.float32, room.shape, room.ctypes.data)
                binding.bind_input(f"{kind}{layer}", *place)
                binding.bind_output(self._outputs[2 * layer + part], *place)
        self._session.run_with_iobinding(binding)
        return logits

    def _layer(
        self, graph: GraphWriter, tensors: RandomTensors, layer: int, x: str, tables: Sequence[str]
    ) -> str:
        spec = self._spec
        q, kv = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
        names = [f"attention.{part}" for part in "qkv"]
        joined = self._linear(graph, tensors, self._norm(graph, x), names, layer)
        parts = graph.nodes("Split", [joined, graph.integers(q, kv, kv)], 3, axis=-1)
        room: list[int | str] = ["batch", spec.kv_heads, "context", spec.head_dim]
        past = [graph.input(f"{kind}{layer}", room) for kind in "kv"]
        attended, *present = graph.nodes(
            "GroupQueryAttention",
            [*parts, *past, "lengths", "total", *tables],
            3,
            domain=CONTRIB,
            num_heads=spec.heads,
            kv_num_heads=spec.kv_heads,
            do_rotary=1,
        )
        for name in present:
            graph.output(name, room)
        self._outputs += present
        x = graph.node("Add", [x, self._linear(graph, tensors, attended, ["attention.out"], layer)])
        hidden = self._linear(graph, tensors, self._norm(graph, x), ["mlp.gate", "mlp.up"], layer)
        hidden = write_gated(graph, hidden, 2 * spec.intermediate, Gate("silu"))
        return graph.node("Add", [x, self._linear(graph, tensors, hidden, ["mlp.down"], layer)])

    def _linear(
        self, graph: GraphWriter, tensors: RandomTensors, x: str, names: Sequence[str], layer: int | None
    ) -> str:
        return write_linear(graph, x, Linear(stack([tensors.matrix(name, layer) for name in names]), None))

    def _norm(self, graph: GraphWriter, x: str) -> str:
        weight = graph.constant(np.ones(self._spec.hidden, dtype=np.float32))
        return graph.node("SimplifiedLayerNormalization", [x, weight], epsilon=self._spec.norm_eps, axis=-1)


def run_exactness_bench(bench: ExactnessBench, say: Say) -> list[Result]:
    spec = small_llama()
    tensors = RandomTensors(spec, bench.bits)
    most = max(bench.batches)
    say("loading both arms")
    options = ExecutorOptions(kv_bytes=2 << 30, context_length=_CONTEXT, threads=bench.threads)
    ours = OrtExecutor(Decoder(spec, whole(spec), tensors), options)
    fused = FusedModel(spec, tensors, most)
    results = _differences(spec, ours, fused)
    for past in bench.pasts:
        for batch in bench.batches:
            say(f"{batch} sessions at {past} tokens")
            speeds = _compare(bench, spec, ours, fused, batch, past)
            labels = {"bits": bench.bits, "threads": bench.threads, "batch": batch, "past": past}
            for name, values in speeds.items():
                arm = {**labels, "arm": name}
                results.append(Result("decode", statistics.median(values), "tok/s", arm))
            ratio = median_ratio(speeds["exact"], speeds["fused"])
            results.append(Result("exact_vs_fused", ratio, "ratio", {**labels, "arm": "exact"}))
    return results


def _compare(
    bench: ExactnessBench, spec: ModelSpec, ours: OrtExecutor, fused: FusedModel, batch: int, past: int
) -> dict[str, list[float]]:
    ids = np.full(past, 7, dtype=np.int64)
    for session in range(batch):
        ours.step([Segment(session, 0, past)], ids)
    row = np.full((batch, 1, spec.hidden), 0.1, dtype=np.float32)
    speeds: dict[str, list[float]] = {"fused": [], "exact": []}
    for _ in range(bench.rounds):
        started = time.perf_counter()
        for step in range(bench.steps):
            fused.step(row, past + step)
        speeds["fused"].append(bench.steps * batch / (time.perf_counter() - started))
        started = time.perf_counter()
        for step in range(bench.steps):
            ours.step([Segment(s, past + step, 1, 1) for s in range(batch)], ids[:batch])
        speeds["exact"].append(bench.steps * batch / (time.perf_counter() - started))
    for session in range(batch):
        ours.close_session(session)
    return speeds


def _differences(spec: ModelSpec, ours: OrtExecutor, fused: FusedModel) -> list[Result]:
    """How much a row differs when its step has one row instead of two."""
    random = np.random.default_rng(3)
    rows = random.standard_normal((1, 2, spec.hidden), dtype=np.float32)
    past = random.standard_normal((1, 64, spec.hidden), dtype=np.float32)
    fused.step(past, 0)
    together = fused.step(rows, 64)[0, 0].copy()
    alone = fused.step(rows[:, :1].copy(), 64)[0, 0]
    ids = random.integers(0, spec.vocab_size, 66)
    ours.step([Segment(0, 0, 64)], ids[:64])
    ours_together = ours.step([Segment(0, 64, 2, 2)], ids[64:])[0].copy()
    ours_alone = ours.step([Segment(0, 64, 1, 1)], ids[64:65])[0]
    ours.close_session(0)
    return [
        Result("logit_difference", float(np.abs(a - b).max()), "", {"arm": name})
        for name, a, b in (("fused", alone, together), ("exact", ours_alone, ours_together))
    ]
