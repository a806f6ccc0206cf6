"""`shardcompute bench reach`: two homes behind routers of every kind, and the way that links find between them."""

from __future__ import annotations

from typing import Annotated

import typer

from shardcompute.cli.bench.bench_run import BenchProgress, JsonFile, finish
from shardcompute.core.errors import UsageError


def reach(
    names: Annotated[
        str, typer.Option("--cases", help="Cases, separated by semicolons; by default all (see --list).")
    ] = "",
    is_list: Annotated[bool, typer.Option("--list", help="Say which cases there are, and stop.")] = False,
    rounds: Annotated[int, typer.Option(min=1, max=50, help="Links after the first.")] = 5,
    megabytes: Annotated[int, typer.Option(min=1, max=256, help="MiB sent over each of them.")] = 8,
    json_file: JsonFile = None,
) -> None:
    """Which rung of the ladder two nodes behind routers take, how long that takes, and what it carries.

    Makes the homes in network namespaces: needs root, iproute2 and iptables.
    """
    from shardcompute.bench.reach.run import CASES, results_of, run_reach_bench, table_of

    known = {case.name: case for case in CASES}
    if is_list:
        for name in known:
            typer.echo(name)
        return
    wanted = [name.strip() for name in names.split(";")] if names else list(known)
    if unknown := [name for name in wanted if name not in known]:
        raise UsageError(f"there is no case {unknown[0]!r}", hint="--list says which there are")
    with BenchProgress() as say:
        rows = run_reach_bench([known[name] for name in wanted], say, rounds=rounds, loads=megabytes)
    finish(results_of(rows), table_of(rows), json_file)
