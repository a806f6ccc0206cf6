"""`shardcompute bench soak` and `bench prefix`: a local cluster under lasting load, and what it remembers."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from shardcompute.bench.soak.report import SoakOutcome

NOT_WELL = 1
Model = Annotated[
    str, typer.Argument(help="Model: a folder, a .gguf file, org/repo, or nothing for the default.")
]
WeightForm = Annotated[str, typer.Option("--weights", help="Weight form.")]
Workers = Annotated[int, typer.Option(min=1, max=16, help="Local workers, a stage and one thread each.")]
JsonFile = Annotated[Path | None, typer.Option("--json", help="Write raw results to this file.")]


def soak(
    model: Model = "",
    weights: WeightForm = "native",
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
    from shardcompute.bench.report import describe_environment, write_json
    from shardcompute.bench.soak.report import raw_of, results_of
    from shardcompute.bench.soak.run import SoakBench, run_soak_bench
    from shardcompute.cli.tools.bench import BenchProgress, model_path

    bench = SoakBench(model_path(model), weights, workers, streams, minutes, every, data)
    with BenchProgress() as say:
        outcome = run_soak_bench(bench, say)
    _show(outcome)
    if json_file is not None:
        settings = {"weights": weights, "workers": workers, "streams": streams, "every_s": every}
        more = {"settings": settings, **raw_of(outcome)}
        write_json(json_file, describe_environment(), results_of(outcome), more)
        Console(stderr=True).print(f"raw results: {json_file}", highlight=False)
    if not outcome.is_well:
        raise typer.Exit(NOT_WELL)


def _show(outcome: SoakOutcome) -> None:
    from shardcompute.bench.soak.report import HEADINGS, cells_of, summary_lines

    requests = Table("kind", "done", "failed", "cancelled")
    for kind, tally in (*outcome.tallies.items(), ("all", outcome.total)):
        requests.add_row(kind, str(tally.done), str(tally.failed), str(tally.cancelled))
    trends = Table()
    for number, heading in enumerate(HEADINGS):
        trends.add_column(heading, justify="right" if 1 < number < len(HEADINGS) - 1 else "left")
    for trend in outcome.trends:
        trends.add_row(*cells_of(trend), style="red" if trend.grows else None)
    console = Console(width=120)
    console.print(requests)
    console.print(trends)
    for line in summary_lines(outcome):
        console.print(line, highlight=False, markup=False)


def prefix(
    model: Model = "",
    weights: WeightForm = "native",
    workers: Workers = 3,
    prompt_tokens: Annotated[int, typer.Option(min=64, help="Tokens of the system prompt.")] = 1000,
    rounds: Annotated[int, typer.Option(min=1, help="Questions; both arms answer each.")] = 12,
    json_file: JsonFile = None,
) -> None:
    """A long system prompt before different questions, remembered against computed anew.

    Exit code 1 if an answer differs, or if what is remembered crosses a `cache_salt`.
    """
    from shardcompute.bench.prefix import PrefixBench, raw_of, results_of, run_prefix_bench
    from shardcompute.bench.report import describe_environment, write_json
    from shardcompute.cli.tools.bench import BenchProgress, model_path, show_results

    bench = PrefixBench(model_path(model), weights, workers, prompt_tokens, rounds=rounds)
    with BenchProgress() as say:
        outcome = run_prefix_bench(bench, say)
    results, said = results_of(outcome), Console(stderr=True)
    show_results([each for each in results if each.labels], rows=("arm",), columns=())
    if json_file is not None:
        write_json(json_file, describe_environment(), results, raw_of(outcome))
        said.print(f"raw results: {json_file}", highlight=False)
    for problem in outcome.problems:
        said.print(problem, style="red", highlight=False, markup=False)
    if outcome.problems:
        raise typer.Exit(NOT_WELL)
