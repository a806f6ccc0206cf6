"""Tables of results as plain text: a row for each measure, a column for each arm, never wider than a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from shardcompute.bench.report import Result

WIDTH = 100
_GAP = "  "

Row = tuple[str, Mapping[str, str]]
"""A measure's name and its cells by arm. A name without cells is a heading of what follows."""


def render_table(title: str, arms: Sequence[str], rows: Sequence[Row]) -> str:
    """All rows under as many arms as fit; then all rows again under those that did not."""
    name_width = max(len(name) for name, _ in rows)
    widths = {arm: max(len(arm), *(len(cells.get(arm, "")) for _, cells in rows)) for arm in arms}
    lines = [title] if title else []
    for block in _blocks(arms, widths, WIDTH - name_width):
        lines.append(_line("", name_width, {arm: arm for arm in block}, block, widths))
        lines.append("-" * (name_width + sum(len(_GAP) + widths[arm] for arm in block)))
        lines += [_line(name, name_width, cells, block, widths) for name, cells in rows]
        lines.append("")
    return "\n".join(lines)


def rows_of(heading: str, measures: Mapping[str, Mapping[str, str]]) -> list[Row]:
    """The rows of what several arms were measured by alike, under a heading."""
    names = next(iter(measures.values()))
    cells = ((f"  {name}", {arm: told[name] for arm, told in measures.items()}) for name in names)
    return [(heading, {}), *cells]


def render_results(
    results: Sequence[Result], arm: str, *, labels: Sequence[str] = (), tables: Sequence[str] = ()
) -> str:
    """Results with `arm` as their column. Rows differ by metric and `labels`; each value of `tables` has a table."""
    parts: dict[str, list[Result]] = {}
    for result in results:
        parts.setdefault(_labelled(result, tables), []).append(result)
    return "\n".join(_render_part(title, part, arm, labels) for title, part in parts.items())


def format_value(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _render_part(title: str, results: Sequence[Result], arm: str, labels: Sequence[str]) -> str:
    by_metric: dict[str, dict[str, dict[str, str]]] = {}
    arms: dict[str, None] = {}
    for result in results:
        value = result.labels.get(arm, "")
        name = value if isinstance(value, str) else f"{arm} {value}"
        arms[name] = None
        metric = with_unit(result.metric.replace("_", " "), result.unit)
        row = by_metric.setdefault(metric, {}).setdefault(_labelled(result, labels), {})
        row[name] = format_value(result.value)
    rows: list[Row] = []
    for metric, under in by_metric.items():
        if list(under) == [""]:
            rows.append((metric, under[""]))
        else:
            rows += [(metric, {}), *((f"  {label}", cells) for label, cells in under.items())]
    return render_table(title, list(arms), rows)


def with_unit(measure: str, unit: str) -> str:
    return measure if unit in ("", measure) else f"{measure}, {unit}"


def _labelled(result: Result, names: Sequence[str]) -> str:
    return ", ".join(f"{name} {result.labels[name]}" for name in names if name in result.labels)


def _blocks(arms: Sequence[str], widths: Mapping[str, int], room: int) -> Iterator[list[str]]:
    block: list[str] = []
    used = 0
    for arm in arms:
        needed = len(_GAP) + widths[arm]
        if block and used + needed > room:
            yield block
            block, used = [], 0
        block.append(arm)
        used += needed
    yield block


def _line(
    name: str, name_width: int, cells: Mapping[str, str], block: Sequence[str], widths: Mapping[str, int]
) -> str:
    shown = (f"{_GAP}{cells.get(arm, ''):>{widths[arm]}}" for arm in block)
    return f"{name:<{name_width}}{''.join(shown)}".rstrip()
