"""Options that several commands share, and what they add up to.

Names of backends and weight forms are repeated here because the rooms that own them take long to import; a
test holds them together.
"""

from __future__ import annotations

import re
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from shardcompute.cli.options.cluster import Drafting
from shardcompute.cli.sizes import parse_size
from shardcompute.core.errors import UsageError
from shardcompute.core.generation import Speculation

if TYPE_CHECKING:
    from shardcompute.node.local.service import EngineOptions

_SAMPLING = "Sampling"
_ENGINE = "Engine"
_DEVICE = re.compile(r"cpu|mps|cuda(:\d{1,3})?")


class WeightForm(StrEnum):
    NATIVE = "native"
    FLOAT32 = "float32"
    INT8 = "int8"
    INT4 = "int4"
    MIXED = "mixed"


class Backend(StrEnum):
    ONNX = "onnx"
    TORCH = "torch"
    NUMPY = "numpy"
    TRANSFORMERS = "transformers"


MaxTokens = Annotated[int, typer.Option("--max-tokens", metavar="N", min=1, help="Longest answer.")]
Temperature = Annotated[
    float,
    typer.Option(
        "--temperature",
        min=0,
        max=2,
        metavar="X",
        help="0 takes the most likely token, 1 draws as the model was trained.",
        rich_help_panel=_SAMPLING,
    ),
]
TopP = Annotated[
    float,
    typer.Option(
        "--top-p",
        min=0,
        max=1,
        metavar="X",
        help="Draw from the likeliest tokens that make up this much.",
        rich_help_panel=_SAMPLING,
    ),
]
TopK = Annotated[
    int,
    typer.Option(
        "--top-k",
        min=0,
        metavar="N",
        help="Draw from the N likeliest tokens; 0: from all.",
        rich_help_panel=_SAMPLING,
    ),
]
MinP = Annotated[
    float,
    typer.Option(
        "--min-p",
        min=0,
        max=1,
        metavar="X",
        help="Leave out tokens less likely than this share of the likeliest.",
        rich_help_panel=_SAMPLING,
    ),
]
RepeatPenalty = Annotated[
    float,
    typer.Option(
        "--repeat-penalty",
        min=0.01,
        max=10,
        metavar="X",
        help="Above 1, repetition becomes less likely.",
        rich_help_panel=_SAMPLING,
    ),
]
Seed = Annotated[
    int | None,
    typer.Option("--seed", metavar="N", help="Makes a drawn answer repeatable.", rich_help_panel=_SAMPLING),
]
Stop = Annotated[
    list[str] | None,
    typer.Option(
        "--stop", metavar="TEXT", help="End the answer where this text would come; may be repeated."
    ),
]
System = Annotated[
    str | None, typer.Option("--system", metavar="TEXT", help="System message for the conversation.")
]
Raw = Annotated[
    bool, typer.Option("--raw", help="Continue the prompt as it stands, without the chat template.")
]
Speculate = Annotated[
    Drafting | None,
    typer.Option(
        "--speculate",
        metavar="|".join(Drafting),
        help="What may draft tokens ahead, by default as the server was told. It never changes an answer.",
        rich_help_panel=_SAMPLING,
    ),
]
Verbose = Annotated[
    bool,
    typer.Option("--verbose", "-v", help="Print timings, traversals, drafted and cached tokens to stderr."),
]
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
        help="What computes; torch is an extra, numpy is slow.",
        rich_help_panel=_ENGINE,
    ),
]
Device = Annotated[
    str,
    typer.Option(
        "--device", metavar="NAME", help="cpu; with torch also cuda, cuda:1 or mps.", rich_help_panel=_ENGINE
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
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Watch = Annotated[bool, typer.Option("--watch", "-w", help="Go on showing it until Ctrl-C.")]


def wish_for(drafting: Drafting | None) -> Speculation | None:
    return None if drafting is None else Speculation(drafting.value)


def check_device(device: str, backend: Backend) -> None:
    """UsageError unless the backend can compute on this device."""
    if not _DEVICE.fullmatch(device):
        raise UsageError(f"{device!r} is not a device", hint="use cpu, cuda, cuda:1 or mps")
    if device != "cpu" and backend is not Backend.TORCH:
        raise UsageError(
            f"the {backend} backend computes on the cpu, not on {device}", hint="add --backend torch"
        )


def engine_options(
    *,
    weights: WeightForm,
    backend: Backend,
    device: str,
    threads: int | None,
    context: int | None,
    kv_memory: int | None,
    stages: int,
) -> EngineOptions:
    """The engine that the options ask for; UsageError for what contradicts itself."""
    from shardcompute.node.local.service import EngineOptions

    check_device(device, backend)
    return EngineOptions(
        backend=backend.value,
        form=weights.value,
        device=device,
        threads=threads,
        context_length=context,
        kv_bytes=kv_memory,
        stages=stages,
    )
