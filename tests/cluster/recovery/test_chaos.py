"""Everything at once and in any order: at the end every answer is right and nothing is left behind."""

from __future__ import annotations

import contextlib
import os
import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from shardcompute.core.errors import ShardComputeError
from shardcompute.core.generation import GenerationRequest, Speculation
from shardcompute.node.driver.standalone import StandaloneDriver
from support.models.requests import greedy, mixture, prompts, sampled
from support.network.lab_links import wait_until
from support.swarm.lab import DEADLINE_S, Alone, Answer, LabSwarm, LabWorker, Talk, swarm

WORKERS = 6
MOST_WORKERS = 8
MOST_DRIVERS = 2
NEEDED = 3
"""Machines that hold the model; so many are never touched, and one more."""
TOKENS = 50
DRAFTED = Speculation("ngram", 4, 2)


def wishes(alone: Alone) -> list[GenerationRequest]:
    """Requests of all kinds: some drafted, some with a long beginning in common."""
    plain = mixture(alone, 24, TOKENS)
    shared = max(prompts(alone.service.tokenizer), key=len)[:200]
    alike = [
        kind((*shared[: 200 - 40 * (i % 3)], 70 + i), TOKENS) for i in range(4) for kind in (greedy, sampled)
    ]
    drafted = [replace(request, speculation=DRAFTED) for request in (*plain[:8], *alike[:4])]
    return [*plain, *alike, *drafted]


def truth(alone: Alone, request: GenerationRequest) -> Answer:
    """What one process answers that drafts nothing and shares nothing with anybody."""
    return alone.answer(replace(request, cache_salt=repr(request), speculation=Speculation("off")))


class Chaos:
    """Random harm to a swarm under random load, the same for the same seed as far as timing allows."""

    def __init__(self, lab: LabSwarm, alone: Alone, seed: int, *, restarts: bool) -> None:
        self.lab = lab
        self.random = random.Random(seed)
        self.done: list[str] = []
        self._requests = wishes(alone)
        self._talks: dict[Talk, StandaloneDriver | None] = {}
        """Who was asked: one of the other drivers, or the coordinator's own."""
        self._excused: set[Talk] = set()
        self._frozen: list[LabWorker] = []
        self._dead: list[LabWorker] = []
        self._deeds: dict[Callable[[], bool], int] = {
            self._ask: 10,
            self._kill: 3,
            self._join: 2,
            self._revive: 3,
            self._freeze: 2,
            self._thaw: 4,
            self._cut: 4,
            self._flicker: 2,
            self._start_driver: 2,
            self._kill_driver: 1,
        }
        if restarts:
            self._deeds[self._restart] = 1

    def run(self, seconds: float) -> None:
        """Disturbances at random for so long, and longer where one of them has not come about yet."""
        deadline = time.monotonic() + seconds
        missing = self.random.sample(list(self._deeds), len(self._deeds))
        while time.monotonic() < deadline or missing:
            assert time.monotonic() < deadline + DEADLINE_S, f"never happened: {missing} in {self.done}"
            (deed,) = self.random.choices(list(self._deeds), list(self._deeds.values()))
            if missing and self.random.random() < 0.5:
                deed = missing[0]
                missing.append(missing.pop(0))
            if deed():
                self.done.append(deed.__name__)
                missing = [each for each in missing if each != deed]
            self.lab.wait_real_time(self.random.uniform(0.0, 0.15))

    @property
    def asked(self) -> int:
        return len(self._talks)

    def settle(self) -> list[Talk]:
        """The harm ends; what was asked is answered. Returns whom nothing excuses."""
        while self._thaw():
            pass
        return [talk for talk in self._talks if talk not in self._excused]

    def _excuse(self, driver: StandaloneDriver | None) -> None:
        """Whoever is being answered by a driver that dies will not be."""
        self._excused.update(
            talk for talk, asked in self._talks.items() if asked is driver and not talk.is_over
        )

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
            ready = [driver for driver in self.lab.drivers if driver.pool.is_ready()]
            for request in self.random.sample(self._requests, self.random.randint(1, 4)):
                driver = self.random.choice([None, *ready])
                self._talks[self.lab.start(request, driver=driver)] = driver
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
        """A link of the ring of one of the drivers."""
        head = self.random.choice([self.lab.cluster.node, *(driver.node for driver in self.lab.drivers)])
        ring = [head, *self.lab.chain().nodes, head]
        place = self.random.randrange(len(ring) - 1)
        return self.lab.network.cut(ring[place], ring[place + 1]) > 0

    def _flicker(self) -> bool:
        nodes = [each.node for each in (*self._healthy(), *self.lab.drivers)]
        return bool(nodes) and self.lab.network.break_control(self.random.choice(nodes)) > 0

    def _start_driver(self) -> bool:
        if len(self.lab.drivers) >= MOST_DRIVERS:
            return False
        self.lab.add_driver()
        return True

    def _kill_driver(self) -> bool:
        """One that has been of use."""
        asked = set(self._talks.values())
        useful = [driver for driver in self.lab.drivers if driver in asked]
        if useful:
            victim = self.random.choice(useful)
            self._excuse(victim)
            self.lab.kill_driver(victim)
        return bool(useful)

    def _restart(self) -> bool:
        self._excuse(None)
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
        # Whoever is excused by the death of a driver was a burden to the others before that.
        assert chaos.asked > seconds / 2, chaos.done
        assert talks
        for talk in talks:
            try:
                assert talk.result() == truth(alone, talk.request)
            except ShardComputeError as error:
                pytest.fail(f"{error} after {chaos.done}; {lab.describe()}")
        lab.wait_serving(stages=NEEDED)
        lab.wait_driving(*lab.drivers)
        lab.wait_quiet()
        wait_until(
            lambda: all(worker.logged_bytes() == 0 for worker in lab.workers), "logs are empty", DEADLINE_S
        )
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


@pytest.mark.ci
@pytest.mark.parametrize("seed", [2, *(pytest.param(seed, marks=pytest.mark.long) for seed in (1, 3))])
def test_a_bad_quarter_of_a_minute(tmp_path: Path, tiny: Path, alone: Alone, seed: int) -> None:
    assert_survives(tmp_path, tiny, alone, seed=seed, seconds=8.0)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(10, 16))
def test_two_bad_minutes(tmp_path: Path, tiny: Path, alone: Alone, seed: int) -> None:
    assert_survives(tmp_path, tiny, alone, seed=seed, seconds=120.0, restarts=seed % 2 == 1)
