"""Backend trial: how fast ONNX Runtime and llama.cpp are on this CPU with a model's own layers, and which is chosen.

The last layers and the head are opened with both, all layers of a small model, and measured in turns. What was measured
is kept in `speeds.json` of the data folder and serves for a month, for every model of that shape and form; another
release of a library is tried anew, and so is what was measured while the machine was busy with something else.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from shardcompute.backends.cpu_choice import LLAMACPP, ONNX, CpuBackendChoice, CpuSpeed, choose_measured
from shardcompute.backends.devices import ComputeDevice
from shardcompute.backends.executor import ExecutorOptions
from shardcompute.backends.llamacpp.library import is_usable
from shardcompute.backends.processor import own_class
from shardcompute.control.sizes import layer_work
from shardcompute.control.state import LayerShape, LayerTime
from shardcompute.core.errors import ShardComputeError
from shardcompute.core.settings import Settings
from shardcompute.models.families import is_foreign
from shardcompute.models.spec import Stage
from shardcompute.node.worker.speed_book import DeviceKey, SpeedBook
from shardcompute.node.worker.speed_probe import PROMPT_ROWS, StageSpeed, measure_stage
from shardcompute.runtime.shard import open_shard
from shardcompute.runtime.stage import StageRuntime
from shardcompute.weights.checkpoint import Checkpoint
from shardcompute.weights.formats.tensor_file import find_entry
from shardcompute.weights.gguf_stage import CUTTABLE, header_of
from shardcompute.weights.loader import place_bytes

log = logging.getLogger(__name__)
BOOK = "speeds.json"
_LASTS_S = 30 * 86_400.0
_TRIED_BYTES = 48 << 20
"""Layers of about so much: fewer would stay in a processor's caches, and take less time than in a step of all."""
_ROUNDS = 2
_CONTEXT = 255
"""With room for one more, the shortest stream that llama.cpp makes."""
_TOKENS = 8 * 256

_LONGEST_ROUND_S = 8.0
_STEADY = 1.5
"""Rounds that differ by more than so many times were disturbed."""


@dataclass(frozen=True, slots=True)
class TriedSpeeds:
    """Of both backends, and whether the rounds agreed."""

    speeds: Mapping[str, CpuSpeed]
    is_steady: bool = True


Trial = Callable[[Checkpoint, int], TriedSpeeds]


def choose_cpu_backend(
    checkpoint: Checkpoint,
    form: str,
    *,
    settings: Settings,
    device: ComputeDevice,
    threads: int,
    trial: Trial | None = None,
    clock: Callable[[], float] = time.time,
) -> CpuBackendChoice:
    """What computes this model on this machine's CPU; tries both where that is not known. Never raises for a trial that
    fails: ONNX Runtime stays."""
    settled = _without_trial(checkpoint, form, settings)
    if settled is not None:
        return settled
    book, keys, shape = (
        SpeedBook(settings.data_dir / BOOK),
        _keys(device, threads),
        shape_of_checkpoint(checkpoint, form),
    )
    known = {backend: _known(book, key, shape, clock() - _LASTS_S) for backend, key in keys.items()}
    onnx, llamacpp = known[ONNX], known[LLAMACPP]
    if onnx is not None and llamacpp is not None:
        return choose_measured(onnx, llamacpp)
    if checkpoint.files.listing is not None:
        return CpuBackendChoice(ONNX, "llama.cpp was not tried: the weights stay at their source")
    try:
        tried = (trial or try_backends)(checkpoint, threads)
    except (ShardComputeError, OSError, MemoryError) as error:
        log.warning("the trial of llama.cpp with %s failed: %s", checkpoint.name, error)
        return CpuBackendChoice(ONNX, f"llama.cpp could not be tried: {error}")
    if tried.is_steady:
        for backend, speed in tried.speeds.items():
            book.note_model(keys[backend], _as_time(checkpoint.name, shape, speed, clock()))
    else:
        log.info("the trial of llama.cpp was disturbed, and is made again at the next start")
    return choose_measured(tried.speeds[ONNX], tried.speeds[LLAMACPP])


def remembered_choices(
    device: ComputeDevice, threads: int, folder: Path
) -> list[tuple[str, CpuBackendChoice]]:
    """What was measured before in this folder, by the model that it was measured with."""
    book, keys = SpeedBook(folder / BOOK), _keys(device, threads)
    found = []
    for tried in book.models(keys[LLAMACPP]):
        if tried.shape is None:
            continue
        onnx, llamacpp = (_known(book, keys[each], tried.shape, 0.0) for each in (ONNX, LLAMACPP))
        if onnx is not None and llamacpp is not None:
            found.append((tried.model, choose_measured(onnx, llamacpp)))
    return found


def try_backends(checkpoint: Checkpoint, threads: int) -> TriedSpeeds:
    """A step of the whole model by either backend, reckoned from its last layers and its head.

    From the last ones: llama.cpp computes others a little slower, and where one machine serves all there are none.
    """
    stage, times_layers = _tried_stage(checkpoint)
    with ExitStack() as stack:
        opened = [
            (backend, _open(checkpoint, backend, stage, threads, stack)) for backend in (ONNX, LLAMACPP)
        ]
        rounds: dict[str, list[StageSpeed]] = {ONNX: [], LLAMACPP: []}
        for _ in range(_ROUNDS):
            began_s = time.monotonic()
            for backend, runtime in opened:
                rounds[backend].append(measure_stage(runtime, stage, checkpoint.spec.hidden, PROMPT_ROWS))
            if time.monotonic() - began_s > _LONGEST_ROUND_S:
                break
    # A prompt's logits are made of one row: its time is that of the layers.
    share = 1.0 if stage.is_first else _layers_share(checkpoint, stage)
    times = share * times_layers + 1 - share
    speeds = {backend: _fastest(each, times, times_layers) for backend, each in rounds.items()}
    return TriedSpeeds(speeds, all(_agree([each.row_s for each in tried]) for tried in rounds.values()))


def _tried_stage(checkpoint: Checkpoint) -> tuple[Stage, float]:
    """The layers that are tried, and how many times as many the model has."""
    sizes, total = _layer_bytes(checkpoint), checkpoint.spec.layer_count
    count = min(total, max(1, _TRIED_BYTES * total // max(1, sum(sizes))))
    return Stage(total - count, total, total), total / count


def _layers_share(checkpoint: Checkpoint, stage: Stage) -> float:
    """Which part of a row's time is that of the layers, by what they and the head read."""
    layers = sum(_layer_bytes(checkpoint)[stage.start :])
    head = place_bytes(checkpoint.tensors, checkpoint.layout.model["head"])
    return layers / max(1, layers + head)


def shape_of_checkpoint(checkpoint: Checkpoint, form: str) -> LayerShape:
    work = layer_work(checkpoint.spec, _layer_bytes(checkpoint))
    return LayerShape(checkpoint.spec.hidden, sum(work) // len(work), f"{form} {_usual_type(checkpoint)}")


def _usual_type(checkpoint: Checkpoint) -> str:
    """In which most of a layer is stored: kernels differ by that more than by size."""
    sizes: Counter[str] = Counter()
    for layer in checkpoint.layout.layers:
        for place in layer.values():
            entry = find_entry(checkpoint.tensors, place.stored)
            sizes[entry.dtype] += entry.size_bytes
    return sizes.most_common(1)[0][0]


def _without_trial(checkpoint: Checkpoint, form: str, settings: Settings) -> CpuBackendChoice | None:
    """Where there is nothing to measure."""
    if settings.cpu_backend == ONNX:
        return CpuBackendChoice(ONNX, "SHARDCOMPUTE_CPU_BACKEND asks for it")
    header = header_of(checkpoint.tensors)
    if header is None or form != "native":
        return CpuBackendChoice(ONNX, "llama.cpp runs GGUF files in their own blocks alone")
    if not is_usable():
        return CpuBackendChoice(ONNX, "llama.cpp is not installed")
    if is_foreign(checkpoint.spec):
        return CpuBackendChoice(LLAMACPP, "nothing else here can run this architecture")
    if header.architecture not in CUTTABLE:
        return CpuBackendChoice(
            ONNX, f"llama.cpp cannot cut models of the architecture {header.architecture}"
        )
    if settings.cpu_backend == LLAMACPP:
        return CpuBackendChoice(LLAMACPP, "SHARDCOMPUTE_CPU_BACKEND asks for it")
    return None


def _open(checkpoint: Checkpoint, backend: str, stage: Stage, threads: int, stack: ExitStack) -> StageRuntime:
    token_bytes = checkpoint.spec.kv_bytes_per_token_and_layer("float32") * stage.count
    options = ExecutorOptions(
        kv_bytes=_TOKENS * token_bytes,
        max_rows=PROMPT_ROWS,
        max_logit_rows=64,
        context_length=_CONTEXT,
        threads=threads,
    )
    executor = open_shard(checkpoint, stage=stage, backend=backend, options=options)
    runtime = StageRuntime(executor, is_first=stage.is_first, is_last=stage.is_last)
    stack.callback(runtime.close)
    return runtime


def _agree(seconds: list[float]) -> bool:
    return len(seconds) == _ROUNDS and max(seconds) <= _STEADY * min(seconds)


def _fastest(rounds: list[StageSpeed], times: float, times_layers: float) -> CpuSpeed:
    """The fastest of all rounds, of so many times a row and a prompt: what else the machine does only ever makes one
    slower."""

    def least(values: list[float | None]) -> float:
        known = [value for value in values if value is not None]
        if not known:
            raise ShardComputeError("there was no room to try several sessions and a prompt")
        return min(known)

    return CpuSpeed(
        times * least([each.row_s for each in rounds]),
        times * least([each.batch_s for each in rounds]),
        times_layers * least([each.prompt_row_s for each in rounds]),
    )


def _layer_bytes(checkpoint: Checkpoint) -> list[int]:
    return [
        sum(place_bytes(checkpoint.tensors, place) for place in layer.values())
        for layer in checkpoint.layout.layers
    ]


def _keys(device: ComputeDevice, threads: int) -> dict[str, DeviceKey]:
    """By class, so that another release or processor is measured anew."""
    return {
        backend: DeviceKey(device.label, own_class(device, backend=backend).name, "cpu", threads)
        for backend in (ONNX, LLAMACPP)
    }


def _known(book: SpeedBook, key: DeviceKey, shape: LayerShape, since_s: float) -> CpuSpeed | None:
    for each in reversed(book.models(key)):
        is_like = each.shape is not None and each.shape.is_like(shape)
        if is_like and each.measured_at_s >= since_s and each.batch_s and each.prefill_s:
            return CpuSpeed(each.seconds, each.batch_s, each.prefill_s)
    return None


def _as_time(model: str, shape: LayerShape, speed: CpuSpeed, now_s: float) -> LayerTime:
    return LayerTime(
        model,
        speed.row_s,
        shape=shape,
        batch_s=speed.batch_s,
        prefill_s=speed.prompt_row_s,
        measured_at_s=now_s,
    )
