"""Report of `bench paper`: our tables with intervals, published figures beside them, and what differs. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from shardcompute.bench.paper.intervals import Interval
from shardcompute.bench.paper.published import DIFFERENCES, UNKNOWN, PublishedFigure, beside
from shardcompute.bench.report import Result
from shardcompute.bench.tables import Row, format_value, render_table

_PARTS = (
    ("accuracy", "right answers, %", 100.0),
    ("accuracy_change", "change, points", 100.0),
    ("perplexity", "perplexity", 1.0),
)
_TITLE = "with 95 % intervals; changes are against the first form, question by question"


def render_paper(results: Sequence[Result], published: Sequence[PublishedFigure]) -> str:
    parts = [_forms_table(results, published), _links_table(results, published)]
    if not published:
        parts.append(f"published figures: {UNKNOWN} (--published FILE puts them beside ours)")
    parts.append("what differs:\n" + "\n".join(f"- {each}" for each in DIFFERENCES))
    return "\n".join(filter(None, parts))


def _forms_table(results: Sequence[Result], published: Sequence[PublishedFigure]) -> str:
    rows: list[Row] = []
    forms: dict[str, None] = {}
    for metric, heading, scale in _PARTS:
        found = [each for each in results if each.metric == metric]
        if not found:
            continue
        rows.append((heading, {}))
        for task in dict.fromkeys(each.labels["task"] for each in found):
            cells, theirs = {}, {}
            for each in found:
                if each.labels["task"] == task:
                    form = each.labels["form"]
                    forms[form] = None
                    cells[form] = _bounds(results, each).told(1 if scale == 100 else 2, scale)
                    known = beside(each, published)
                    if known is not None:
                        theirs[form] = format_value(scale * known.value)
            rows.append((f"  {task}", cells))
            if theirs:
                rows.append(("    published", theirs))
    return render_table(_TITLE, list(forms), rows) if rows else ""


def _bounds(results: Sequence[Result], of: Result) -> Interval:
    def find(metric: str) -> float:
        return next(each.value for each in results if each.metric == metric and each.labels == of.labels)

    return Interval(of.value, find(f"{of.metric}_low"), find(f"{of.metric}_high"))


def _links_table(results: Sequence[Result], published: Sequence[PublishedFigure]) -> str:
    found = [each for each in results if each.metric in ("throughput", "steps") and "link" in each.labels]
    rows: list[Row] = []
    batches: dict[str, None] = {}
    for metric, heading in (("throughput", "tok/s of all streams"), ("steps", "steps/s")):
        rows.append((heading, {}))
        for link in dict.fromkeys(each.labels["link"] for each in found):
            cells, theirs = {}, {}
            for each in found:
                if each.metric == metric and each.labels["link"] == link:
                    batch = f"batch {each.labels['batch']}"
                    batches[batch] = None
                    cells[batch] = format_value(each.value)
                    known = beside(each, published)
                    if known is not None:
                        theirs[batch] = format_value(known.value)
            rows.append((f"  {link}", cells))
            if theirs:
                rows.append(("    published", theirs))
    return render_table("", list(batches), rows) if found else ""
