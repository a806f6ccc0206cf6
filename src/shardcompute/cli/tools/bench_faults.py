"""`shardcompute bench faults`: one model, machines far apart, and what may befall them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from shardcompute.cli.tools.bench_run import (
    BenchProgress,
    EmulatorName,
    JsonFile,
    Mbit,
    ModelOption,
    WeightsName,
    finish,
    model_path,
)
from shardcompute.sim import Emulator

if TYPE_CHECKING:
    from shardcompute.bench.wan.faults import FaultRow

DIFFERENT = 1


def faults(
    names: Annotated[
        str, typer.Option("--faults", help="Faults, separated by commas; by default all (see --list).")
    ] = "",
    is_list: Annotated[bool, typer.Option("--list", help="Say which faults there are, and stop.")] = False,
    model: ModelOption = "",
    weights: WeightsName = "native",
    stages: Annotated[int, typer.Option(min=2, max=16, help="Stages, each on a machine of its own.")] = 3,
    spares: Annotated[int, typer.Option(min=0, max=8, help="Machines more than the stages need.")] = 0,
    streams: Annotated[int, typer.Option(min=1, max=16, help="Answers at once.")] = 1,
    rounds: Annotated[int, typer.Option(min=1, help="How often each fault happens.")] = 3,
    tokens: Annotated[int, typer.Option(min=16, help="Tokens of an answer.")] = 64,
    ring_ms: Annotated[float, typer.Option(min=0.0, help="Time once round the ring in ms.")] = 80.0,
    mbit: Mbit = 100.0,
    drafter: Annotated[str, typer.Option(help="What drafts: auto, ngram or off.")] = "auto",
    emulator: EmulatorName = Emulator.AUTO,
    json_file: JsonFile = None,
) -> None:
    """Machines far apart, while packets are lost, lines collapse and machines vanish for a moment.

    Exit code 1 if any answer differs from the undisturbed one.
    """
    from shardcompute.bench.tables import render_results
    from shardcompute.bench.wan.cluster import WanServing
    from shardcompute.bench.wan.faults import FAULTS, FaultBench, run_fault_bench
    from shardcompute.bench.wan.faults_report import differing, raw_results, summarise
    from shardcompute.weights.sources.reference import EMBEDDED_NAMES

    if is_list:
        for name, fault in FAULTS.items():
            typer.echo(f"{name:16} {fault.words}")
        return
    bench = FaultBench(
        WanServing(model or EMBEDDED_NAMES[0], weights, kv_tokens=8192, context=2048, stages=stages),
        names.split(",") if names else tuple(FAULTS),
        stages=stages,
        spares=spares,
        streams=streams,
        rounds=rounds,
        tokens=tokens,
        ring_ms=ring_ms,
        mbit=mbit,
        drafter=drafter,
        emulator=emulator,
    )
    model_path(model)  # so that nobody has to fetch it over the emulated network
    with BenchProgress() as say:
        rows = run_fault_bench(bench, say)
    summary = summarise(rows)
    finish([*summary, *raw_results(rows)], render_results(summary, "fault"), json_file)
    if wrong := differing(rows):
        _complain(wrong, len(rows))
        raise typer.Exit(DIFFERENT)


def _complain(wrong: list[FaultRow], answers: int) -> None:
    said = Console(stderr=True)
    said.print(f"{len(wrong)} of {answers} answers DIFFER from the undisturbed ones:", style="red")
    for row in wrong:
        said.print(f"  {row.fault}, round {row.round}, stream {row.stream}", highlight=False, markup=False)
        said.print(f"    got      {row.text!r}", highlight=False, markup=False)
        said.print(f"    expected {row.expected!r}", highlight=False, markup=False)
