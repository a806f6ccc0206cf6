"""`shardcompute sim`: what a cluster that nobody has would do."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer
from rich.console import Console

from shardcompute.cli.bench.bench_run import BenchProgress, JsonFile, write_results
from shardcompute.core.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardcompute.simulator import Compared, SimulationOutcome

_SHOWN = (
    ("tok/s", "tokens_per_s"),
    ("tok/s of a stream", "stream_tokens_per_s"),
    ("first token, s", "first_token_s"),
    ("recovery, s", "recovery_s"),
    ("longest recovery, s", "recovery_longest_s"),
    ("time served", "served_share"),
    ("copies ready", "ready_chains_share"),
    ("answers finished", "finished"),
    ("answers given up", "abandoned"),
    ("tokens lost", "tokens_lost"),
    ("tokens doubled", "tokens_doubled"),
    ("machines failed", "machines_failed"),
    ("layouts changed", "reshaped"),
    ("moves planned", "moves_planned"),
    ("messages per machine and s", "messages_per_machine_and_s"),
    ("journal, bytes an hour", "journal_bytes_per_h"),
    ("state, bytes", "state_bytes"),
)
_BAR = 0.1


def sim(
    scenarios: Annotated[list[Path], typer.Argument(help="Scenario files (TOML).", metavar="SCENARIO...")],
    only: Annotated[str, typer.Option("--only", help="Of several variants the one of this name.")] = "",
    seed: Annotated[int | None, typer.Option("--seed", help="Another seed than the files have.")] = None,
    plot: Annotated[Path | None, typer.Option("--plot", help="Draw pictures into this folder.")] = None,
    json_file: JsonFile = None,
) -> None:
    """Simulate clusters: the real control code, with machines, lines, churn and load from a scenario file.

    The same file and seed give the same figures. Where a scenario names measurements, predictions stand beside them.
    Exit code 1 if a token was lost or doubled.
    """
    from shardcompute.simulator import compare, load_scenarios, simulate
    from shardcompute.simulator.plots import check_matplotlib, plot_outcomes

    if plot is not None:
        check_matplotlib()
    loaded = [(path, scenario) for path in scenarios for scenario in load_scenarios(path)]
    names = [scenario.name for _, scenario in loaded]
    if only and only not in names:
        raise UsageError(f"no variant is called {only!r}", hint=f"use one of {', '.join(names)}")
    loaded = [(path, scenario) for path, scenario in loaded if only in ("", scenario.name)]
    outcomes: list[SimulationOutcome] = []
    compared: dict[str, list[Compared]] = {}
    with BenchProgress() as say:
        for path, scenario in loaded:
            asked = scenario if seed is None else msgspec.structs.replace(scenario, seed=seed)
            say(f"{scenario.name}: {scenario.machine_count} machines, {scenario.duration_s:g} s")
            outcomes.append(simulate(asked))
            compared[scenario.name] = compare(outcomes[-1], scenario.compare, path.parent)
    for outcome in outcomes:
        typer.echo(_told(outcome, compared[outcome.scenario]))
    write_results(
        json_file, {"results": [_listed(outcome, compared[outcome.scenario]) for outcome in outcomes]}
    )
    if plot is not None:
        for drawn in plot_outcomes(outcomes, compared, plot):
            Console(stderr=True).print(f"plot: {drawn}", highlight=False)
    if any(outcome.figures["tokens_lost"] or outcome.figures["tokens_doubled"] for outcome in outcomes):
        raise typer.Exit(1)


def _listed(outcome: SimulationOutcome, compared: Sequence[Compared]) -> dict[str, object]:
    rows = [
        {
            "figure": each.figure,
            "predicted": each.predicted,
            "measured": each.measured,
            "deviation": each.deviation,
            "remark": each.remark,
        }
        for each in compared
    ]
    return {**outcome.listed(), "compared": rows}


def _told(outcome: SimulationOutcome, compared: Sequence[Compared]) -> str:
    lines = [
        f"{outcome.scenario}: {outcome.machines} machines, {outcome.simulated_s:g} s, seed {outcome.seed}"
    ]
    lines += [
        f"  {name:<28}{_number(value)}"
        for name, figure in _SHOWN
        if (value := outcome.figures[figure]) is not None
    ]
    for name in ("planning", "idling"):
        work = outcome.computing[name]
        told = f"{work['count']} turns, {work['mean_s'] * 1e3:.1f} ms each, longest {work['longest_s']:.2f} s"
        lines.append(f"  {name + ' here':<28}{told}")
    if compared:
        lines.append(f"  {'':<28}{'predicted':>12}{'measured':>12}{'off by':>9}")
    for each in compared:
        off = "" if each.deviation is None else f"{each.deviation:+.1%}"
        mark = "" if each.deviation is not None and abs(each.deviation) <= _BAR else "  beyond 10 %"
        told = f"{_number(each.predicted):>12}{_number(each.measured):>12}{off:>9}{mark}"
        lines.append(f"  {each.remark or each.figure:<28}{told}")
    return "\n".join(lines) + "\n"


def _number(value: float | None) -> str:
    if value is None:
        return "none"
    return f"{value:,}" if isinstance(value, int) else f"{value:,.4g}"
