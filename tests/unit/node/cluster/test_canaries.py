"""Canary runner: when it sends, and that users come first."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from shardcompute.control import ClusterState
from shardcompute.node.cluster.canaries.record import MOST_CLASSES, CanaryNotes, open_notes, save_notes
from shardcompute.node.cluster.canaries.runner import CanaryRunner
from shardcompute.node.service import ServiceLoad

EVERY_S = 600.0
IDLE = ServiceLoad(0, 0, 0.0)
BUSY = ServiceLoad(2, 0, 0.2)
FULL = ServiceLoad(2, 1, 0.9)


class Draws:
    """The times that are drawn, as parts of the usual one; always the first of whatever there is to choose from."""

    def __init__(self, times: Iterable[float]) -> None:
        self._times: Iterator[float] = iter(times)

    def expovariate(self, lambd: float) -> float:
        return next(self._times) / lambd

    def randrange(self, stop: int) -> int:
        return 0


class Pool:
    """Serves nothing, and says how busy it is."""

    def __init__(self, loads: Iterable[ServiceLoad]) -> None:
        self._loads = iter(loads)
        self.sent = 0

    def load(self) -> ServiceLoad:
        return next(self._loads, IDLE)

    def all_models(self) -> list[Any]:
        self.sent += 1
        return []


def run(
    tmp_path: Path, times: Iterable[float], loads: Iterable[ServiceLoad], most_waits: int
) -> tuple[Pool, list[float]]:
    pool, waits = Pool(loads), list[float]()

    def wait(seconds: float) -> bool:
        waits.append(seconds)
        return len(waits) > most_waits

    runner = CanaryRunner(
        EVERY_S,
        tmp_path / "canaries.json",
        pool,  # type: ignore[arg-type]
        lambda: ClusterState(),
        chance=Draws(times),
        wait=wait,
    )
    runner.start()
    runner._thread.join(20.0)
    assert not runner._thread.is_alive()
    return pool, waits


def test_times_are_drawn_and_bounded(tmp_path: Path) -> None:
    pool, waits = run(tmp_path, (0.5, 2.0, 0.0, 99.0), (), 3)
    assert waits == [300.0, 1200.0, 60.0, 3000.0]
    assert pool.sent == 3


def test_it_waits_while_users_are_served(tmp_path: Path) -> None:
    pool, waits = run(tmp_path, (1.0, 1.0), [BUSY] * 3, 4)
    assert waits == [600.0, 5.0, 5.0, 5.0, 600.0]
    assert pool.sent == 1


def test_on_a_cluster_that_is_never_idle_it_goes_beside_users_only_where_there_is_room(
    tmp_path: Path,
) -> None:
    patience = int(3 * EVERY_S / 5)
    pool, waits = run(tmp_path, (1.0, 1.0), [BUSY] * 1000, patience + 1)
    assert pool.sent == 1
    assert len(waits) == patience + 2
    pool, _ = run(tmp_path, (1.0, 1.0), [FULL] * 1000, 2 * patience + 1)
    assert pool.sent == 0


def test_the_record_is_bounded_and_a_damaged_one_begins_anew(tmp_path: Path) -> None:
    notes = CanaryNotes(b"secret")
    for number in range(3 * MOST_CLASSES):
        notes = notes.with_answer(f"class {number}", 0, (1, 2), float(number))
        notes = notes.with_reading(f"class {number}", (f"node {number}",), 1.0, float(number))
    assert len(notes.classes) == MOST_CLASSES
    assert f"class {3 * MOST_CLASSES - 1}" in notes.classes
    for number in range(1100):
        notes = notes.with_reading(f"class {3 * MOST_CLASSES - 1}", (f"node {number}",), 1.0, 100.0 + number)
    assert len(notes.machines) == 1024
    path = tmp_path / "canaries.json"
    save_notes(path, notes)
    assert open_notes(path) == notes
    path.write_bytes(b"{")
    assert open_notes(path).classes == {}
