"""Curves of a run in the terminal: loss, speed and gradient norm as lines of blocks, however many steps there are."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from shardcompute.core.units import format_rate

if TYPE_CHECKING:
    from shardcompute.finetune.training import CurvePoint

_BLOCKS = "▁▂▃▄▅▆▇█"
_LIVE_WIDTH, _WHOLE_WIDTH = 16, 48
_MOST_STEPS = 4096


class TerminalCurve:
    """Of one run. `line` is what is said of a step, `lines` what of all of them at the end."""

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._kept: list[tuple[float, float, float]] = []

    def line(self, point: CurvePoint, seconds: float) -> str:
        speed = point.tokens / max(seconds, 1e-9)
        if len(self._kept) >= _MOST_STEPS:
            self._kept = self._kept[::2]
        self._kept.append((point.loss, speed, point.norm))
        watched = "" if point.held_out is None else f", held out {point.held_out:.4f}"
        return (
            f"step {point.step}/{self._steps}: loss {point.loss:.4f}{watched}, {format_rate(speed)}, "
            f"gradient norm {point.norm:.3f}, rate {point.rate:.2e}  "
            f"{draw_blocks([loss for loss, _, _ in self._kept], _LIVE_WIDTH)}"
        )

    def lines(self) -> list[str]:
        if len(self._kept) < 2:
            return []
        losses, speeds, norms = (list(each) for each in zip(*self._kept, strict=True))
        named = (
            ("loss", losses, f"{losses[0]:.4f} to {losses[-1]:.4f}"),
            ("speed", speeds, f"{format_rate(min(speeds))} to {format_rate(max(speeds))}"),
            ("norm", norms, f"{min(norms):.3f} to {max(norms):.3f}"),
        )
        return [f"{name:6}{draw_blocks(values, _WHOLE_WIDTH)}  {range_}" for name, values, range_ in named]


def draw_blocks(values: Sequence[float], width: int) -> str:
    """Values one beside the other, the mean of neighbours where there are more than `width`; the lowest is lowest."""
    count = min(width, len(values))
    edges = [round(place * len(values) / count) for place in range(count + 1)] if count else []
    means = [sum(values[start:stop]) / (stop - start) for start, stop in pairwise(edges)]
    low, high = min(means, default=0.0), max(means, default=0.0)
    span = (high - low) or 1.0
    return "".join(_BLOCKS[round((mean - low) / span * (len(_BLOCKS) - 1))] for mean in means)
