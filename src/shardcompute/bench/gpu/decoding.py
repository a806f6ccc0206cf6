"""`bench gpu`: how near a CUDA device's decode comes to the bandwidth of its memory.

A decoder of an 8B model's shape with random weights runs decode steps for several batches and context lengths: with
our kernels in graphs (weights of 16, 8 and 4 bits), with our kernels eagerly, and with torch's library in graphs.
The arms take turns within one run. What counts as read are all weights once and the used KV; the yardstick is a large
copy on the same device in the same run, bytes read plus bytes written.
"""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, cast

import numpy as np
import torch

from shardcompute.backends.executor import ExecutorOptions, PickRule
from shardcompute.backends.matrix import Array, BlockMatrix, Float32, Matrix
from shardcompute.backends.torch import TensorMatrix, TorchExecutor
from shardcompute.core.batch import Segment
from shardcompute.models.decoder import Decoder
from shardcompute.models.spec import Layer, ModelSpec, Rope, whole

BATCHES = (1, 2, 4, 8, 16)
LARGE_BATCHES = (32, 64, 128, 256)
"""At the shortest context, and in graphs alone."""
CONTEXTS = (1024, 128)
PROMPTS = (512, 2048)
KV_BYTES = 8 << 30
CONTEXT_LENGTH = 4096
Arms = Mapping[str, TorchExecutor]


def llama_8b(layers: int = 32) -> ModelSpec:
    """The shape of Llama 3 8B."""
    return ModelSpec(
        family="llama",
        layers=(Layer(),) * layers,
        hidden=4096,
        heads=32,
        kv_heads=8,
        head_dim=128,
        intermediate=14336,
        vocab_size=128256,
        context_length=CONTEXT_LENGTH,
        ropes=(Rope(tuple(500000.0 ** (-i / 64) for i in range(64))),),
        norm_eps=1e-5,
        attention_scale=128**-0.5,
    )


class DeviceSource:
    """Random tensors made on the device, the same for every source of a spec; in blocks where `bits` are 8 or 4."""

    def __init__(self, spec: ModelSpec, device: torch.device, dtype: torch.dtype, bits: int = 16) -> None:
        self._bits = bits
        self._blocks: dict[str, BlockMatrix] = {}
        q_width, kv_width = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
        self._shapes = {
            "embedding": (spec.vocab_size, spec.hidden),
            "head": (spec.vocab_size, spec.hidden),
            "attention.q": (q_width, spec.hidden),
            "attention.k": (kv_width, spec.hidden),
            "attention.v": (kv_width, spec.hidden),
            "attention.out": (spec.hidden, q_width),
            "mlp.gate": (spec.intermediate, spec.hidden),
            "mlp.up": (spec.intermediate, spec.hidden),
            "mlp.down": (spec.hidden, spec.intermediate),
        }
        if spec.experts is not None:
            inner = spec.experts.intermediate
            self._shapes |= {
                "mlp.router": (spec.experts.count, spec.hidden),
                "experts.gate": (inner, spec.hidden),
                "experts.up": (inner, spec.hidden),
                "experts.down": (spec.hidden, inner),
            }
        self._hidden = spec.hidden
        self._dtype = dtype
        self._chance = torch.Generator(device)
        self._chance.manual_seed(1)

    def matrix(self, name: str, layer: int | None = None) -> Matrix:
        if name.startswith("experts."):  # of any number
            name = "experts." + name.rsplit(".", 1)[1]
        shape = self._shapes[name]
        if self._bits < 16 and name not in ("embedding", "mlp.router"):
            if name not in self._blocks:
                self._blocks[name] = _random_blocks(shape, self._bits)
            return self._blocks[name]
        values = torch.randn(shape, generator=self._chance, device=self._chance.device, dtype=self._dtype)
        values *= 1.0 if name == "embedding" else shape[1] ** -0.5
        return cast(Matrix, TensorMatrix(values))

    def vector(self, name: str, layer: int | None = None) -> Float32:
        return np.ones(self._hidden, dtype=np.float32)


def _random_blocks(shape: tuple[int, int], bits: int) -> BlockMatrix:
    """Blocks of 32 as `--weights int8` and `int4` make them: the latter have shifts."""
    chance = np.random.default_rng(shape[0])
    blocks = (shape[0], shape[1] // 32)
    codes = np.frombuffer(chance.bytes(shape[0] * shape[1] * bits // 8), np.uint8)
    scales = chance.random(blocks, dtype=np.float32) * np.float32(shape[1] ** -0.5 / (1 << (bits - 2)))
    shifts = (chance.random(blocks, dtype=np.float32) - np.float32(0.5)) * np.float32(0.01)
    return BlockMatrix(bits, 32, codes.reshape(*blocks, -1), scales, shifts if bits == 4 else None)


def count_weight_bytes(spec: ModelSpec, bits: int = 16) -> int:
    """Bytes of weights that one decode step must read: all layers and the head; in blocks with their 16-bit scales."""
    attention = spec.hidden * spec.head_dim * (2 * spec.heads + 2 * spec.kv_heads)
    layer = attention + 3 * spec.hidden * spec.intermediate
    weights = spec.layer_count * layer + spec.vocab_size * spec.hidden
    block_bits = {16: 0, 8: 16, 4: 32}[bits]
    return weights * (32 * bits + block_bits) // (32 * 8)


def measure_copy(device: torch.device, size_bytes: int = 4 << 30) -> float:
    """Bytes read plus bytes written per second of a large copy."""
    source = torch.empty(size_bytes // 2, dtype=torch.bfloat16, device=device).normal_()
    target = torch.empty_like(source)
    times = []
    for _ in range(8):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        target.copy_(source)
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return float(2 * source.nbytes / statistics.median(times[2:]))


def run_gpu_bench(
    *,
    layers: int = 32,
    batches: Sequence[int] = BATCHES,
    contexts: Sequence[int] = CONTEXTS,
    prompts: Sequence[int] = PROMPTS,
    rounds: int = 5,
    steps: int = 20,
    report: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Measure everything; `report` gets a line per result as it comes."""
    device, spec = torch.device("cuda"), llama_8b(layers)
    results: list[dict[str, Any]] = []

    def note(metric: str, value: float, unit: str, **labels: Any) -> None:
        results.append({"metric": metric, "value": value, "unit": unit, **labels})
        what = " ".join(f"{key}={label}" for key, label in labels.items())
        report(f"{metric:28} {value:14.4g} {unit:8} {what}")

    copy_rate = measure_copy(device)
    note("copy_bandwidth", copy_rate, "B/s")
    arms = _make_arms(spec, device)
    for name, executor in arms.items():
        note("graph_memory", executor.graph_bytes, "B", arm=name)
    _check_tokens(arms, note)
    for name in ("graph", "int8", "int4"):
        _check_rows(arms[name], partial(note, arm=name))
        _check_verification(arms[name], partial(note, arm=name))
        _check_pieces(arms[name], partial(note, arm=name))
    graphed = {name: arms[name] for name in ("graph", "int8", "int4")}
    for context in sorted(contexts, reverse=True):
        _prefill(arms, max(batches), context)
        for batch in batches:
            _measure_decode(arms, spec, batch, context, copy_rate, rounds, steps, note)
    _prefill(graphed, max(LARGE_BATCHES), min(contexts))
    for batch in LARGE_BATCHES:
        _measure_decode(graphed, spec, batch, min(contexts), copy_rate, rounds, steps, note)
    for length in prompts:
        _measure_prefill(arms, length, rounds, note)
    return {"environment": describe_environment(device, layers), "results": results}


def describe_environment(device: torch.device, layers: int) -> dict[str, Any]:
    import triton

    properties = torch.cuda.get_device_properties(device)
    return {
        "device": properties.name,
        "processors": properties.multi_processor_count,
        "memory_bytes": properties.total_memory,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "model": f"Llama 3 8B shape, {layers} layers, random weights, computed in bfloat16",
    }


def _make_arms(spec: ModelSpec, device: torch.device) -> Arms:
    def make(bits: int, use_graphs: bool, use_library: bool) -> TorchExecutor:
        options = ExecutorOptions(
            kv_bytes=KV_BYTES,
            max_rows=2048,
            max_logit_rows=256,
            context_length=CONTEXT_LENGTH,
            device="cuda",
            dtype="bfloat16",
            use_graphs=use_graphs,
        )
        network = Decoder(spec, whole(spec), DeviceSource(spec, device, torch.bfloat16, bits))
        return TorchExecutor(network, options, use_library=use_library)

    return {
        "graph": make(16, True, False),
        "eager": make(16, False, False),
        "library": make(16, True, True),
        "int8": make(8, True, False),
        "int4": make(4, True, False),
    }


def row_ids(segments: Sequence[Segment]) -> torch.Tensor:
    """A token for each row, by its session and position."""
    rows = [(s.session * 1009 + i * 37) % 32000 for s in segments for i in range(s.start, s.stop)]
    return torch.tensor(rows)


def _run(executor: TorchExecutor, segments: Sequence[Segment]) -> torch.Tensor:
    return executor.step_tensor(segments, row_ids(segments))


def _pick(executor: TorchExecutor, segments: Sequence[Segment], ids: Array) -> None:
    """A step whose tokens are picked on the device and waited for."""
    executor.launch_picks(segments, ids, [PickRule()] * len(segments)).wait()


def _close_all(arms: Arms) -> None:
    for executor in arms.values():
        for session in range(256):
            executor.close_session(session)


def _prefill(arms: Arms, sessions: int, context: int) -> None:
    _close_all(arms)
    for executor in arms.values():
        for session in range(sessions):
            _run(executor, [Segment(session, 0, context, 1)])


def _measure_decode(
    arms: Arms,
    spec: ModelSpec,
    batch: int,
    context: int,
    copy_rate: float,
    rounds: int,
    steps: int,
    note: Callable[..., None],
) -> None:
    """Writing at the same position again truncates, so every step costs the same."""
    segments = [Segment(session, context, 1, 1) for session in range(batch)]
    ids = row_ids(segments)
    host_ids = ids.numpy()
    for executor in arms.values():
        seconds_per_call(partial(executor.step_tensor, segments, ids), 2)
    times: dict[str, list[float]] = {name: [] for name in arms}
    walls: dict[str, list[float]] = {name: [] for name in ("graph", "int8", "int4")}
    for _ in range(rounds):
        for name, executor in arms.items():
            count = steps if name != "eager" else max(steps // 4, 1)
            times[name].append(seconds_per_call(partial(executor.step_tensor, segments, ids), count))
        for name, taken in walls.items():
            taken.append(seconds_per_call(partial(_pick, arms[name], segments, host_ids), steps))
    kv_bytes = batch * (context + 1) * spec.layer_count * 4 * spec.kv_heads * spec.head_dim
    for name, taken in times.items():
        moved = count_weight_bytes(spec, {"int8": 8, "int4": 4}.get(name, 16)) + kv_bytes
        rate = 1 / statistics.median(taken)
        labels = {"arm": name, "batch": batch, "context": context}
        note("decode_steps", rate, "1/s", **labels)
        note("decode_bandwidth_fraction", moved * rate / copy_rate, "of copy", **labels)
    for name, taken in walls.items():
        rate = 1 / statistics.median(taken)
        note("decode_steps_with_picks_to_host", rate, "1/s", arm=name, batch=batch, context=context)


def _measure_prefill(arms: Arms, length: int, rounds: int, note: Callable[..., None]) -> None:
    _close_all(arms)
    segments = [Segment(0, 0, length, 1)]
    times: dict[str, list[float]] = {"graph": [], "library": [], "int8": [], "int4": []}
    for _ in range(rounds + 1):
        for name, taken in times.items():
            taken.append(seconds_per_call(partial(_run, arms[name], segments), 2))
    for name, taken in times.items():
        note("prefill_tokens", length / statistics.median(taken[1:]), "1/s", arm=name, prompt=length)


def _check_tokens(arms: Arms, note: Callable[..., None], count: int = 24) -> None:
    """Greedy tokens of three sessions, with graphs and without."""
    chosen: dict[str, Any] = {}
    for name in ("graph", "eager"):
        segments = [Segment(session, 0, 40 + session, 1) for session in range(3)]
        logits, tokens = _run(arms[name], segments), []
        for _ in range(count):
            ids = logits.argmax(dim=-1).cpu()
            tokens.append(ids)
            segments = [Segment(s.session, s.stop, 1, 1) for s in segments]
            logits = arms[name].step_tensor(segments, ids)
        chosen[name] = torch.stack(tokens)
    _close_all(arms)
    note("same_tokens_with_graphs", float(torch.equal(chosen["graph"], chosen["eager"])), "1 = yes")


def _check_rows(executor: TorchExecutor, note: Callable[..., None]) -> None:
    """Logits of each row in batches of 2 to 160, beside a long prompt, and alone, bit by bit."""
    starts = [100 + 40 * (session % 8) for session in range(160)]
    for session, start in enumerate(starts):
        _run(executor, [Segment(session, 0, start, 1)])
    segments = [Segment(session, start, 1, 1) for session, start in enumerate(starts)]
    alone = torch.cat([_run(executor, [segment]).clone() for segment in segments[:16]])
    for batch in (2, 8, 16, 48, 64, 96, 160):
        joint = _run(executor, segments[:batch])[:16]
        note("rows_equal_in_any_batch", float(torch.equal(joint, alone[:batch])), "1 = yes", batch=batch)
    beside = _run(executor, [Segment(200, 0, 700, 1), *segments[:16]])[1:]
    note("rows_equal_beside_a_prompt", float(torch.equal(beside, alone)), "1 = yes", prompt=700)
    for session in (*range(160), 200):
        executor.close_session(session)


def _check_verification(executor: TorchExecutor, note: Callable[..., None]) -> None:
    """Logits of rows that are verified at once and decoded one by one, bit by bit."""
    _run(executor, [Segment(0, 0, 200, 1)])
    ones = [Segment(0, 200 + i, 1, 1) for i in range(40)]
    decoded = torch.cat([_run(executor, [segment]).clone() for segment in ones])
    for count in (5, 16, 40):
        verified = _run(executor, [Segment(0, 200, count, count)])
        note(
            "verifying_equals_decoding", float(torch.equal(verified, decoded[:count])), "1 = yes", rows=count
        )
    executor.close_session(0)


def _check_pieces(executor: TorchExecutor, note: Callable[..., None], length: int = 1500) -> None:
    """Logits of a prompt in one step, in pieces of any size, and beside another prompt, bit by bit."""
    ids = row_ids([Segment(0, 0, length, 1)])
    whole_prompt = executor.step_tensor([Segment(0, 0, length, 1)], ids).clone()
    for size in (65, 100, 129, 257, 500, 1000, 1499):
        for start in range(0, length, size):
            count = min(size, length - start)
            logits = executor.step_tensor([Segment(0, start, count, 1)], ids[start : start + count])
        note("prompts_equal_in_any_pieces", float(torch.equal(logits, whole_prompt)), "1 = yes", rows=size)
    for count in (1, 70, 500):
        other = Segment(1, 0, count, 1)
        logits = executor.step_tensor([other, Segment(0, 0, length, 1)], torch.cat([row_ids([other]), ids]))
        equal = torch.equal(logits[1:], whole_prompt)
        note("prompts_equal_beside_others", float(equal), "1 = yes", rows=count)
        executor.close_session(1)
    executor.close_session(0)


def seconds_per_call(work: Callable[[], Any], count: int) -> float:
    """Seconds per call."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(count):
        work()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / count
