"""Trends and summary of `bench soak`, from its samples. Pure.

A process grows in memory, descriptors or threads when all of these hold:

- a line fitted by least squares through all samples after the warm-up rises by more than is allowed: 8 MiB of memory or
  5 % of what it was, whichever is more; 4 descriptors or threads, or 5 %;
- one through the later half of them rises at that rate too, by more than half of what is allowed. What fills once (keys
  and values, arenas of the allocator) stops; a leak goes on;
- the most that was seen in the later half is above the most until the end of the warm-up, by more than half of what is
  allowed. Memory for keys and values is given back and taken again as conversations come and go; a leak ends higher.

A process that rises by more than is allowed, but not in this way, varies; all others are flat.
What is allowed does not depend on how long it takes, so longer runs find slower leaks.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from shardcompute.bench.report import Result
from shardcompute.bench.tables import Row, render_table, rows_of, with_unit

WARM_UP = 0.2
"""Part of the time after which samples count."""
_MIB = 1 << 20
_QUANTITIES = (("memory", "MiB", 8.0), ("descriptors", "files", 4.0), ("threads", "threads", 4.0))
"""Name, unit, and what it may rise by at least."""
_RELATIVE = 0.05


@dataclass(frozen=True, slots=True)
class Sample:
    """One process at one time."""

    at_s: float
    process: str
    resident_bytes: int
    descriptors: int
    threads: int
    cpu_s: float = 0.0
    """Processor time so far."""

    def amount(self, quantity: str) -> float:
        return self.resident_bytes / _MIB if quantity == "memory" else float(getattr(self, quantity))


@dataclass(frozen=True, slots=True)
class Trend:
    """How one quantity of one process went after the warm-up."""

    process: str
    quantity: str
    unit: str
    warm: float
    end: float
    per_minute: float
    rise: float
    """Of the fitted line, over the whole time."""
    later_rise: float
    """Of a line fitted through the later half, over that half."""
    higher: float
    """How far the most of the later half lies above the most until the end of the warm-up."""
    allowed: float

    @property
    def grows(self) -> bool:
        half = self.allowed / 2
        return self.rise > self.allowed and self.later_rise > half and self.higher > half

    @property
    def verdict(self) -> str:
        if self.grows:
            return "grows"
        return "varies" if self.rise > self.allowed else "flat"


@dataclass(frozen=True, slots=True)
class SoakTally:
    """How requests of one kind ended."""

    done: int = 0
    failed: int = 0
    cancelled: int = 0


@dataclass(frozen=True, slots=True)
class SoakOutcome:
    minutes: float
    stages: int
    tallies: Mapping[str, SoakTally]
    failures: Sequence[str]
    """Why requests failed, the first few, and what the processes logged of it."""
    samples: Sequence[Sample]
    generated: Sequence[tuple[float, float]]
    """Tokens generated so far, with the seconds at which they were."""
    lost: Sequence[str] = ()
    """Processes that ended meanwhile."""

    @property
    def trends(self) -> list[Trend]:
        return find_trends(self.samples, self.minutes * 60)

    @property
    def total(self) -> SoakTally:
        tallies = self.tallies.values()
        return SoakTally(
            sum(each.done for each in tallies),
            sum(each.failed for each in tallies),
            sum(each.cancelled for each in tallies),
        )

    @property
    def is_well(self) -> bool:
        """Whether nothing grew, failed or went away, and something was done at all."""
        is_disturbed = self.total.failed or self.failures or self.lost
        return self.total.done > 0 and not is_disturbed and not any(trend.grows for trend in self.trends)


def slope(points: Sequence[tuple[float, float]]) -> float:
    """Of the line through (x, y) by least squares; 0 where there is no line."""
    if len({x for x, _ in points}) < 2:
        return 0.0
    return statistics.linear_regression(*zip(*points, strict=True)).slope


def find_trends(samples: Iterable[Sample], whole_s: float) -> list[Trend]:
    """Of every process and quantity, in the order in which processes appear."""
    by_process: dict[str, list[Sample]] = {}
    for sample in samples:
        by_process.setdefault(sample.process, []).append(sample)
    return [
        _trend(process, seen, whole_s * WARM_UP, *quantity)
        for process, seen in by_process.items()
        if seen[-1].at_s >= whole_s * WARM_UP
        for quantity in _QUANTITIES
    ]


def _trend(
    process: str, samples: Sequence[Sample], warm_s: float, quantity: str, unit: str, least: float
) -> Trend:
    points = [(sample.at_s, sample.amount(quantity)) for sample in samples]
    after = [point for point in points if point[0] >= warm_s]
    (start_s, warm), (stop_s, end) = after[0], after[-1]
    middle_s = (start_s + stop_s) / 2
    later = [point for point in after if point[0] >= middle_s]
    return Trend(
        process=process,
        quantity=quantity,
        unit=unit,
        warm=warm,
        end=end,
        per_minute=slope(after) * 60,
        rise=slope(after) * (stop_s - start_s),
        later_rise=slope(later) * (stop_s - middle_s),
        higher=_most(later) - _most([point for point in points if point[0] <= start_s]),
        allowed=max(least, warm * _RELATIVE),
    )


def _most(points: Iterable[tuple[float, float]]) -> float:
    return max(amount for _, amount in points)


@dataclass(frozen=True, slots=True)
class Pace:
    """Of a third of the time. Processor time tells a server that slows down from a machine that is busy otherwise."""

    tokens_per_s: float
    cpu_s_per_token: float


def paces(outcome: SoakOutcome) -> tuple[Pace, Pace]:
    """Of the first third of the time after the warm-up, and of the last: at the very start prompts come all at once."""
    warm_s = outcome.minutes * 60 * WARM_UP
    times = [at_s for at_s, _ in outcome.generated if at_s >= warm_s]
    if len(times) < 2:
        return Pace(0.0, 0.0), Pace(0.0, 0.0)
    start_s, stop_s = times[0], times[-1]
    third_s = (stop_s - start_s) / 3
    return _pace(outcome, start_s, start_s + third_s), _pace(outcome, stop_s - third_s, stop_s)


def _pace(outcome: SoakOutcome, start_s: float, stop_s: float) -> Pace:
    points = [point for point in outcome.generated if start_s <= point[0] <= stop_s]
    elapsed_s, tokens = points[-1][0] - points[0][0], points[-1][1] - points[0][1]
    if elapsed_s <= 0 or tokens <= 0:
        return Pace(0.0, 0.0)
    used: dict[str, list[float]] = {}
    for sample in outcome.samples:
        if start_s <= sample.at_s <= stop_s:
            used.setdefault(sample.process, []).append(sample.cpu_s)
    return Pace(tokens / elapsed_s, sum(seen[-1] - seen[0] for seen in used.values()) / tokens)


def results_of(outcome: SoakOutcome) -> list[Result]:
    results = [
        Result(f"requests_{how}", count, "requests", {"kind": kind})
        for kind, tally in (*outcome.tallies.items(), ("all", outcome.total))
        for how, count in asdict(tally).items()
    ]
    first, last = paces(outcome)
    for part, pace in (("first third", first), ("last third", last)):
        results.append(Result("throughput", pace.tokens_per_s, "tok/s", {"part": part}))
        results.append(Result("cpu_per_token", pace.cpu_s_per_token, "s", {"part": part}))
    if first.tokens_per_s > 0:
        results.append(Result("last_vs_first_third", last.tokens_per_s / first.tokens_per_s, "ratio"))
    for trend in outcome.trends:
        labels = {"process": trend.process, "verdict": trend.verdict}
        results += [
            Result(f"{trend.quantity}_warm", trend.warm, trend.unit, labels),
            Result(f"{trend.quantity}_end", trend.end, trend.unit, labels),
            Result(f"{trend.quantity}_slope", trend.per_minute, f"{trend.unit}/min", labels),
            Result(f"{trend.quantity}_rise", trend.rise, trend.unit, labels),
            Result(f"{trend.quantity}_later_rise", trend.later_rise, trend.unit, labels),
            Result(f"{trend.quantity}_higher", trend.higher, trend.unit, labels),
        ]
    return results


def raw_of(outcome: SoakOutcome) -> dict[str, Any]:
    """What the JSON file has besides results: enough to judge by another criterion."""
    return {
        "minutes": outcome.minutes,
        "stages": outcome.stages,
        "is_well": outcome.is_well,
        "failures": list(outcome.failures),
        "lost": list(outcome.lost),
        "generated": [[round(at_s, 2), tokens] for at_s, tokens in outcome.generated],
        "samples": [asdict(sample) | {"at_s": round(sample.at_s, 2)} for sample in outcome.samples],
    }


def measures_of(trend: Trend) -> dict[str, str]:
    """What a trend tells, under the names of the table's rows."""
    form = ".1f" if trend.unit == "MiB" else ".0f"
    return {
        "warm": format(trend.warm, form),
        "end": format(trend.end, form),
        "per minute": f"{trend.per_minute:+.2f}",
        "rise": f"{trend.rise:+.1f}",
        "later rise": f"{trend.later_rise:+.1f}",
        "higher": f"{trend.higher:+.1f}",
        "allowed": f"{trend.allowed:.1f}",
        "verdict": trend.verdict,
    }


def render_requests(tallies: Mapping[str, SoakTally]) -> str:
    fields = ("done", "failed", "cancelled")
    rows = [
        (field, {kind: str(getattr(tally, field)) for kind, tally in tallies.items()}) for field in fields
    ]
    return render_table("requests", list(tallies), rows)


def render_trends(trends: Sequence[Trend]) -> str:
    """How each quantity went, with the processes side by side."""
    rows: list[Row] = []
    for quantity, unit in dict.fromkeys((trend.quantity, trend.unit) for trend in trends):
        told = {trend.process: measures_of(trend) for trend in trends if trend.quantity == quantity}
        rows += rows_of(with_unit(quantity, unit), told)
    return render_table("processes", list(dict.fromkeys(trend.process for trend in trends)), rows)


def summary_lines(outcome: SoakOutcome) -> list[str]:
    """The outcome in a few sentences."""
    total = outcome.total
    first, last = paces(outcome)
    ratio = f" ({last.tokens_per_s / first.tokens_per_s:.2f} of it)" if first.tokens_per_s > 0 else ""
    lines = [
        f"{total.done} requests done, {total.failed} failed, {total.cancelled} cancelled, "
        f"in {outcome.minutes:g} minutes on {outcome.stages} stages",
        f"after the warm-up {first.tokens_per_s:.1f} tok/s in the first third, "
        f"{last.tokens_per_s:.1f} in the last{ratio}",
        f"{first.cpu_s_per_token * 1e3:.1f} and {last.cpu_s_per_token * 1e3:.1f} ms of processor time for a token",
    ]
    lines += [f"{name} ended meanwhile" for name in outcome.lost]
    lines += [
        f"{trend.process} grows: {trend.quantity} by {trend.per_minute:.2f} {trend.unit} a minute"
        for trend in outcome.trends
        if trend.grows
    ]
    lines += [f"failed: {reason}" for reason in outcome.failures]
    if outcome.is_well:
        lines.append("nothing grows")
    return lines
