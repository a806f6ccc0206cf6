"""`shardcompute bench placement`: methods of placing a model, against a lower bound and in CPU time."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from shardcompute.cli.options.cluster import LATENCY_WEIGHTS, Preference
from shardcompute.cli.tools.bench_run import BenchProgress, JsonFile, write_results


def placement(
    machines: Annotated[
        str, typer.Option(help="Sizes of clusters, separated by commas.")
    ] = "8,16,32,64,256,1000",
    rooms: Annotated[
        str, typer.Option(help="roomy (few machines hold the model), tight (most are needed), or both.")
    ] = "roomy,tight",
    seeds: Annotated[int, typer.Option(min=1, help="Clusters of each size.")] = 5,
    budget: Annotated[
        float, typer.Option(min=0.01, help="CPU seconds of annealing, genetics and random orders.")
    ] = 1.0,
    methods: Annotated[
        str,
        typer.Option(
            help="plan (all that a plan takes), random, greedy, local-search, annealing, brkga, brkga-warm, exact."
        ),
    ] = "plan,random,greedy,local-search,annealing,brkga,brkga-warm,exact",
    prefer: Annotated[Preference, typer.Option(help="What is worth most.")] = Preference.BALANCED,
    schemes: Annotated[
        int, typer.Option(min=0, help="Layouts in the library of computed ones; 0: none.")
    ] = 6,
    drifts: Annotated[
        str, typer.Option(help="By how much links change later, separated by commas.")
    ] = "0.1,0.5",
    json_file: JsonFile = None,
) -> None:
    """Every method on the same made-up clusters: how near it comes to what no layout can exceed, and in what CPU time."""
    from shardcompute.bench.placement.run import PlacementBench, run_placement_bench
    from shardcompute.bench.report import listed
    from shardcompute.bench.tables import render_results

    bench = PlacementBench(
        machines=[int(part) for part in machines.split(",")],
        rooms=rooms.split(","),
        seeds=seeds,
        budget_s=budget,
        methods=methods.split(","),
        latency_weight=LATENCY_WEIGHTS[prefer],
        schemes=schemes,
        drifts=[float(part) for part in drifts.split(",") if part],
    )
    with BenchProgress() as say:
        results, runs = run_placement_bench(bench, say)
    recalls = [each for each in results if "asked" in each.labels]
    placed = [each for each in results if "asked" not in each.labels]
    typer.echo(render_results(placed, "method", labels=("machines",), tables=("room",)))
    if recalls:
        typer.echo(render_results(recalls, "method", labels=("asked", "machines"), tables=("room",)))
    write_results(json_file, {"results": listed(results), "runs": [asdict(run) for run in runs]})
