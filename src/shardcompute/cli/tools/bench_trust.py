"""`shardcompute bench trust`: which cheats audits find, and how soon."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from shardcompute.cli.tools.bench_run import BenchProgress, JsonFile, Model


def trust(
    model: Model = "",
    data: Annotated[Path | None, typer.Option(help="Texts as JSON lines with a `text` each.")] = None,
    weights: Annotated[str, typer.Option("--weights", help="Weight form that is served.")] = "int8",
    answers: Annotated[int, typer.Option(min=20, help="Honest answers, of 128 tokens each.")] = 512,
    cheated: Annotated[int, typer.Option(min=4, help="So many of them are computed by every cheat.")] = 80,
    picked: Annotated[int, typer.Option(min=20, help="So many of them also by the last stage.")] = 60,
    json_file: JsonFile = None,
) -> None:
    """Which cheats of a stage audits find, how soon at which rate, and how often they would accuse the honest.

    Needs the torch extra for the auditor of another class. A --json file that an earlier run of the same settings has
    left is gone on from, cheat by cheat.
    """
    from shardcompute.bench.trust.run import TrustBench, run_trust_bench
    from shardcompute.core.settings import load_settings
    from shardcompute.weights.sources.reference import parse_reference
    from shardcompute.weights.sources.resolve import resolve

    files = resolve(parse_reference(model), load_settings())
    bench = TrustBench(files, data, weights, answers, cheated_answers=cheated, picked_answers=picked)
    with BenchProgress() as say:
        found = run_trust_bench(bench, json_file, say)
    sys.stdout.write(_table(found))


def _table(found: dict[str, Any]) -> str:
    lines = [f"{'cheat':32} {'auditor':22} {'rate':>5} {'audits':>7} {'within 1,000 tokens':>20}"]
    for row in found["caught"]:
        if row["machine"] != "new":
            continue
        audits = "never" if row["never"] == 1 else f"{row['audits']:.1f}"
        lines.append(
            f"{row['cheat']:32} {row['auditor']:22} {row['rate']:5} {audits:>7} {row['within']:>20.0%}"
        )
    for codec, honest in found["honest"].items():
        lines.append(
            f"honest, {codec}: {honest['false_alarms_held_out']} false alarms in {honest['windows_held_out']} windows"
        )
    lines.append(f"an audit costs {found['overhead']['ratio']:.2f} of what it audits")
    return "\n".join(lines) + "\n"
