"""Plots of simulations, where matplotlib is installed: predictions beside measurements, and growth with machines."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path

from shardcompute.core.errors import BackendError
from shardcompute.simulator.outcome import Compared, SimulationOutcome

_BAR = 0.1
"""What a prediction may be off by."""


def check_matplotlib() -> None:
    """BackendError where nothing can be drawn: said before a long run."""
    if importlib.util.find_spec("matplotlib") is None:
        raise BackendError("plots need matplotlib", hint="pip install matplotlib, or leave --plot out")


def plot_outcomes(
    outcomes: Sequence[SimulationOutcome], compared: Mapping[str, Sequence[Compared]], folder: Path
) -> list[Path]:
    """All plots that these outcomes have something for."""
    check_matplotlib()
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    pairs = [each for rows in compared.values() for each in rows]
    if pairs:
        paths.append(_plot_validation(pairs, folder / "validation.png"))
    if len({each.machines for each in outcomes}) > 1:
        paths.append(_plot_growth(outcomes, folder / "growth.png"))
    paths.append(_plot_waits(outcomes, folder / "waits.png"))
    return paths


def _plot_validation(pairs: Sequence[Compared], path: Path) -> Path:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.5, 5), layout="constrained")
    axes = figure.subplots()
    for name in dict.fromkeys(each.figure for each in pairs):
        found = [(each.measured, each.predicted) for each in pairs if each.figure == name and each.predicted]
        axes.scatter([measured for measured, _ in found], [told for _, told in found], s=18, label=name)
    low, high = min(each.measured for each in pairs), max(each.measured for each in pairs)
    ends = [low / 2, high * 2]
    axes.plot(ends, ends, color="black", linewidth=0.8)
    axes.fill_between(
        ends, [e * (1 - _BAR) for e in ends], [e * (1 + _BAR) for e in ends], alpha=0.2, label="±10 %"
    )
    axes.set(xscale="log", yscale="log", xlabel="measured", ylabel="predicted", xlim=ends, ylim=ends)
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=110)
    return path


def _plot_growth(outcomes: Sequence[SimulationOutcome], path: Path) -> Path:
    from matplotlib.figure import Figure

    ordered = sorted(outcomes, key=lambda each: each.machines)
    counts = [each.machines for each in ordered]
    figure = Figure(figsize=(9, 3.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    for name in ("planning", "idling"):
        left.plot(
            counts, [each.computing[name]["mean_s"] for each in ordered], marker="o", label=f"{name}, mean"
        )
    longest = [each.computing["planning"]["longest_s"] for each in ordered]
    left.plot(counts, longest, marker="o", label="planning, longest")
    left.set(xscale="log", yscale="log", xlabel="machines", ylabel="s of one turn")
    left.legend(fontsize=8)
    for name in ("journal_bytes_per_h", "state_bytes"):
        right.plot(counts, [each.figures[name] or 0 for each in ordered], marker="o", label=name)
    right.set(xscale="log", yscale="log", xlabel="machines", ylabel="bytes")
    right.legend(fontsize=8)
    figure.savefig(path, dpi=110)
    return path


def _plot_waits(outcomes: Sequence[SimulationOutcome], path: Path) -> Path:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.5), layout="constrained")
    columns = figure.subplots(1, 3)
    for axes, name in zip(columns, ("first_token_s", "token_gap_s", "recovery_s"), strict=True):
        for outcome in outcomes:
            values = outcome.samples[name]
            if values:
                parts = [index / (len(values) - 1) for index in range(len(values))]
                axes.plot(values, parts, label=outcome.scenario)
        axes.set(xlabel=name, ylabel="part of all", ylim=(0, 1))
    columns[0].legend(fontsize=7)
    figure.savefig(path, dpi=110)
    return path
