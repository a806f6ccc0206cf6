"""Curves of runs: bounded, told again from a checkpoint, and told late when the cluster was away."""

from __future__ import annotations

import threading

from shardcompute.core.errors import LinkError
from shardcompute.finetune.training import CurvePoint
from shardcompute.node.finetuning.curve_reporter import CurveReporter
from shardcompute.node.finetuning.curves import MOST_POINTS, MOST_RUNS, CurveBoard, CurveStep, RunReport


def report(run: str, steps: range, *, is_over: bool = False) -> RunReport:
    points = tuple(CurveStep(step, 1 / step, 0.5, 100.0) for step in steps)
    return RunReport(run, "m", 10_000, 2, points, is_over)


def test_long_runs_and_many_runs_are_bounded_and_keep_their_ends() -> None:
    board = CurveBoard()
    for first in range(1, 5000, 100):
        board.tell(report("long", range(first, first + 100)))
    [curve] = board.curves()
    steps = [point.step for point in curve.points]
    assert len(steps) <= MOST_POINTS
    assert (steps[0], steps[-1]) == (1, 5000)
    assert steps == sorted(set(steps))
    for number in range(20):
        board.tell(report(f"run-{number}", range(1, 3)))
    found = [curve.id for curve in board.curves()]
    assert found == [f"run-{number}" for number in range(19, 19 - MOST_RUNS, -1)]


def test_steps_that_are_told_again_replace_what_was_told() -> None:
    board = CurveBoard()
    board.tell(report("a", range(1, 8)))
    board.tell(report("a", range(5, 7)))
    assert [point.step for point in board.curves()[0].points] == [1, 2, 3, 4, 5, 6]


def test_a_run_is_running_silent_or_done() -> None:
    now_s = 0.0
    board = CurveBoard(lambda: now_s)
    board.tell(report("a", range(1, 2)))
    assert board.curves()[0].status == "running"
    now_s = 1000.0
    assert board.curves()[0].status == "silent"
    board.tell(report("a", range(0), is_over=True))
    assert board.curves()[0].status == "done"
    assert len(board.curves()[0].points) == 1


def test_what_could_not_be_told_is_told_later() -> None:
    told: list[int] = []
    is_away, has_failed = threading.Event(), threading.Event()
    is_away.set()

    def tell(report: RunReport) -> None:
        if is_away.is_set():
            has_failed.set()
            raise LinkError("the coordinator is away")
        told.extend(point.step for point in report.points)

    with CurveReporter(tell, "a", "m", 10, pause_s=0.001) as reporter:
        reporter.note(CurvePoint(1, 1.0, 0.5, 0.1, 100), 2.0)
        assert has_failed.wait(30)
        reporter.note(CurvePoint(2, 1.0, 0.5, 0.1, 100), 2.0)
        is_away.clear()
    assert sorted(told) == [1, 2]
    assert told == [1, 2]
