"""A plot of what `bench tensor` found: one stream's speed by the round trip between machines. Needs matplotlib, as
`bench wan` does."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

from shardcompute.bench.report import Result
from shardcompute.bench.tensor.outcome import ALONE
from shardcompute.bench.wan.plots import check_plotting

_NAME = "tensor-crossover.svg"


def plot_crossover(results: Sequence[Result], folder: Path) -> Path:
    """Speeds by arm and emulated LAN; one process, which needs no line, as a line across."""
    check_plotting()
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    folder.mkdir(parents=True, exist_ok=True)
    speeds: dict[str, dict[float, float]] = {}
    for result in results:
        if result.metric == "decode":
            speeds.setdefault(result.labels["arm"], {})[result.labels["rtt_ms"]] = result.value
    # Text stays text: a smaller file, in the reader's own font.
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "shardcompute"}):
        figure = Figure(figsize=(7, 4), layout="constrained")
        axes = figure.subplots()
        for number, (arm, by_rtt) in enumerate(speeds.items()):
            points = sorted((rtt, speed) for rtt, speed in by_rtt.items() if rtt)
            if arm == ALONE:
                middle = statistics.median(speed for _, speed in points)
                axes.axhline(middle, color="black", linewidth=0.8, label=arm)
                continue
            dashes = "--" if arm.endswith("stages") else "-"
            axes.plot(*zip(*points, strict=True), dashes, marker="o", label=arm, color=f"C{number}")
        axes.set_xscale("log")
        ticks = sorted({rtt for by_rtt in speeds.values() for rtt in by_rtt if rtt})
        axes.set_xticks(ticks, [f"{rtt:g}" for rtt in ticks])
        axes.minorticks_off()
        axes.set_ylim(bottom=0)
        axes.set_xlabel("round trip, ms")
        axes.set_ylabel("tokens/s, one stream")
        axes.legend(frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0))
        path = folder / _NAME
        figure.savefig(path, metadata={"Date": None})
    return path
