"""Options of the engine: weights, backend, device, threads and memory.

Names of backends and weight forms are repeated here because the rooms that own them take long to import; a
test holds them together.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from shardcompute.cli.format import parse_size
from shardcompute.cli.options.adapters import AdapterArguments
from shardcompute.core.settings import load_settings

if TYPE_CHECKING:
    from shardcompute.backends.cpu_choice import CpuBackendChoice
    from shardcompute.backends.devices import ComputeDevice
    from shardcompute.node.local.service import EngineOptions
    from shardcompute.weights.checkpoint import Checkpoint

_ENGINE = "Engine"
_NO_ADAPTERS = AdapterArguments()


class WeightForm(StrEnum):
    NATIVE = "native"
    FLOAT32 = "float32"
    INT8 = "int8"
    INT4 = "int4"
    MIXED = "mixed"


class KvTypeName(StrEnum):
    FLOAT32 = "float32"
    FLOAT16 = "float16"
    INT8 = "int8"


class Backend(StrEnum):
    AUTO = "auto"
    ONNX = "onnx"
    TORCH = "torch"
    MLX = "mlx"
    LLAMACPP = "llamacpp"
    NUMPY = "numpy"
    TRANSFORMERS = "transformers"


Weights = Annotated[
    WeightForm,
    typer.Option(
        "--weights",
        metavar="|".join(WeightForm),
        help="Form of the weights in memory; native: as in the file.",
        rich_help_panel=_ENGINE,
    ),
]
BackendName = Annotated[
    Backend,
    typer.Option(
        "--backend",
        metavar="|".join(Backend),
        help="What computes, by default what suits the device; torch, mlx and llamacpp are extras, numpy is slow.",
        rich_help_panel=_ENGINE,
    ),
]
Device = Annotated[
    str,
    typer.Option(
        "--device",
        metavar="NAMES",
        help="Where to compute, by default on the GPUs that are found, else on the CPU: cpu, cuda, cuda:1, mps, mlx, "
        "or several of them with commas between (all: every one), each with a worker of its own.",
        rich_help_panel=_ENGINE,
    ),
]
Threads = Annotated[
    int | None,
    typer.Option(
        "--threads",
        metavar="N",
        min=1,
        max=4096,
        help="CPU threads; by default one per core.",
        rich_help_panel=_ENGINE,
    ),
]
Context = Annotated[
    int | None,
    typer.Option(
        "--context",
        metavar="TOKENS",
        min=2,
        help="Longest prompt and answer together; by default 8192 or what the model can.",
        rich_help_panel=_ENGINE,
    ),
]
KvMemory = Annotated[
    int | None,
    typer.Option(
        "--kv-memory",
        metavar="SIZE",
        parser=parse_size,
        help="Memory for keys and values, such as 512M or 2G; by default a quarter of what is free.",
        rich_help_panel=_ENGINE,
    ),
]
KvTypeOption = Annotated[
    KvTypeName,
    typer.Option(
        "--kv-type",
        metavar="|".join(KvTypeName),
        help="What CPUs round keys and values to, the same on every machine of a chain; GPUs keep them in what they "
        "compute in.",
        rich_help_panel=_ENGINE,
    ),
]
ModelKvType = Annotated[
    KvTypeName | None,
    typer.Option(
        "--kv-type",
        metavar="|".join(KvTypeName),
        help="What CPUs round this model's keys and values to; by default as it is served, else what the cluster was "
        "started with.",
        rich_help_panel=_ENGINE,
    ),
]
Stages = Annotated[
    int,
    typer.Option(
        "--stages",
        metavar="N",
        min=1,
        help="Cut the model into this many stages inside this process.",
        rich_help_panel=_ENGINE,
    ),
]


def check_device(device: str, backend: Backend) -> None:
    """UsageError for a device that no machine has, or on which the backend does not compute."""
    from shardcompute.backends.device_choice import check_choice

    check_choice(device, backend.value)


@dataclass(frozen=True, slots=True)
class EngineArguments:
    """How this process or its workers compute."""

    weights: Weights = WeightForm.NATIVE
    backend: BackendName = Backend.AUTO
    device: Device = "auto"
    threads: Threads = None
    context: Context = None
    kv_memory: KvMemory = None
    kv_type: KvTypeOption = KvTypeName.FLOAT32

    def backend_choice(
        self, device: ComputeDevice, say: Callable[[str], None]
    ) -> Callable[[Checkpoint, str, int], CpuBackendChoice] | None:
        """What decides, model by model, what computes on a CPU; None where that is settled. `say` hears the reason."""
        if not device.alternatives:
            return None
        from shardcompute.node.worker.backend_trial import choose_cpu_backend

        def choose(checkpoint: Checkpoint, form: str, threads: int) -> CpuBackendChoice:
            settings = load_settings()
            choice = choose_cpu_backend(checkpoint, form, settings=settings, device=device, threads=threads)
            say(f"{checkpoint.name} is computed by {choice.backend} on CPUs: {choice.reason}")
            return choice

        return choose

    def engine_options(
        self, stages: int, say: Callable[[str], None], adapters: AdapterArguments = _NO_ADAPTERS
    ) -> EngineOptions:
        """The engine that the options ask for, on the device that was chosen or found; `say` hears of GPUs."""
        from shardcompute.backends.device_choice import choose_device
        from shardcompute.backends.devices import describe_device
        from shardcompute.node.local.service import EngineOptions

        chosen = choose_device(self.device, self.backend.value)
        [device] = chosen.devices
        for each in (*chosen.devices, *chosen.unused):
            if each.is_gpu:
                say(describe_device(each))
        return EngineOptions(
            backend=device.backend,
            form=self.weights.value,
            device=device.name,
            free_bytes=None if device.is_host_memory else device.free_bytes,
            threads=self.threads,
            context_length=self.context,
            kv_bytes=self.kv_memory,
            kv_type=self.kv_type.value,
            stages=stages,
            adapters=adapters.folders,
            merged_adapter=adapters.merge_adapter,
            choose_backend=self.backend_choice(device, say),
        )
