"""`shardcompute bench collectives`: sums between ranks, by size, algorithm and line."""

from __future__ import annotations

from typing import Annotated

import typer

from shardcompute.cli.bench.bench_run import BenchProgress, JsonFile, finish


def collectives(
    ranks: Annotated[str, typer.Option(help="Numbers of ranks, separated by commas.")] = "2,3,4",
    sizes: Annotated[str, typer.Option(help="Kilobytes of an array, separated by commas.")] = "1,8,64,1024",
    lines: Annotated[
        str, typer.Option(help="local (Unix sockets), tls, tcp, gloo (torch), separated by commas.")
    ] = "local,tls,tcp",
    rtt_ms: Annotated[
        str, typer.Option(help="Round trips of emulated LANs in milliseconds, separated by commas.")
    ] = "",
    algorithms: Annotated[
        str, typer.Option(help="auto, direct, ring, doubling, tree, mesh, separated by commas.")
    ] = "auto,direct,ring,doubling,tree,mesh",
    rounds: Annotated[int, typer.Option(min=1, help="How often every arm takes its turn.")] = 5,
    calls: Annotated[int, typer.Option(min=10, help="Calls in a turn; a tenth for large arrays.")] = 100,
    json_file: JsonFile = None,
) -> None:
    """Time and bytes of an all-reduce between processes of this machine."""
    from shardcompute.bench.collectives.run import CollectivesBench, run_collectives_bench
    from shardcompute.bench.tables import render_results

    bench = CollectivesBench(
        ranks=[int(part) for part in ranks.split(",")],
        sizes=[int(part) << 10 for part in sizes.split(",")],
        lines=[part for part in lines.split(",") if part],
        rtt_ms=[float(part) for part in rtt_ms.split(",") if part],
        algorithms=algorithms.split(","),
        rounds=rounds,
        calls=calls,
    )
    with BenchProgress() as say:
        results = run_collectives_bench(bench, say)
    finish(
        results, render_results(results, "algorithm", labels=("size",), tables=("ranks", "line")), json_file
    )
