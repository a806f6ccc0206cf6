"""The watch over conditions: a worker is asked to be relieved, stops when it is or in time, and comes back."""

from __future__ import annotations

import pytest

from shardcompute.node.worker.conditions.policy import CALM_S, Reading, WorkConditions
from shardcompute.node.worker.conditions.watch import RELIEF_S, ConditionWatch, MachineReader

MAINS = WorkConditions(only_on_mains=True)


class Worker:
    def __init__(self) -> None:
        self.is_idle = False
        self.told: list[tuple[str, bool]] = []

    def rest(self, reason: str, *, is_at_rest: bool) -> None:
        self.told.append((reason, is_at_rest))


class Bench:
    """A watch over a worker, with a plug and a clock in our hands."""

    def __init__(self) -> None:
        self.worker = Worker()
        self.is_plugged = True
        self.now_s = 0.0
        self._watch = ConditionWatch(
            MAINS, self.worker, lambda: Reading(is_on_mains=self.is_plugged), lambda: self.now_s
        )

    def look(self, at_s: float) -> list[tuple[str, bool]]:
        """What the worker is told at this moment."""
        self.now_s = at_s
        before = len(self.worker.told)
        self._watch.step()
        return self.worker.told[before:]


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_nothing_is_said_while_all_is_well(bench: Bench) -> None:
    assert [bench.look(at_s) for at_s in (0.0, 5.0, 500.0)] == [[], [], []]


def test_a_worker_is_relieved_and_then_rests(bench: Bench) -> None:
    bench.is_plugged = False
    assert bench.look(0.0) == [("it runs on its battery", False)]
    assert bench.look(5.0) == []
    bench.worker.is_idle = True
    assert bench.look(10.0) == [("it runs on its battery", True)]
    assert bench.look(15.0) == []


def test_a_worker_that_nobody_relieves_rests_all_the_same(bench: Bench) -> None:
    bench.is_plugged = False
    bench.look(0.0)
    assert bench.look(RELIEF_S - 1) == []
    assert bench.look(RELIEF_S) == [("it runs on its battery", True)]


def test_a_worker_comes_back_after_a_calm_while(bench: Bench) -> None:
    bench.is_plugged = False
    bench.look(0.0)
    bench.look(RELIEF_S)
    bench.is_plugged = True
    assert bench.look(100.0) == []
    assert bench.look(100.0 + CALM_S) == [("", False)]
    bench.is_plugged = False
    assert bench.look(300.0) == [("it runs on its battery", False)]


def test_only_what_is_asked_for_is_read() -> None:
    reading = MachineReader(MAINS).read()
    assert (reading.is_metered, reading.idle_s, reading.others_load) == (None, None, None)
