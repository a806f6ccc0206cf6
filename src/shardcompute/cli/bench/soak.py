"""`shardcompute bench soak` and `bench prefix`: a local cluster under lasting load, and what it remembers."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from shardcompute.cli.bench.bench_run import (
    BenchProgress,
    JsonFile,
    Model,
    WeightsName,
    model_path,
    write_results,
)

if TYPE_CHECKING:
    from shardcompute.bench.soak.report import SoakOutcome

NOT_WELL = 1
Workers = Annotated[int, typer.Option(min=1, max=16, help="Local workers, a stage and one thread each.")]


def soak(
    model: Model = "",
    weights: WeightsName = "native",
    workers: Workers = 3,
    streams: Annotated[int, typer.Option(min=1, max=1024, help="Clients that ask all the time.")] = 32,
    minutes: Annotated[float, typer.Option(min=0.05, help="How long, a fifth of it to warm up.")] = 5.0,
    every: Annotated[float, typer.Option(min=0.1, help="Seconds between two looks at every process.")] = 2.0,
    data: Annotated[
        Path | None, typer.Option(help="Spec-Bench's questions as JSON lines; by default a few of our own.")
    ] = None,
    json_file: JsonFile = None,
) -> None:
    """Mixed load on a local cluster for minutes: does memory grow, does it slow down, does a request fail?

    Prompts are short and long, some share a beginning, some want a JSON schema or several answers, some hang up midway.
    Exit code 1 if the memory, descriptors or threads of a process grow, or if any request failed.
    """
    from shardcompute.bench.report import listed
    from shardcompute.bench.soak.report import raw_of, results_of
    from shardcompute.bench.soak.run import SoakBench, run_soak_bench

    bench = SoakBench(model_path(model), weights, workers, streams, minutes, every, data)
    with BenchProgress() as say:
        outcome = run_soak_bench(bench, say)
    _show(outcome)
    settings = {"weights": weights, "workers": workers, "streams": streams, "every_s": every}
    kept = {"results": listed(results_of(outcome)), "settings": settings, **raw_of(outcome)}
    write_results(json_file, kept)
    if not outcome.is_well:
        raise typer.Exit(NOT_WELL)


def _show(outcome: SoakOutcome) -> None:
    from shardcompute.bench.soak.report import render_requests, render_trends, summary_lines

    typer.echo(render_requests({**outcome.tallies, "all": outcome.total}))
    typer.echo(render_trends(outcome.trends))
    for line in summary_lines(outcome):
        typer.echo(line)


def prefix(
    model: Model = "",
    weights: WeightsName = "native",
    workers: Workers = 3,
    prompt_tokens: Annotated[int, typer.Option(min=64, help="Tokens of the system prompt.")] = 1000,
    rounds: Annotated[int, typer.Option(min=1, help="Questions; both arms answer each.")] = 12,
    copies: Annotated[
        int,
        typer.Option(
            min=0,
            help="Count instead what so many copies of a model would compute of prompts with shared beginnings, where "
            "requests go by prefix and load, to the fewest sessions, or by chance. No model is needed.",
        ),
    ] = 0,
    json_file: JsonFile = None,
) -> None:
    """A long system prompt before different questions, remembered against computed anew.

    Exit code 1 if an answer differs, or if what is remembered crosses a `cache_salt`.
    """
    from shardcompute.bench.prefix import PrefixBench, raw_of, results_of, run_prefix_bench
    from shardcompute.bench.report import listed
    from shardcompute.bench.tables import render_results

    if copies:
        from shardcompute.bench.prefix_routing import (
            RoutingBench,
            routing_raw,
            routing_results,
            run_routing_bench,
        )

        routing = RoutingBench(copies=copies, prompt_tokens=prompt_tokens)
        outcomes = run_routing_bench(routing)
        counted = routing_results(outcomes)
        typer.echo(render_results(counted, "policy"))
        write_results(json_file, {"results": listed(counted), **routing_raw(routing, outcomes)})
        return
    bench = PrefixBench(model_path(model), weights, workers, prompt_tokens, rounds=rounds)
    with BenchProgress() as say:
        outcome = run_prefix_bench(bench, say)
    results, said = results_of(outcome), Console(stderr=True)
    typer.echo(render_results([each for each in results if each.labels], "arm"))
    write_results(json_file, {"results": listed(results), **raw_of(outcome)})
    for problem in outcome.problems:
        said.print(problem, style="red", highlight=False, markup=False)
    if outcome.problems:
        raise typer.Exit(NOT_WELL)
