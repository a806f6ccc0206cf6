"""`shardcompute bench tensor`: one stream on one rank, on several that share every layer, and on stages."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer

from shardcompute.cli.bench.bench_run import BenchProgress, JsonFile, Model, WeightsName, finish, model_path


def tensor(
    model: Model = "",
    weights: WeightsName = "native",
    shape: Annotated[
        str, typer.Option(help="Measure random weights of a shape, such as 1.1b, instead of a model.")
    ] = "",
    types: Annotated[str, typer.Option(help="Number type of random weights, such as Q8_0.")] = "Q4_0",
    ranks: Annotated[str, typer.Option(help="Numbers of ranks, separated by commas.")] = "2,3",
    exchanges: Annotated[str, typer.Option(help="reduce, gather, separated by commas.")] = "reduce,gather",
    grid: Annotated[
        str, typer.Option(help="Block grids of ranks such as 2x2, separated by commas; they reduce.")
    ] = "",
    stages: Annotated[
        str, typer.Option(help="Numbers of stages to compare with, separated by commas; empty for none.")
    ] = "2,3",
    rtt_ms: Annotated[
        str, typer.Option(help="Round trips of emulated LANs in milliseconds, separated by commas.")
    ] = "",
    loopback: Annotated[
        bool,
        typer.Option(help="Measure by the clock between processes, on a machine that does nothing else."),
    ] = True,
    prompt: Annotated[int, typer.Option(min=2, help="Tokens of the prompt.")] = 32,
    steps: Annotated[int, typer.Option(min=1, help="Tokens in a turn.")] = 32,
    rounds: Annotated[int, typer.Option(min=1, help="How often every arm takes its turn.")] = 5,
    plot: Annotated[
        Path | None, typer.Option("--plot", help="Draw speed by round trip into this folder.")
    ] = None,
    json_file: JsonFile = None,
) -> None:
    """Speed of one stream with one thread, against ranks and against stages with a thread each on this machine."""
    from shardcompute.bench.engine.random_gguf import named_shape, write_random_gguf
    from shardcompute.bench.tables import render_results
    from shardcompute.bench.tensor.plots import plot_crossover
    from shardcompute.bench.tensor.run import TensorBench, parse_exchanges, parse_grids, run_tensor_bench
    from shardcompute.bench.wan.plots import check_plotting

    if plot is not None:
        check_plotting()
    with TemporaryDirectory(prefix="sc-") as folder, BenchProgress() as say:
        path = model_path(model) if not shape else ""
        if shape:
            say(f"writing random weights of {shape}")
            path = str(write_random_gguf(Path(folder) / f"{shape}.gguf", named_shape(shape), types))
        bench = TensorBench(
            path,
            weights,
            ranks=[int(part) for part in ranks.split(",")],
            exchanges=parse_exchanges(exchanges),
            grids=parse_grids(grid),
            stages=[int(part) for part in stages.split(",") if part],
            has_loopback=loopback,
            prompt=prompt,
            rtt_ms=[float(part) for part in rtt_ms.split(",") if part],
            steps=steps,
            rounds=rounds,
        )
        results = run_tensor_bench(bench, say)
    if plot is not None:
        say(f"drawn: {plot_crossover(results, plot)}")
    finish(results, render_results(results, "arm", tables=["line"]), json_file)
