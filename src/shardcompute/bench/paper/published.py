"""Published figures beside ours: from a file that whoever has the paper writes, never from memory.

A JSON list of objects, each with `metric` (accuracy, perplexity, steps or throughput), `value`, the labels of a row of
ours (`task` and `form`, or `link` and `batch`) and, where one likes, `source`: where it stands.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardcompute.bench.report import Result
from shardcompute.core.errors import UsageError

UNKNOWN = "none known here"
DIFFERENCES = (
    "the model: ours is small, so that shares and speeds compare as ratios at most",
    "16 bit: ours computes in float32 with the weights as they are stored; a checkpoint that was stored in fewer bits "
    "has lost what it lost before",
    "the machines: six processes that share one computer's cores, each with one thread, on an emulated network",
    "the questions: halves of the public data, no examples before them, answered by what is likeliest of the choices",
)
"""What differs from any paper, whatever its figures are."""
_KEYS = {"task": str, "form": str, "link": str, "batch": int}
_MOST_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class PublishedFigure:
    metric: str
    value: float
    labels: Mapping[str, Any]
    source: str = ""


def read_published(path: Path) -> list[PublishedFigure]:
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise UsageError(f"{path} is too large for a list of figures", hint="leave out what is no figure")
        rows = json.loads(path.read_text(encoding="utf-8"))
        return [_figure(row) for row in rows]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise UsageError(
            f"{path} is no list of published figures: {error!r}",
            hint='write [{"metric": "steps", "link": "1 Gbit/s, 5 ms", "batch": 1, "value": 1.0}]',
        ) from error


def _figure(row: Mapping[str, Any]) -> PublishedFigure:
    labels = {name: kind(row[name]) for name, kind in _KEYS.items() if name in row}
    return PublishedFigure(str(row["metric"]), float(row["value"]), labels, str(row.get("source", "")))


def beside(result: Result, published: Sequence[PublishedFigure]) -> PublishedFigure | None:
    """The published figure of the same thing; None: none is known."""
    return next(
        (
            each
            for each in published
            if each.metric == result.metric
            and each.labels
            and all(result.labels.get(name) == value for name, value in each.labels.items())
        ),
        None,
    )
