"""Summary of `bench wan`: by kind of work and in the mean, as ratios within the run."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from hashlib import sha256
from typing import Any

from shardcompute.bench.tables import Row as TableRow
from shardcompute.bench.tables import render_table, rows_of
from shardcompute.bench.wan.run import Row, WanOutcome
from shardcompute.core.units import count_of

PARTS = ("wire_s", "stage_queue_s", "codec_s", "compute_s", "draft_s")
"""What the time of a traversal is made of."""
MEAN = "mean"


@dataclass(frozen=True, slots=True)
class Summary:
    """One arm at one distance with so many streams, over the answers of a category or (`mean`) all of them.

    `speedup` is against `plain`: the median over prompts for one stream, of all that came for several. None: the
    server did not say.
    """

    ring_ms: float
    streams: int
    category: str
    arm: str
    answers: int
    tokens_per_s: float
    speedup: float | None
    tokens_per_traversal: float | None
    acceptance: float | None
    traversal_s: float | None
    first_s: float
    bytes_per_token: float | None
    parts: Mapping[str, float]


def summarise(rows: Sequence[Row]) -> list[Summary]:
    """By distance, streams, category (then the mean of all) and arm, in the order in which they were measured."""
    summaries = []
    for ring_ms, streams in dict.fromkeys((row.ring_ms, row.streams) for row in rows):
        here = [row for row in rows if (row.ring_ms, row.streams) == (ring_ms, streams)]
        # Streams that came together share their time; only their sum means something.
        categories = [*dict.fromkeys(row.category for row in here)] if streams == 1 else []
        for category in [*categories, MEAN]:
            chosen = [row for row in here if category in (MEAN, row.category)]
            arms = sorted(dict.fromkeys(row.arm for row in chosen), key=lambda arm: arm != "plain")
            plain = [row for row in chosen if row.arm == "plain"]
            summaries += [
                _summary(category, [row for row in chosen if row.arm == arm], plain) for arm in arms
            ]
    return summaries


def _summary(category: str, rows: Sequence[Row], plain: Sequence[Row]) -> Summary:
    first = rows[0]
    is_single = first.streams == 1
    speed = statistics.mean(row.tokens_per_s for row in rows) if is_single else _throughput(rows)
    speedup = _speedup(rows, plain) if is_single else _ratio(speed, plain)
    traversals = _total(rows, "traversals")
    drafted = _total(rows, "drafted_tokens")
    accepted = _total(rows, "accepted_tokens")
    # The first token comes out of the prompt's own traversals.
    decoded = sum(row.tokens - 1 for row in rows)
    return Summary(
        ring_ms=first.ring_ms,
        streams=first.streams,
        category=category,
        arm=first.arm,
        answers=len(rows),
        tokens_per_s=speed,
        speedup=speedup,
        tokens_per_traversal=decoded / traversals if traversals else None,
        acceptance=(accepted or 0.0) / drafted if drafted else None,
        traversal_s=_traversal_s(rows),
        first_s=statistics.mean(row.first_s for row in rows),
        bytes_per_token=_mean(row.number("bytes_per_token") for row in rows),
        parts={
            part: value for part in PARTS if (value := _mean(row.number(part) for row in rows)) is not None
        },
    )


def _throughput(rows: Sequence[Row]) -> float:
    """Tokens of all answers over the time of all groups."""
    groups = {(row.group, row.group_s) for row in rows}
    return sum(row.tokens for row in rows) / sum(seconds for _, seconds in groups)


def _ratio(speed: float, plain: Sequence[Row]) -> float | None:
    return speed / _throughput(plain) if plain else None


def _speedup(rows: Sequence[Row], plain: Sequence[Row]) -> float | None:
    """Prompt by prompt against plain decoding: the median in a category, and the mean of those over categories."""
    base = {row.prompt: row.tokens_per_s for row in plain}
    ratios: dict[str, list[float]] = {}
    for row in rows:
        if base.get(row.prompt):
            ratios.setdefault(row.category, []).append(row.tokens_per_s / base[row.prompt])
    return statistics.mean(map(statistics.median, ratios.values())) if ratios else None


def _traversal_s(rows: Sequence[Row]) -> float | None:
    times = [
        sum(row.number(part) or 0.0 for part in PARTS if part != "draft_s")
        for row in rows
        if row.number("wire_s") is not None
    ]
    return statistics.mean(times) if times else None


def _total(rows: Iterable[Row], name: str) -> float | None:
    values = [value for row in rows if (value := row.number(name)) is not None]
    return sum(values) if values else None


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.mean(known) if known else None


def measures_of(summary: Summary) -> dict[str, str]:
    """What a summary tells, under the names of the table's rows."""
    traversal_ms = None if summary.traversal_s is None else summary.traversal_s * 1e3
    return {
        "tok/s": f"{summary.tokens_per_s:.1f}",
        "× plain": _shown(summary.speedup, ".2f"),
        "tok/traversal": _shown(summary.tokens_per_traversal, ".2f"),
        "accepted": _shown(summary.acceptance, ".0%"),
        "traversal ms": _shown(traversal_ms, ".0f"),
        "first token s": f"{summary.first_s:.2f}",
        "bytes/token": _shown(summary.bytes_per_token, ",.0f"),
    }


def render_summaries(summaries: Sequence[Summary]) -> str:
    """A table for each distance and number of streams, with the arms side by side for each category."""
    tables = []
    for ring_ms, streams in dict.fromkeys((each.ring_ms, each.streams) for each in summaries):
        here = [each for each in summaries if (each.ring_ms, each.streams) == (ring_ms, streams)]
        rows: list[TableRow] = []
        for category in dict.fromkeys(each.category for each in here):
            rows += rows_of(
                category, {each.arm: measures_of(each) for each in here if each.category == category}
            )
        title = f"ring {ring_ms:g} ms, {count_of(streams, 'stream')}"
        tables.append(render_table(title, list(dict.fromkeys(each.arm for each in here)), rows))
    return "\n".join(tables)


def _shown(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def outcome_json(outcome: WanOutcome, settings: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "settings": dict(settings),
        "emulator": outcome.emulator,
        "stages": list(outcome.stages),
        "summaries": [asdict(summary) for summary in summarise(outcome.rows)],
        "mismatches": [asdict(mismatch) for mismatch in outcome.mismatches],
        # Answers quote their prompts, and whose data those are is not ours to decide: a digest tells them apart.
        "rows": [asdict(row) | {"text": sha256(row.text.encode()).hexdigest()} for row in outcome.rows],
    }
