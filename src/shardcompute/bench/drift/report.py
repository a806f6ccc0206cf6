"""Report of `bench drift`, from its outcomes. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from shardcompute.bench.drift.run import DriftOutcome
from shardcompute.bench.report import Result


def results_of(outcomes: Sequence[DriftOutcome]) -> list[Result]:
    results = []
    for each in outcomes:
        labels = {"fault": each.fault}
        results += [
            Result("moves amid noise", each.moves_before, "moves", labels),
            Result("moves since", each.moves, "moves", labels),
            Result("before", each.before, "tokens/s", labels),
            Result("during", each.during, "tokens/s", labels),
            Result("after", each.after, "tokens/s", labels),
            Result("part of best", each.part_of_best, "fraction", labels),
            Result("longest pause", each.longest_pause_s, "s", labels),
            Result("same text", float(each.is_same), "fraction", labels),
        ]
        if each.planned_s is not None:
            results.append(Result("planned after", each.planned_s, "s", labels))
        if each.moved_s is not None:
            results.append(Result("moved after", each.moved_s, "s", labels))
    return results


def shortcomings(outcomes: Sequence[DriftOutcome], most_s: float, least_part: float) -> list[str]:
    """What did not come as it should, in sentences."""
    found = []
    for each in outcomes:
        if each.moves_before:
            found.append(f"{each.fault}: noise alone moved the chain {each.moves_before} times")
        if not each.is_same:
            found.append(f"{each.fault}: the same question had different answers")
        if each.planned_s is None or each.planned_s > most_s:
            when = "never" if each.planned_s is None else f"after {each.planned_s:.0f} s"
            found.append(f"{each.fault}: planned anew {when}, not within {most_s:g} s")
        if each.part_of_best < least_part:
            found.append(
                f"{each.fault}: {each.part_of_best:.2f} of the best layout's throughput, not {least_part:g}"
            )
    return found
