"""Summary of `bench wan`: by kind of work and in the mean, as ratios within the run."""

from __future__ import annotations

import random
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from hashlib import sha256
from itertools import zip_longest
from typing import Any

from shardcompute.bench.tables import Row as TableRow
from shardcompute.bench.tables import render_table, rows_of
from shardcompute.bench.wan.loops import is_looping, loop_share
from shardcompute.bench.wan.run import Row, WanOutcome
from shardcompute.core.units import count_of

PARTS = ("wire_s", "stage_queue_s", "codec_s", "compute_s", "draft_s")
"""What the time of a traversal is made of."""
MEAN = "mean"
_LEAST_FOR_INTERVAL = 4
_RESAMPLES = 2000
_SHOWN_POSITIONS = 5


@dataclass(frozen=True, slots=True)
class Summary:
    """One arm at one distance with so many streams and settings, over a category's answers or (`mean`) all of them.

    `speedup` is against `plain`: the mean over prompts for one stream, of all that came for several. None: the
    server did not say.
    """

    ring_ms: float
    streams: int
    max_tokens: int
    temperature: float
    category: str
    arm: str
    answers: int
    tokens_per_s: float
    speedup: float | None
    speedup_low: float | None
    """The 95 % interval of that mean, by prompt; None where there are too few prompts for one."""
    speedup_high: float | None
    speedup_unlooped: float | None
    """Without answers that repeat themselves (see `loops`); None where no other is left."""
    loop_share: float
    """How much of the answers is inside loops."""
    tokens_per_traversal: float | None
    acceptance: float | None
    acceptance_by_position: Sequence[float]
    """Of all first tokens of drafts, of all second ones, and so on, how many were right."""
    traversal_s: float | None
    first_s: float
    bytes_per_token: float | None
    parts: Mapping[str, float]


def summarise(rows: Sequence[Row]) -> list[Summary]:
    """By distance, streams, settings, category (then the mean of all) and arm, in the order in which they were
    measured."""
    summaries = []
    for part in dict.fromkeys(map(_part_of, rows)):
        here = [row for row in rows if _part_of(row) == part]
        # Streams that came together share their time; only their sum means something.
        categories = [*dict.fromkeys(row.category for row in here)] if here[0].streams == 1 else []
        for category in [*categories, MEAN]:
            chosen = [row for row in here if category in (MEAN, row.category)]
            arms = sorted(dict.fromkeys(row.arm for row in chosen), key=lambda arm: arm != "plain")
            plain = [row for row in chosen if row.arm == "plain"]
            summaries += [
                _summary(category, [row for row in chosen if row.arm == arm], plain) for arm in arms
            ]
    return summaries


def _part_of(row: Row | Summary) -> tuple[float, int, float, int]:
    return row.ring_ms, row.streams, row.temperature, row.max_tokens


def _summary(category: str, rows: Sequence[Row], plain: Sequence[Row]) -> Summary:
    first = rows[0]
    is_single = first.streams == 1
    speed = statistics.mean(row.tokens_per_s for row in rows) if is_single else _throughput(rows)
    ratios = speedups(rows, plain) if is_single else {}
    interval = mean_interval([*ratios.values()]) if first.arm != "plain" else None
    unlooped = [ratios[row.prompt] for row in rows if row.prompt in ratios and not is_looping(row.text)]
    traversals = _total(rows, "traversals")
    drafted = _total(rows, "drafted_tokens")
    accepted = _total(rows, "accepted_tokens")
    # The first token comes out of the prompt's own traversals.
    decoded = sum(row.tokens - 1 for row in rows)
    return Summary(
        ring_ms=first.ring_ms,
        streams=first.streams,
        max_tokens=first.max_tokens,
        temperature=first.temperature,
        category=category,
        arm=first.arm,
        answers=len(rows),
        tokens_per_s=speed,
        speedup=_mean(ratios.values()) if is_single else _ratio(speed, plain),
        speedup_low=None if interval is None else interval[0],
        speedup_high=None if interval is None else interval[1],
        speedup_unlooped=_mean(unlooped),
        loop_share=statistics.mean(loop_share(row.text) for row in rows),
        tokens_per_traversal=decoded / traversals if traversals else None,
        acceptance=(accepted or 0.0) / drafted if drafted else None,
        acceptance_by_position=_acceptance_by_position(rows),
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


def speedups(rows: Sequence[Row], plain: Sequence[Row]) -> dict[int, float]:
    """By prompt, how much faster than plain decoding the answer came."""
    base = {row.prompt: row.tokens_per_s for row in plain}
    return {row.prompt: row.tokens_per_s / base[row.prompt] for row in rows if base.get(row.prompt)}


def mean_interval(values: Sequence[float]) -> tuple[float, float] | None:
    """In which the mean lies with 95 %, by drawing as many of these again and again; None for fewer than four."""
    if len(values) < _LEAST_FOR_INTERVAL:
        return None
    drawn = random.Random(0)
    means = sorted(statistics.fmean(drawn.choices(values, k=len(values))) for _ in range(_RESAMPLES))
    cut = round(_RESAMPLES * 0.025)
    return means[cut], means[-cut - 1]


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


def _acceptance_by_position(rows: Iterable[Row]) -> list[float]:
    told = [row.timings for row in rows]
    drafted, accepted = (
        [sum(counts) for counts in zip_longest(*(each.get(name) or () for each in told), fillvalue=0)]
        for name in ("drafted_by_position", "accepted_by_position")
    )
    return [right / sent for sent, right in zip(drafted, accepted, strict=True)]


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.mean(known) if known else None


def measures_of(summary: Summary) -> dict[str, str]:
    """What a summary tells, under the names of the table's rows."""
    traversal_ms = None if summary.traversal_s is None else summary.traversal_s * 1e3
    return {
        "tok/s": f"{summary.tokens_per_s:.1f}",
        "× plain": _shown(summary.speedup, ".2f"),
        "95 % interval": _shown_interval(summary),
        "without loops": _shown(summary.speedup_unlooped, ".2f"),
        "in loops": f"{summary.loop_share:.0%}",
        "tok/traversal": _shown(summary.tokens_per_traversal, ".2f"),
        "accepted": _shown(summary.acceptance, ".0%"),
        "by position": " ".join(
            f"{share:.0%}" for share in summary.acceptance_by_position[:_SHOWN_POSITIONS]
        ),
        "traversal ms": _shown(traversal_ms, ".0f"),
        "first token s": f"{summary.first_s:.2f}",
        "bytes/token": _shown(summary.bytes_per_token, ",.0f"),
    }


def render_summaries(summaries: Sequence[Summary]) -> str:
    """A table for each distance, number of streams and settings, with the arms side by side for each category."""
    tables = []
    for part in dict.fromkeys(map(_part_of, summaries)):
        here = [each for each in summaries if _part_of(each) == part]
        rows: list[TableRow] = []
        for category in dict.fromkeys(each.category for each in here):
            rows += rows_of(
                category, {each.arm: measures_of(each) for each in here if each.category == category}
            )
        tables.append(render_table(title_of(here[0]), list(dict.fromkeys(each.arm for each in here)), rows))
    return "\n".join(tables)


def title_of(summary: Summary) -> str:
    return (
        f"ring {summary.ring_ms:g} ms, {count_of(summary.streams, 'stream')}, "
        f"temperature {summary.temperature:g}, {summary.max_tokens} tokens"
    )


def _shown_interval(summary: Summary) -> str:
    low, high = summary.speedup_low, summary.speedup_high
    return "" if low is None or high is None else f"{low:.2f} to {high:.2f}"


def _shown(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def outcome_json(outcome: WanOutcome, settings: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "settings": dict(settings),
        "emulator": outcome.emulator,
        "stages": list(outcome.stages),
        "drafters": list(outcome.drafters),
        "summaries": [asdict(summary) for summary in summarise(outcome.rows)],
        "mismatches": [asdict(mismatch) for mismatch in outcome.mismatches],
        # Answers quote their prompts, and whose data those are is not ours to decide: a digest tells them apart.
        "rows": [
            asdict(row)
            | {"text": sha256(row.text.encode()).hexdigest(), "loop_share": round(loop_share(row.text), 3)}
            for row in outcome.rows
        ],
    }
