"""`shardcompute bench wan`: one model, machines far apart."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
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
    read_numbers,
    write_results,
)
from shardcompute.sim import Emulator

if TYPE_CHECKING:
    from shardcompute.bench.wan.cluster import WanServing
    from shardcompute.bench.wan.run import Mismatch, WanOutcome

MISMATCHED = 1
_SHOWN_MISMATCHES = 10


def wan(
    data: Annotated[Path, typer.Option(help="Spec-Bench's questions as JSON lines.")],
    model: ModelOption = "",
    weights: WeightsName = "native",
    ring_ms: Annotated[
        str, typer.Option(help="Times once round the ring in ms, separated by commas.")
    ] = "20,80,200",
    mbit: Mbit = 100.0,
    per_category: Annotated[int, typer.Option(min=0, help="Prompts of each category; 0: all.")] = 8,
    seed: Annotated[int, typer.Option(min=0, help="By which prompts are drawn, and answers sampled.")] = 1,
    tokens: Annotated[str, typer.Option(help="Most tokens of an answer, separated by commas.")] = "128,256",
    temperatures: Annotated[str, typer.Option(help="Temperatures, separated by commas.")] = "0,0.8",
    quick: Annotated[
        bool, typer.Option("--quick", help="One prompt of each category, 64 tokens, temperature 0: a glance.")
    ] = False,
    streams: Annotated[str, typer.Option(help="Streams at once, separated by commas.")] = "1,4,8,16",
    arms: Annotated[
        str, typer.Option(help="Arms: plain, ngram, head, model, auto; several streams: plain, auto.")
    ] = "plain,ngram,head,auto",
    workers: Annotated[int, typer.Option(min=2, max=16, help="Stages, each on a machine of its own.")] = 3,
    draft_model: Annotated[
        str, typer.Option("--draft-model", help="A model of the same vocabulary for the arm called model.")
    ] = "",
    max_memory: Annotated[
        str, typer.Option(help="Memory of each worker, such as 150M; by default what its share needs.")
    ] = "",
    emulator: EmulatorName = Emulator.AUTO,
    thin: Annotated[
        bool, typer.Option("--thin", help="Instead: a 2,000-token prompt over 10 Mbit/s uplinks, by --wire.")
    ] = False,
    rounds: Annotated[int, typer.Option(min=1, help="With --thin: how often both arms take their turn.")] = 3,
    plot: Annotated[Path | None, typer.Option("--plot", help="Draw pictures into this folder.")] = None,
    json_file: JsonFile = None,
) -> None:
    """Machines far apart: plain decoding against drafts, on an emulated network.

    Exit code 1 if any arm answers a prompt differently from the others.
    """
    from shardcompute.bench.wan.plots import check_plotting

    if plot is not None:
        check_plotting()
    serving = _serving(model, weights, max_memory)
    if thin:
        _run_thin(serving, data, rounds, workers, emulator, json_file)
        return
    from shardcompute.bench.wan.run import WanBench, run_wan_bench

    if quick:
        per_category, tokens, temperatures = 1, "64", "0"
    bench = WanBench(
        serving,
        data,
        ring_ms=[float(part) for part in read_numbers(ring_ms, "--ring-ms")],
        mbit=mbit,
        per_category=per_category,
        seed=seed,
        tokens=[int(part) for part in read_numbers(tokens, "--tokens", is_whole=True)],
        temperatures=[float(part) for part in read_numbers(temperatures, "--temperatures")],
        streams=[int(part) for part in read_numbers(streams, "--streams", is_whole=True)],
        arms=arms.split(","),
        workers=workers,
        draft_model=draft_model,
        emulator=emulator,
    )
    with BenchProgress() as say:
        outcome = run_wan_bench(bench, say)
    settings = {
        "model": model,
        "weights": weights,
        "mbit": mbit,
        "tokens": bench.tokens,
        "temperatures": bench.temperatures,
        "per_category": per_category,
        "seed": seed,
        "is_quick": quick,
        "workers": workers,
        "draft_model": draft_model,
    }
    _show(outcome)
    if quick:
        typer.echo("\nA glance: one prompt of each category. Nothing to publish.")
    _keep(outcome, settings, plot, json_file)
    if outcome.mismatches:
        _complain(outcome.mismatches, len(outcome.rows))
        raise typer.Exit(MISMATCHED)


def _run_thin(
    serving: WanServing, data: Path, rounds: int, workers: int, emulator: Emulator, json_file: Path | None
) -> None:
    from shardcompute.bench.tables import render_results
    from shardcompute.bench.wan.thin import ThinBench, run_thin_bench

    bench = ThinBench(serving, data, rounds=rounds, workers=workers, emulator=emulator)
    with BenchProgress() as say:
        results = run_thin_bench(bench, say)
    finish(results, render_results(results, "wire"), json_file)


def _serving(model: str, weights: str, max_memory: str) -> WanServing:
    from shardcompute.bench.wan.cluster import WanServing
    from shardcompute.cli.format import parse_size
    from shardcompute.weights.sources.reference import EMBEDDED_NAMES

    memory = parse_size(max_memory) if max_memory else 0
    model_path(model)  # so that nobody has to fetch it over the emulated network
    return WanServing(model or EMBEDDED_NAMES[0], weights, max_memory_bytes=memory)


def _show(outcome: WanOutcome) -> None:
    from shardcompute.bench.wan.report import render_summaries, summarise

    typer.echo(f"{len(outcome.stages)} stages, {outcome.emulator}")
    typer.echo(f"drafts: {'; '.join(outcome.drafters) or 'none'}\n")
    typer.echo(render_summaries(summarise(outcome.rows)))


def _keep(
    outcome: WanOutcome, settings: dict[str, object], plot: Path | None, json_file: Path | None
) -> None:
    from shardcompute.bench.wan.plots import plot_wan
    from shardcompute.bench.wan.report import outcome_json, summarise

    write_results(json_file, outcome_json(outcome, settings))
    if plot is not None:
        for path in plot_wan(summarise(outcome.rows), plot):
            Console(stderr=True).print(f"picture: {path}", highlight=False)


def _complain(mismatches: Sequence[Mismatch], answers: int) -> None:
    said = Console(stderr=True)
    said.print(
        f"{len(mismatches)} of {answers} answers DIFFER from the first one to their prompt:", style="red"
    )
    for wrong in mismatches[:_SHOWN_MISMATCHES]:
        where = (
            f"prompt {wrong.prompt} ({wrong.category}), {wrong.arm}, {wrong.streams} streams, {wrong.ring_ms:g} ms, "
            f"temperature {wrong.temperature:g}, {wrong.max_tokens} tokens"
        )
        said.print(f"  {where}", highlight=False, markup=False)
        said.print(f"    got      {wrong.text!r}", highlight=False, markup=False)
        said.print(f"    expected {wrong.expected!r}", highlight=False, markup=False)
