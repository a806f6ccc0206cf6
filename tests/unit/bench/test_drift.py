"""`bench drift` without a cluster: what it calls a success, the noise that it makes, and what it counts."""

from __future__ import annotations

import subprocess
import sys
import time
from dataclasses import replace
from itertools import islice
from statistics import fmean, pstdev

import psutil

from shardcompute.bench.drift.load import Load
from shardcompute.bench.drift.report import results_of, shortcomings
from shardcompute.bench.drift.run import DriftOutcome
from shardcompute.bench.drift.slowdown import factors, slowed_down

GOOD = DriftOutcome(
    fault="stage",
    victim="stage-2",
    moves_before=0,
    moves=1,
    planned_s=17.0,
    moved_s=20.0,
    before=50.0,
    during=20.0,
    after=48.0,
    longest_pause_s=1.0,
    answers=16,
    is_same=True,
    sentences=("why",),
)


def test_each_bar_is_held_against_what_was_seen() -> None:
    assert shortcomings([GOOD], 30.0, 0.9) == []
    assert "noise alone moved" in shortcomings([replace(GOOD, moves_before=1)], 30.0, 0.9)[0]
    assert "different answers" in shortcomings([replace(GOOD, is_same=False)], 30.0, 0.9)[0]
    assert "after 31 s" in shortcomings([replace(GOOD, planned_s=31.0)], 30.0, 0.9)[0]
    assert "never" in shortcomings([replace(GOOD, planned_s=None)], 30.0, 0.9)[0]
    assert "0.50 of the best" in shortcomings([replace(GOOD, after=25.0)], 30.0, 0.9)[0]


def test_what_never_happened_has_no_figure() -> None:
    told = {result.metric for result in results_of([replace(GOOD, planned_s=None, moved_s=None)])}
    assert "part of best" in told
    assert not told & {"planned after", "moved after"}


def test_noise_is_as_large_as_asked_and_the_same_for_a_seed() -> None:
    drawn = list(islice(factors(3.0, 0.2, seed=4), 2000))
    assert abs(fmean(drawn) / 3.0 - 1) < 0.05
    assert 0.15 < pstdev(drawn) / 3.0 < 0.25
    assert drawn == list(islice(factors(3.0, 0.2, seed=4), 2000))
    assert min(islice(factors(1.0, 0.5, seed=1), 200)) == 1.0, "nobody is faster than the machine"


def test_a_slowed_process_is_stopped_now_and_then_and_goes_on_afterwards() -> None:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as sleeper:
        seen = psutil.Process(sleeper.pid)
        deadline = time.monotonic() + 20
        with slowed_down(sleeper.pid, 50.0):
            while seen.status() != psutil.STATUS_STOPPED and time.monotonic() < deadline:
                time.sleep(0.001)
            assert seen.status() == psutil.STATUS_STOPPED or time.monotonic() < deadline
        assert seen.status() != psutil.STATUS_STOPPED
        sleeper.kill()


def test_load_counts_pieces_by_time_and_compares_answers() -> None:
    load = Load()
    for second in range(10):
        load.came(float(second), 0.1 * second)
    assert load.rate(2.0, 6.0) == 1.0
    assert load.longest_gap_s == 0.9
    load.answered("why", "because")
    load.answered("who", "me")
    load.answered("why", "because")
    assert load.is_same
    load.answered("who", "you")
    assert not load.is_same
    assert load.whole_answers == 4
