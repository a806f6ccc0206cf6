"""Everything at once and in any order: at the end every answer is right and nothing is left behind."""

from __future__ import annotations

import contextlib
import os
import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from shardcompute.core.errors import ShardComputeError
from support.lab_links import wait_until
from support.requests import mixture
from support.swarm import Alone, LabSwarm, LabWorker, Talk, swarm

WORKERS = 6
MOST_WORKERS = 8
NEEDED = 3
"""Machines that hold the model; so many are never touched, and one more."""


class Chaos:
    """Random harm to a swarm under random load, the same for the same seed as far as timing allows."""

    def __init__(self, lab: LabSwarm, alone: Alone, seed: int, *, restarts: bool) -> None:
        self.lab = lab
        self.random = random.Random(seed)
        self.done: list[str] = []
        self._requests = mixture(alone, 24, 50)
        self._talks: list[Talk] = []
        self._excused: set[Talk] = set()
        self._frozen: list[LabWorker] = []
        self._dead: list[LabWorker] = []
        self._deeds: list[tuple[int, Callable[[], bool]]] = [
            (10, self._ask),
            (3, self._kill),
            (2, self._join),
            (3, self._revive),
            (2, self._freeze),
            (4, self._thaw),
            (4, self._cut),
            (2, self._flicker),
            (int(restarts), self._restart),
        ]

    def run(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        weights, deeds = zip(*self._deeds, strict=True)
        while time.monotonic() < deadline:
            (deed,) = self.random.choices(deeds, weights)
            if deed():
                self.done.append(deed.__name__)
            self.lab.wait_real_time(self.random.uniform(0.0, 0.15))

    def settle(self) -> list[Talk]:
        """The harm ends; what was asked is answered. Returns whom nothing excuses."""
        while self._thaw():
            pass
        return [talk for talk in self._talks if talk not in self._excused]

    def _healthy(self) -> list[LabWorker]:
        nodes = self.lab.state.nodes
        return [
            worker
            for worker in self.lab.workers
            if worker not in self._frozen and worker.node in nodes and nodes[worker.node].status == "ready"
        ]

    def _victim(self) -> LabWorker | None:
        healthy = self._healthy()
        return self.random.choice(healthy) if len(healthy) > NEEDED + 1 else None

    def _ask(self) -> bool:
        if sum(not talk.is_over for talk in self._talks) < 12:
            count = self.random.randint(1, 4)
            self._talks += [self.lab.start(each) for each in self.random.sample(self._requests, count)]
        return True

    def _kill(self) -> bool:
        victim = self._victim()
        if victim is not None:
            self.lab.kill(victim)
            self._dead.append(victim)
        return victim is not None

    def _freeze(self) -> bool:
        victim = self._victim()
        if victim is not None:
            self.lab.freeze(victim)
            self._frozen.append(victim)
        return victim is not None

    def _thaw(self) -> bool:
        if not self._frozen:
            return False
        self.lab.thaw(self._frozen.pop(self.random.randrange(len(self._frozen))))
        return True

    def _join(self) -> bool:
        if len(self.lab.workers) >= MOST_WORKERS:
            return False
        self.lab.add_worker(2)
        return True

    def _revive(self) -> bool:
        if not self._dead or len(self.lab.workers) >= MOST_WORKERS:
            return False
        self.lab.revive(self._dead.pop(self.random.randrange(len(self._dead))))
        return True

    def _cut(self) -> bool:
        ring = [self.lab.cluster.node, *self.lab.chain().nodes, self.lab.cluster.node]
        place = self.random.randrange(len(ring) - 1)
        return self.lab.network.cut(ring[place], ring[place + 1]) > 0

    def _flicker(self) -> bool:
        healthy = self._healthy()
        return bool(healthy) and self.lab.network.break_control(self.random.choice(healthy).node) > 0

    def _restart(self) -> bool:
        self._excused.update(talk for talk in self._talks if not talk.is_over)
        self.lab.kill_cluster()
        self.lab.open_cluster()
        self.lab.serve()
        self.lab.wait_serving()
        return True


def assert_survives(
    folder: Path, tiny: Path, alone: Alone, *, seed: int, seconds: float, restarts: bool = False
) -> None:
    threads, files = count_threads(), open_files()
    with swarm(folder, tiny, layers=(2,) * WORKERS, stages=NEEDED) as lab:
        chaos = Chaos(lab, alone, seed, restarts=restarts)
        chaos.run(seconds)
        talks = chaos.settle()
        assert len(talks) > seconds
        assert len(set(chaos.done)) >= 7, f"hardly any chaos: {chaos.done}"
        for talk in talks:
            try:
                assert talk.result() == alone.answer(talk.request)
            except ShardComputeError as error:
                pytest.fail(f"{error} after {chaos.done}; {lab.describe()}")
        lab.wait_serving(stages=NEEDED)
        lab.wait_quiet()
        assert all(worker.logged_bytes() == 0 for worker in lab.workers)
    wait_until(lambda: not lab.network.open_links(), lambda: f"links end: {lab.network.open_links()}", 30.0)
    wait_until(lambda: count_threads() <= threads, lambda: f"threads end: {names_of_threads()}", 30.0)
    wait_until(
        lambda: len(open_files() - files) == 0, lambda: f"files are closed: {open_files() - files}", 30.0
    )


def count_threads() -> int:
    return threading.active_count()


def names_of_threads() -> list[str]:
    return sorted(thread.name for thread in threading.enumerate())


def open_files() -> Counter[str]:
    """What is open, where the system tells: paths, and how many sockets and pipes."""
    found: Counter[str] = Counter()
    for entry in Path("/proc/self/fd").glob("*"):
        with contextlib.suppress(OSError):
            found[os.readlink(entry).partition(":[")[0]] += 1
    return found


@pytest.mark.long
@pytest.mark.parametrize("seed", [1, 2])
def test_a_bad_quarter_of_a_minute(tmp_path: Path, tiny: Path, alone: Alone, seed: int) -> None:
    assert_survives(tmp_path, tiny, alone, seed=seed, seconds=8.0)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(10, 16))
def test_two_bad_minutes(tmp_path: Path, tiny: Path, alone: Alone, seed: int) -> None:
    assert_survives(tmp_path, tiny, alone, seed=seed, seconds=120.0, restarts=seed % 2 == 1)
