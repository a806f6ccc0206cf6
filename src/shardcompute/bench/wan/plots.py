"""Plots of what `bench wan` found. Needs matplotlib, which comes with the `dev` extra only."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path

from shardcompute.bench.wan.report import MEAN, PARTS, Summary
from shardcompute.core.errors import BackendError

_WIDTH = 0.8


def check_plotting() -> None:
    """BackendError where nothing can be drawn; better said before hours of measuring."""
    if importlib.util.find_spec("matplotlib") is None:
        raise BackendError("--plot needs matplotlib", hint="pip install matplotlib, or leave --plot out")


def plot_wan(summaries: Sequence[Summary], folder: Path) -> list[Path]:
    """Speed-up by kind of work and distance, and where the time of a traversal goes."""
    check_plotting()
    folder.mkdir(parents=True, exist_ok=True)
    # Of several lengths and temperatures the first: a picture is for the distances.
    first = next(((each.max_tokens, each.temperature) for each in summaries), None)
    single = [
        each for each in summaries if each.streams == 1 and (each.max_tokens, each.temperature) == first
    ]
    paths = [_plot_speedups(single, ring_ms, folder) for ring_ms in dict.fromkeys(s.ring_ms for s in single)]
    means = [summary for summary in single if summary.category == MEAN]
    paths += _plot_parts(means, folder)
    return [path for path in paths if path is not None]


def _plot_speedups(summaries: Sequence[Summary], ring_ms: float, folder: Path) -> Path | None:
    from matplotlib.figure import Figure

    here = [s for s in summaries if s.ring_ms == ring_ms and s.arm != "plain" and s.speedup is not None]
    if not here:
        return None
    categories = list(dict.fromkeys(s.category for s in here))
    arms = list(dict.fromkeys(s.arm for s in here))
    figure = Figure(figsize=(max(6.0, 0.9 * len(categories)), 4), layout="constrained")
    axes = figure.subplots()
    bar = _WIDTH / len(arms)
    for number, arm in enumerate(arms):
        heights = {s.category: s.speedup or 0.0 for s in here if s.arm == arm}
        places = [index for index, category in enumerate(categories) if category in heights]
        spreads = {s.category: _spread(s) for s in here if s.arm == arm}
        axes.bar(
            [place - _WIDTH / 2 + (number + 0.5) * bar for place in places],
            [heights[categories[place]] for place in places],
            bar,
            yerr=list(zip(*(spreads[categories[place]] for place in places), strict=True)),
            error_kw={"elinewidth": 0.8},
            label=arm,
        )
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set_xticks(range(len(categories)), categories, rotation=30, ha="right")
    axes.set_ylabel("decode speed against plain")
    axes.set_title(f"{ring_ms:g} ms round the ring, one stream")
    axes.legend(frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    path = folder / f"speedup-{ring_ms:g}ms.png"
    figure.savefig(path, dpi=120)
    return path


def _spread(summary: Summary) -> tuple[float, float]:
    """How far the interval goes below and above the mean."""
    mean, low, high = summary.speedup, summary.speedup_low, summary.speedup_high
    if mean is None or low is None or high is None:
        return 0.0, 0.0
    return max(0.0, mean - low), max(0.0, high - mean)


def _plot_parts(means: Sequence[Summary], folder: Path) -> list[Path]:
    from matplotlib.figure import Figure

    known = [summary for summary in means if summary.parts]
    if not known:
        return []
    figure = Figure(figsize=(max(6.0, 0.8 * len(known)), 4), layout="constrained")
    axes = figure.subplots()
    below = [0.0] * len(known)
    for part in PARTS:
        heights = [summary.parts.get(part, 0.0) * 1e3 for summary in known]
        label = part.removesuffix("_s").replace("_", " ")
        axes.bar(range(len(known)), heights, _WIDTH, bottom=below, label=label)
        below = [low + height for low, height in zip(below, heights, strict=True)]
    names = [f"{summary.arm}\n{summary.ring_ms:g} ms" for summary in known]
    axes.set_xticks(range(len(known)), names)
    axes.set_ylabel("mean traversal, ms")
    axes.legend(frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    path = folder / "traversal.png"
    figure.savefig(path, dpi=120)
    return [path]
