"""Options of the engine: weights, backend, device, threads and memory.

Names of backends and weight forms are repeated here because the rooms that own them take long to import; a
test holds them together.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from shardcompute.cli.format import parse_size
from shardcompute.core.errors import UsageError

if TYPE_CHECKING:
    from shardcompute.node.local.service import EngineOptions

_ENGINE = "Engine"
_DEVICE = re.compile(r"cpu|mps|mlx|cuda(:\d{1,3})?")


class WeightForm(StrEnum):
    NATIVE = "native"
    FLOAT32 = "float32"
    INT8 = "int8"
    INT4 = "int4"
    MIXED = "mixed"


class Backend(StrEnum):
    ONNX = "onnx"
    TORCH = "torch"
    MLX = "mlx"
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
        help="What computes; torch and mlx are extras, numpy is slow.",
        rich_help_panel=_ENGINE,
    ),
]
Device = Annotated[
    str,
    typer.Option(
        "--device",
        metavar="NAME",
        help="cpu; cuda, cuda:1 or mps (torch); mlx (its GPU).",
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
    """UsageError unless the backend can compute on this device."""
    if not _DEVICE.fullmatch(device):
        raise UsageError(f"{device!r} is not a device", hint="use cpu, cuda, cuda:1, mps or mlx")
    if (device == "mlx") != (backend is Backend.MLX) and device != "cpu":
        raise UsageError(
            f"the {backend} backend cannot compute on {device}",
            hint="name --backend mlx and --device mlx together",
        )
    if device not in ("cpu", "mlx") and backend is not Backend.TORCH:
        raise UsageError(
            f"the {backend} backend computes on the cpu, not on {device}", hint="add --backend torch"
        )


@dataclass(frozen=True, slots=True)
class EngineArguments:
    """How this process or its workers compute."""

    weights: Weights = WeightForm.NATIVE
    backend: BackendName = Backend.ONNX
    device: Device = "cpu"
    threads: Threads = None
    context: Context = None
    kv_memory: KvMemory = None

    def engine_options(self, stages: int) -> EngineOptions:
        """The engine that the options ask for; UsageError for what contradicts itself."""
        from shardcompute.node.local.service import EngineOptions

        check_device(self.device, self.backend)
        return EngineOptions(
            backend=self.backend.value,
            form=self.weights.value,
            device=self.device,
            threads=self.threads,
            context_length=self.context,
            kv_bytes=self.kv_memory,
            stages=stages,
        )
