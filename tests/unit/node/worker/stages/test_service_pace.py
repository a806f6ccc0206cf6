"""What steps of a shard take in service, window by window, against what was measured when it was loaded."""

from __future__ import annotations

import random

import pytest

from shardcompute.node.worker.speed_probe import BATCH_ROWS, StageSpeed
from shardcompute.node.worker.stages.service_pace import LEAST_WINDOW_S, ServicePace, ShardPace

LOADED = StageSpeed(row_s=0.01, batch_s=0.017, prompt_row_s=0.002)


class Shard:
    """Steps one after the other, on a clock of their own."""

    def __init__(self, context_s: float = 0.0) -> None:
        self.pace = ServicePace(LOADED, context_s)
        self.now_s = 0.0
        self.told: list[ShardPace] = []

    def run(self, seconds: float, step_s: float, rows: int = 1, context: int = 0, noise: float = 0.0) -> None:
        chance, until_s = random.Random(1), self.now_s + seconds
        while self.now_s < until_s:
            took_s = step_s * chance.lognormvariate(0.0, noise)
            self.now_s += took_s
            pace = self.pace.observe(rows, context, took_s, self.now_s)
            if pace is not None:
                self.told.append(pace)


def test_a_machine_as_fast_as_it_was_says_so() -> None:
    shard = Shard()
    shard.run(120.0, LOADED.row_s, noise=0.3)
    assert len(shard.told) > 10
    assert all(pace.decode is not None and 0.8 < pace.decode < 1.2 for pace in shard.told)
    assert all(pace.prefill is None for pace in shard.told), "there were no prompts"


def test_one_that_throttles_says_so_as_long_as_it_does() -> None:
    shard = Shard()
    shard.run(30.0, LOADED.row_s)
    shard.told.clear()
    shard.run(60.0, 3 * LOADED.row_s, noise=0.2)
    assert all(pace.decode is not None and 2.5 < pace.decode < 3.5 for pace in shard.told[1:])
    shard.run(60.0, LOADED.row_s, noise=0.2)
    assert shard.told[-1].decode == pytest.approx(1.0, rel=0.1)


def test_a_window_is_of_many_steps_and_of_some_time() -> None:
    shard = Shard()
    shard.run(LEAST_WINDOW_S - 0.1, LOADED.row_s)
    assert shard.told == []
    slow = Shard()
    slow.run(20.0, 1.0)
    assert slow.told == [], "twenty steps are too few"


def test_batches_are_held_against_batches() -> None:
    shard = Shard()
    shard.run(30.0, 0.017, rows=BATCH_ROWS)
    shard.run(30.0, 0.0135, rows=4)
    assert all(pace.decode == pytest.approx(1.0, rel=0.1) for pace in shard.told), (
        "four rows take longer than one, and less long than eight"
    )
    shard.run(60.0, 0.034, rows=BATCH_ROWS)
    assert shard.told[-1].decode == pytest.approx(2.0)


def test_prompts_have_a_pace_of_their_own() -> None:
    shard = Shard()
    shard.run(120.0, 0.002 * 128 * 2, rows=128)
    assert {(pace.decode, round(pace.prefill or 0.0, 1)) for pace in shard.told} == {(None, 2.0)}


def test_long_conversations_do_not_make_a_machine_slow() -> None:
    shard = Shard(context_s=1e-5)
    shard.run(60.0, LOADED.row_s + 500e-5, context=500)
    assert shard.told
    assert all(pace.decode == pytest.approx(1.0) for pace in shard.told)
    shard.told.clear()
    shard.run(60.0, LOADED.row_s + 5000e-5, context=5000)
    assert shard.told == []


def test_steps_that_nothing_is_known_of_say_nothing() -> None:
    pace = ServicePace(StageSpeed(0.01), 0.0)
    told = [pace.observe(rows, 0, 9.0, now_s) for now_s in range(0, 600, 10) for rows in (4, 20, 128)]
    assert told == [None] * len(told)
    assert pace.observe(1, 0, float("nan"), 0.0) is None
