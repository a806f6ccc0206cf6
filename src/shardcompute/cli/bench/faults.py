"""`shardcompute bench faults` and `bench drift`: one model, machines far apart, and what may befall them: what is over
soon, and what stays."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from shardcompute.cli.bench.bench_run import (
    BenchProgress,
    EmulatorName,
    JsonFile,
    Mbit,
    ModelOption,
    WeightsName,
    finish,
    model_path,
    write_results,
)
from shardcompute.sim import Emulator

if TYPE_CHECKING:
    from shardcompute.bench.wan.faults import FaultRow

DIFFERENT = 1
FELL_SHORT = 1
_MOST_S = 30.0
"""So soon a chain is to be planned anew, and so much of the best layout's throughput it is to have then."""
_LEAST_PART = 0.9


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


def drift(
    faults: Annotated[str, typer.Option(help="What becomes slow, separated by commas: stage, line.")] = (
        "stage,line"
    ),
    model: ModelOption = "",
    weights: WeightsName = "native",
    stages: Annotated[int, typer.Option(min=1, max=8, help="Stages, each on a machine of its own.")] = 2,
    spares: Annotated[int, typer.Option(min=1, max=8, help="Machines more than the stages need.")] = 1,
    streams: Annotated[int, typer.Option(min=1, max=16, help="Answers at once.")] = 8,
    tokens: Annotated[int, typer.Option(min=16, max=1024, help="Tokens of an answer.")] = 256,
    minutes: Annotated[
        float, typer.Option(min=0.0, max=240.0, help="How long there is noise alone, before each fault.")
    ] = 1.1,
    noise: Annotated[float, typer.Option(min=0.0, max=1.0, help="Noise of machines and lines.")] = 0.2,
    ring_ms: Annotated[float, typer.Option(min=0.0, help="Time once round the ring in ms.")] = 10.0,
    mbit: Annotated[float, typer.Option(min=0.1, help="Mbit/s of every machine's line, up and down.")] = 20.0,
    seed: Annotated[int, typer.Option(min=0, help="By which noise is drawn.")] = 1,
    emulator: EmulatorName = Emulator.AUTO,
    json_file: JsonFile = None,
) -> None:
    """A stage slowed to a third, or its line to a tenth, amid answers: how soon the chain goes around it.

    Exit code 1 if noise moved anything, a text differs, or it was planned anew too late or not well enough.
    """
    from shardcompute.bench.drift.report import results_of, shortcomings
    from shardcompute.bench.drift.run import DriftBench, run_drift_bench
    from shardcompute.bench.report import listed
    from shardcompute.bench.tables import render_results
    from shardcompute.bench.wan.cluster import WanServing
    from shardcompute.weights.sources.reference import EMBEDDED_NAMES

    serving = WanServing(
        model or EMBEDDED_NAMES[0],
        weights,
        kv_tokens=8192,
        context=2048,
        stages=stages,
        options=("--prefer", "balanced"),
    )
    bench = DriftBench(
        serving,
        [part.strip() for part in faults.split(",") if part.strip()],
        stages=stages,
        spares=spares,
        streams=streams,
        tokens=tokens,
        steady_s=60 * minutes,
        noise=noise,
        ring_ms=ring_ms,
        mbit=mbit,
        seed=seed,
        emulator=emulator,
    )
    model_path(model)  # so that nobody has to fetch it over the emulated network
    with BenchProgress() as say:
        outcomes = run_drift_bench(bench, say)
    results = results_of(outcomes)
    typer.echo(render_results(results, "fault"))
    for outcome in outcomes:
        for sentence in outcome.sentences:
            typer.echo(f"{outcome.fault}: {sentence}")
    short = shortcomings(outcomes, _MOST_S, _LEAST_PART)
    content = {
        "results": listed(results),
        "outcomes": [asdict(each) for each in outcomes],
        "shortcomings": short,
    }
    write_results(json_file, content)
    for sentence in short:
        Console(stderr=True).print(sentence, style="red", highlight=False, markup=False)
    if short:
        raise typer.Exit(FELL_SHORT)
