"""Speed probe: how fast this machine's device is with its backend, measured before anybody has to rely on it.

Before any model is known `probe_backend` computes with made-up layers on the very executor that will serve;
`measure_shard` then measures what was loaded, in its own shapes and form: one row, several, and a piece of a prompt.
The fastest of several tries counts: what else the machine does meanwhile only ever makes one slower.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from shardcompute.backends.executor import ExecutorOptions
from shardcompute.backends.matrix import Array, BlockMatrix, DenseMatrix, Float32, Matrix
from shardcompute.control.sizes import LAYER_OVERHEAD_BYTES, layer_weights, layer_work
from shardcompute.control.state import LayerShape
from shardcompute.core.batch import PAGE_TOKENS
from shardcompute.core.generation import Sampling
from shardcompute.core.steps import Opening, SessionRows
from shardcompute.models.spec import Layer, ModelSpec, Rope, Stage
from shardcompute.runtime.shard import build_executor
from shardcompute.runtime.stage import StageRuntime
from shardcompute.weights.card import Card

BATCH_ROWS = 8
PROMPT_ROWS = 128
_LEAST_PROMPT_ROWS = 16
_FIRST_SESSION = 0
_DECODE_S, _BATCH_S, _PROMPT_S = 1.0, 0.6, 1.5
"""So long each of the three is tried, at most, after its first try."""
_DECODE_TRIES, _BATCH_TRIES, _PROMPT_TRIES = 9, 5, 3


@dataclass(frozen=True, slots=True)
class BackendSpeed:
    """What a backend does on a device whatever the model: seconds to read a byte of weights for one row, for each row
    of a prompt, and for a frame whatever is in it."""

    seconds_per_byte: float
    prefill_seconds_per_byte: float
    overhead_s: float


@dataclass(frozen=True, slots=True)
class StageSpeed:
    """Seconds for one row through a stage, for one row each of several sessions at once, and for each row of a
    prompt; None: there was no room to try."""

    row_s: float
    batch_s: float | None = None
    prompt_row_s: float | None = None


@dataclass(frozen=True, slots=True)
class ShardSpeed:
    """What was measured of a shard, and what that makes of an average layer of its model: seconds for one row, for
    several sessions' at once, and for each row of a prompt, without what every frame costs."""

    stage: StageSpeed
    layer_s: float
    batch_layer_s: float | None = None
    prefill_layer_s: float | None = None


@dataclass(frozen=True, slots=True)
class _Probed:
    """The shape of a made-up layer: larger than the caches of a CPU; as large as an 8B model's on a GPU, where
    anything smaller measures launches alone."""

    hidden: int
    intermediate: int
    layers: int
    prompt_rows: int

    def spec(self) -> ModelSpec:
        head = 64
        rope = Rope(tuple(float(f) for f in 10000.0 ** (-np.arange(0, head, 2) / head)))
        # One layer more at each end: what is measured has neither embedding nor head.
        kinds = (Layer(),) * (self.layers + 2)
        heads, kv_heads = self.hidden // head, max(1, self.hidden // head // 4)
        width, vocabulary, context = self.intermediate, 256, 1024
        return ModelSpec(
            "probe", kinds, self.hidden, heads, kv_heads, head, width, vocabulary, context, (rope,), 1e-5, head**-0.5
        )  # fmt: skip

    def work_bytes(self, bytes_per_weight: float) -> float:
        spec = self.spec()
        return self.layers * (
            layer_weights(spec, spec.layers[0])[0] * bytes_per_weight + LAYER_OVERHEAD_BYTES
        )


_TINY = _Probed(256, 256, 1, 32)
"""As good as nothing: what is left is the frame's."""
_HOST = _Probed(1024, 3072, 2, 32)
_GPU = _Probed(4096, 14336, 4, PROMPT_ROWS)


class _MadeUpTensors:
    """A `TensorSource`: 8-bit blocks for hosts, 16-bit numbers for GPUs. Every matrix of a shape is the same one."""

    def __init__(self, spec: ModelSpec, *, is_gpu: bool) -> None:
        self._spec = spec
        self._is_gpu = is_gpu
        self._made: dict[tuple[int, int], Matrix] = {}

    def matrix(self, name: str, layer: int | None = None) -> Matrix:
        shape = self._shape(name.rsplit(".", 1)[-1])
        if shape not in self._made:
            self._made[shape] = self._make(*shape)
        return self._made[shape]

    def vector(self, name: str, layer: int | None = None) -> Float32:
        return np.ones(self._spec.hidden, dtype=np.float32)

    def _make(self, out: int, width: int) -> Matrix:
        random = np.random.default_rng(0)
        if self._is_gpu:
            # Bits of small bfloat16 numbers of both signs; to draw a hundred million of them would take seconds.
            some = random.choice(np.array([0x3C00, 0xBC00], dtype=np.uint16), (1, width))
            return DenseMatrix(np.repeat(some, out, axis=0))
        codes = random.integers(0, 256, (out, width // 32, 32), dtype=np.uint8)
        return BlockMatrix(8, 32, codes, np.full((out, width // 32), 1e-4, dtype=np.float32))

    def _shape(self, name: str) -> tuple[int, int]:
        spec = self._spec
        q, kv = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
        shapes = {
            "q": (q, spec.hidden),
            "k": (kv, spec.hidden),
            "v": (kv, spec.hidden),
            "out": (spec.hidden, q),
        }
        wide = {"gate": (spec.intermediate, spec.hidden), "up": (spec.intermediate, spec.hidden)}
        return {**shapes, **wide, "down": (spec.hidden, spec.intermediate)}[name]


def probe_backend(backend: str, device: str, threads: int) -> BackendSpeed:
    """Compute with few made-up layers and with more of them: what the difference takes is theirs, the rest the frame's.

    Raises what the backend raises.
    """
    on = (backend, device, threads)
    if device == "cpu":
        few, many = (_measure_made_up(shape, *on) for shape in (_TINY, _HOST))
        few_bytes, many_bytes = 0.0, _HOST.work_bytes(9 / 8)
        prompt_row_s, prompt_bytes = many.prompt_row_s, many_bytes
    else:
        # One graph each, of the same kernels; prompts without any, whose capture would take longer than all else.
        one = replace(_GPU, layers=1)
        few, many = (_measure_made_up(shape, *on, most_rows=1) for shape in (one, _GPU))
        few_bytes, many_bytes = one.work_bytes(2), _GPU.work_bytes(2)
        prompt_row_s, prompt_bytes = _measure_made_up(one, *on, use_graphs=False).prompt_row_s, few_bytes
    # Noise may make the difference too small, never a frame dearer than half of a step.
    seconds_per_byte = max(many.row_s - few.row_s, many.row_s / 2) / (many_bytes - few_bytes)
    overhead_s = min(max(0.0, few.row_s - seconds_per_byte * few_bytes), many.row_s / 2)
    prefill = seconds_per_byte if prompt_row_s is None else prompt_row_s / prompt_bytes
    return BackendSpeed(seconds_per_byte, prefill, overhead_s)


def _measure_made_up(
    shape: _Probed,
    backend: str,
    device: str,
    threads: int,
    *,
    most_rows: int | None = None,
    use_graphs: bool = True,
) -> StageSpeed:
    spec = shape.spec()
    stage = Stage(1, 1 + shape.layers, spec.layer_count)
    rows = shape.prompt_rows if most_rows is None else most_rows
    options = ExecutorOptions(
        kv_bytes=8 * PAGE_TOKENS * shape.layers * spec.kv_bytes_per_token_and_layer("float32"),
        max_rows=rows,
        context_length=2 * PAGE_TOKENS,
        threads=threads,
        device=device,
        use_graphs=use_graphs,
    )
    source = _MadeUpTensors(spec, is_gpu=device != "cpu")
    executor = build_executor(spec, stage, source, backend=backend, options=options)
    runtime = StageRuntime(executor, is_first=False, is_last=False)
    try:
        return measure_stage(runtime, stage, spec.hidden, rows, has_batch=False)
    finally:
        runtime.close()


def shape_of_card(card: Card) -> LayerShape:
    """By which a model's speed is known (see `control.sizes.shape_of`)."""
    work = layer_work(card.spec, [card.layer_bytes(layer) for layer in range(card.spec.layer_count)])
    return LayerShape(card.spec.hidden, sum(work) // len(work), card.form)


def measure_shard(
    runtime: StageRuntime, card: Card, stage: Stage, most_rows: int, overhead_s: float
) -> ShardSpeed:
    """Measure a loaded shard. What its head takes is told from its layers by what both read."""
    speed = measure_stage(runtime, stage, card.spec.hidden, most_rows)
    layer_bytes = shape_of_card(card).work_bytes
    share = layer_bytes / (layer_bytes * stage.count + (card.head_bytes if stage.is_last else 0))

    def layer_s(seconds: float) -> float:
        # A frame cannot cost all of what a step took.
        return max(seconds - min(overhead_s, seconds / 2), 1e-9) * share

    batch_s, prompt_row_s = speed.batch_s, speed.prompt_row_s
    return ShardSpeed(
        speed,
        layer_s(speed.row_s),
        None if batch_s is None else layer_s(batch_s),
        None if prompt_row_s is None else prompt_row_s / stage.count,
    )


def measure_stage(
    runtime: StageRuntime, stage: Stage, hidden: int, most_rows: int, *, has_batch: bool = True
) -> StageSpeed:
    """Seconds of whole steps, as decoding and prompts will need them, of `most_rows` rows at most. Whatever is tried is
    forgotten again."""
    logit_rows = 1 if stage.is_last else 0
    sessions = range(_FIRST_SESSION, _FIRST_SESSION + BATCH_ROWS)

    def rows(positions: Sequence[tuple[int, int, int]]) -> None:
        """(session, start, rows) each; a session is opened at its beginning."""
        work = [SessionRows(each, start, (1,) * count, logit_rows) for each, start, count in positions]
        openings = [Opening(each, Sampling(), 1) for each, start, _ in positions if start == 0]
        total = sum(count for _, _, count in positions)
        activations: Array | None = None
        if not stage.is_first:
            activations = np.full((total, hidden), 0.1, dtype=np.float32)
        runtime.step(work, openings, activations)

    try:
        row_s = _fastest(lambda turn: rows([(_FIRST_SESSION, turn, 1)]), _DECODE_TRIES, _DECODE_S)
        runtime.close_sessions([_FIRST_SESSION])
        batch_s = prompt_row_s = None
        if has_batch and runtime.kv_usage().free_tokens >= BATCH_ROWS * PAGE_TOKENS:
            batch_s = _fastest(
                lambda turn: rows([(each, turn, 1) for each in sessions]), _BATCH_TRIES, _BATCH_S
            )
            runtime.close_sessions(sessions)
        # No more rows than take a moment even where each of them takes as long as one alone.
        bearable = max(_LEAST_PROMPT_ROWS, int(_PROMPT_S / row_s))
        count = min(PROMPT_ROWS, most_rows, runtime.kv_usage().free_tokens, bearable)
        if count >= _LEAST_PROMPT_ROWS:
            prompt_s = _fastest(lambda turn: rows([(_FIRST_SESSION, 0, count)]), _PROMPT_TRIES, _PROMPT_S)
            prompt_row_s = prompt_s / count
    finally:
        runtime.close_sessions(sessions)
    return StageSpeed(row_s, batch_s, prompt_row_s)


def _fastest(step: Callable[[int], None], tries: int, limit_s: float) -> float:
    """The first try compiles, and reads weights from disk: it counts if there is no other."""
    times: list[float] = []
    for turn in range(tries):
        started = time.perf_counter()
        step(turn)
        times.append(time.perf_counter() - started)
        if sum(times[1:]) >= limit_s or (turn == 0 and times[0] >= 10 * limit_s):
            break
    return min(times)
