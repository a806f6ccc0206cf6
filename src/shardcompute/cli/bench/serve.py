"""`shardcompute bench serve`: what clients get over HTTP, next to what the engine does by itself."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shardcompute.cli.bench.bench_run import (
    BenchProgress,
    JsonFile,
    ModelOption,
    WeightsName,
    finish,
    model_path,
)

if TYPE_CHECKING:
    from shardcompute.bench.report import Result


def serve(
    model: ModelOption = "",
    shape: Annotated[
        str, typer.Option(help="Instead of a model, random weights of this shape: 8b, 3b, 1b, 100m or tiny.")
    ] = "",
    folder: Annotated[
        Path | None, typer.Option(help="Where such a checkpoint is made, and kept.", file_okay=False)
    ] = None,
    weights: WeightsName = "native",
    backend: Annotated[str, typer.Option(help="As of `up`.")] = "auto",
    device: Annotated[str, typer.Option(help="As of `up`.")] = "auto",
    threads: Annotated[
        int | None, typer.Option(min=1, help="Threads of the worker, and of the engine.")
    ] = None,
    streams: Annotated[str, typer.Option(help="Streams at once, separated by commas.")] = "1,8,32,64",
    prompts: Annotated[
        str, typer.Option(help="Tokens of the prompts, separated by commas; 2000:8 for 8 streams at most.")
    ] = "64,2000",
    drafts: Annotated[str, typer.Option(help="Drafters, which take turns.")] = "auto,off",
    tokens: Annotated[int, typer.Option(min=2, help="Tokens of each answer.")] = 128,
    long_prompt: Annotated[
        int, typer.Option(min=0, help="One prompt of so many tokens is measured by itself; 0: none.")
    ] = 3000,
    rounds: Annotated[int, typer.Option(min=1, help="How often every load takes its turn.")] = 3,
    seconds: Annotated[
        float, typer.Option(help="Begin no further round after so many seconds; 0: all.")
    ] = 0.0,
    engine: Annotated[bool, typer.Option(help="Measure the engine alone beside.")] = True,
    json_file: JsonFile = None,
) -> None:
    """Speed over HTTP at several loads: a real server, clients in processes of their own, and the engine alone."""
    from shardcompute.backends.device_choice import choose_device
    from shardcompute.bench.report import listed, write_json
    from shardcompute.bench.serve.run import ServeBench, run_serve_bench
    from shardcompute.bench.serve.shapes import make_checkpoint
    from shardcompute.bench.tables import render_results

    with tempfile.TemporaryDirectory(prefix="shardcompute-shape-") as temporary, BenchProgress() as say:
        if shape:
            say(f"making a checkpoint of shape {shape}")
            path = str(make_checkpoint(shape, folder or Path(temporary)))
        else:
            path = model_path(model)
        [chosen] = choose_device(device, backend).devices
        bench = ServeBench(
            path,
            weights,
            chosen.backend,
            chosen.name,
            [int(part) for part in streams.split(",")],
            [int(part.partition(":")[0]) for part in prompts.split(",")],
            {int(part.split(":")[0]): int(part.split(":")[1]) for part in prompts.split(",") if ":" in part},
            drafts.split(","),
            tokens,
            rounds,
            long_prompt,
            seconds=seconds,
            engine=engine,
            threads=threads,
        )

        def keep(results: Sequence[Result]) -> None:
            if json_file is not None:
                write_json(json_file, {"results": listed(results)})

        results = run_serve_bench(bench, say, keep)
    finish(
        results,
        render_results(results, "streams", labels=("process", "phase", "drafts"), tables=("prompt",)),
        json_file,
    )
