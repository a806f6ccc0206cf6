"""`bench gpu --experts`: how near the experts of a sparse model come to the bandwidth of a CUDA device's memory.

Layers as Qwen3-30B-A3B and Mixtral 8x7B have them, with random weights of 16 and 4 bits, decode one row and eight. The
same layers with a narrow dense block instead of experts take turns with them; what a sparse block takes is the
difference of both, router, choice and sum included. What counts as read are the matrices of the chosen experts.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from shardcompute.backends.executor import ExecutorOptions
from shardcompute.backends.torch import TorchExecutor
from shardcompute.bench.gpu.decoding import (
    DeviceSource,
    describe_environment,
    llama_8b,
    measure_copy,
    row_ids,
    seconds_per_call,
)
from shardcompute.core.batch import Segment
from shardcompute.models.decoder import Decoder
from shardcompute.models.spec import Experts, Layer, ModelSpec, whole

_CONTEXT = 128
_NARROW = 64
_BITS = {16: 16.0, 4: 5.0}
"""Of a weight, with its share of scales and shifts."""


@dataclass(frozen=True, slots=True)
class SparseShape:
    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    experts: Experts

    def spec(self, *, is_sparse: bool) -> ModelSpec:
        """With its experts, or with a narrow dense block in their place."""
        return replace(
            llama_8b(self.layers),
            layers=(Layer(is_sparse=is_sparse),) * self.layers,
            hidden=self.hidden,
            heads=self.heads,
            kv_heads=self.kv_heads,
            intermediate=_NARROW,
            vocab_size=32_000,
            experts=self.experts if is_sparse else None,
        )

    def chosen_bytes(self, bits: int) -> float:
        """Of one row, in all layers."""
        experts = self.experts
        weights = self.layers * experts.per_token * 3 * self.hidden * experts.intermediate
        return weights * _BITS[bits] / 8


SHAPES = (
    SparseShape("Qwen3-30B-A3B", 12, 2048, 32, 4, Experts(128, 8, 768)),
    SparseShape("Mixtral 8x7B", 8, 4096, 32, 8, Experts(8, 2, 14_336)),
)


def run_expert_bench(
    *, rounds: int = 5, steps: int = 20, report: Callable[[str], None] = print
) -> dict[str, Any]:
    """Measure everything; `report` gets a line per result as it comes."""
    device = torch.device("cuda")
    results: list[dict[str, Any]] = []

    def note(metric: str, value: float, unit: str, **labels: Any) -> None:
        results.append({"metric": metric, "value": value, "unit": unit, **labels})
        what = " ".join(f"{key}={label}" for key, label in labels.items())
        report(f"{metric:28} {value:14.4g} {unit:8} {what}")

    copy_rate = measure_copy(device)
    note("copy_bandwidth", copy_rate, "B/s")
    for shape in SHAPES:
        for bits in _BITS:
            _measure_shape(shape, bits, copy_rate, rounds, steps, note)
            torch.cuda.empty_cache()
    environment = describe_environment(device, 0)
    environment["model"] = ", ".join(f"{each.layers} layers of {each.name}" for each in SHAPES)
    return {"environment": environment, "results": results}


def _measure_shape(
    shape: SparseShape, bits: int, copy_rate: float, rounds: int, steps: int, note: Callable[..., None]
) -> None:
    arms = {is_sparse: _make_executor(shape.spec(is_sparse=is_sparse), bits) for is_sparse in (True, False)}
    for rows in (1, 8):
        before = [Segment(session, 0, _CONTEXT, 1) for session in range(rows)]
        segments = [Segment(session, _CONTEXT, 1, 1) for session in range(rows)]
        ids = row_ids(segments)
        times: dict[bool, list[float]] = {True: [], False: []}
        for executor in arms.values():
            executor.step_tensor(before, row_ids(before))
            seconds_per_call(partial(executor.step_tensor, segments, ids), 3)
        for _ in range(rounds):
            for is_sparse, executor in arms.items():
                times[is_sparse].append(seconds_per_call(partial(executor.step_tensor, segments, ids), steps))
        step_s, narrow_s = (statistics.median(times[is_sparse]) for is_sparse in (True, False))
        labels = {"shape": shape.name, "bits": bits, "batch": rows}
        note("sparse_decode_steps", 1 / step_s, "1/s", **labels)
        note("sparse_block_us", 1e6 * (step_s - narrow_s) / shape.layers, "us", **labels)
        if rows == 1:
            share = shape.chosen_bytes(bits) / (step_s - narrow_s) / copy_rate
            note("expert_bandwidth_fraction", share, "of copy", **labels)


def _make_executor(spec: ModelSpec, bits: int) -> TorchExecutor:
    options = ExecutorOptions(
        kv_bytes=1 << 30,
        max_rows=1024,
        max_logit_rows=8,
        context_length=1024,
        device="cuda",
        dtype="bfloat16",
    )
    source = DeviceSource(spec, torch.device("cuda"), torch.bfloat16, bits)
    return TorchExecutor(Decoder(spec, whole(spec), source), options)
