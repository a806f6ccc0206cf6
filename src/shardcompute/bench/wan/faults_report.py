"""Summary of `bench faults`, from its answers. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence

from shardcompute.bench.report import Result
from shardcompute.bench.wan.faults import FaultRow


def summarise(rows: Sequence[FaultRow]) -> list[Result]:
    """For each fault, in the order in which they were tried: medians over answers, and the worst of the pauses."""
    results: list[Result] = []
    for fault in dict.fromkeys(row.fault for row in rows):
        of_fault = [row for row in rows if row.fault == fault]
        labels = {"fault": fault}
        results += [
            Result("tokens_per_s", _median(row.tokens / row.disturbed_s for row in of_fault), "1/s", labels),
            Result("speed", _median(row.speed for row in of_fault), "of usual", labels),
            Result("longest_pause", max(row.disturbed_pause_s for row in of_fault), "s", labels),
            Result("usual_pause", _median(row.undisturbed_pause_s for row in of_fault), "s", labels),
            Result("pings", sum(row.pings for row in of_fault) / len(of_fault), "each", labels),
            Result("epochs", _per_round(of_fault), "a round", labels),
            Result("whole_again", max(row.whole_again_s for row in of_fault), "s", labels),
            Result("same_text", sum(row.is_same for row in of_fault) / len(of_fault), "fraction", labels),
        ]
    return results


def raw_results(rows: Iterable[FaultRow]) -> list[Result]:
    """Every answer by itself."""
    results: list[Result] = []
    for row in rows:
        labels = {"fault": row.fault, "round": row.round, "stream": row.stream, "stage": row.stage}
        results += [
            Result("answer", row.disturbed_s, "s", labels),
            Result("answer_undisturbed", row.undisturbed_s, "s", labels),
            Result("answer_pause", row.disturbed_pause_s, "s", labels),
            Result("answer_epochs", row.epochs, "epochs", labels),
        ]
    return results


def differing(rows: Iterable[FaultRow]) -> list[FaultRow]:
    """Answers that a fault has changed; there should be none."""
    return [row for row in rows if not row.is_same]


def _median(values: Iterable[float]) -> float:
    return statistics.median(values)


def _per_round(rows: Sequence[FaultRow]) -> float:
    """Changes of shape; answers that came at the same time saw the same ones."""
    by_round = {row.round: row.epochs for row in rows}
    return statistics.mean(by_round.values())
