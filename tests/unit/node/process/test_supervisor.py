"""The supervisor starts again what died, gives up in the end, and leaves nothing running."""

from __future__ import annotations

import queue
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from shardcompute.node.process.log_files import log_path
from shardcompute.node.process.supervisor import Program, RestartPolicy, Supervisor, spawn_process

WORKER = Program("worker-1", ("never", "run"))


class FakeChild:
    """Ends with `code` once told to; deaf ones end only when killed."""

    def __init__(
        self, pid: int, code: int | None, lines: tuple[str, ...] = (), *, is_deaf: bool = False
    ) -> None:
        self.pid = pid
        self._lines = lines
        self._is_deaf = is_deaf
        self._codes: queue.SimpleQueue[int] = queue.SimpleQueue()
        self.was_killed = False
        if code is not None:
            self._codes.put(code)

    def lines(self) -> Iterator[str]:
        return iter(self._lines)

    def wait(self) -> int:
        return self._codes.get()

    def ask_to_stop(self) -> None:
        if not self._is_deaf:
            self._codes.put(0)

    def kill(self) -> None:
        self.was_killed = True
        self._codes.put(-9)


@dataclass
class Stage:
    """Gives children out in order, and takes note of pauses and of what is said."""

    children: list[FakeChild]
    lives_s: float = 0.0
    pauses: list[float] = field(default_factory=list)
    said: list[str] = field(default_factory=list)
    started: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    now_s: float = 0.0
    _spawned: int = 0

    def spawn(self, program: Program) -> FakeChild:
        child = self.children[self._spawned]
        self._spawned += 1
        self.started.release()
        return child

    def clock(self) -> float:
        self.now_s += self.lives_s
        return self.now_s

    def supervisor(self, folder: Path, policy: RestartPolicy | None = None) -> Supervisor:
        return Supervisor(
            [WORKER],
            folder,
            spawn=self.spawn,
            policy=policy,
            clock=self.clock,
            pause=self.pauses.append,
            say=self.said.append,
        )


def test_pauses_grow_and_then_it_gives_up(tmp_path: Path) -> None:
    stage = Stage([FakeChild(n, 1, (f"life {n}",)) for n in range(4)])
    supervisor = stage.supervisor(tmp_path, RestartPolicy(1.0, 3.0, most_deaths=4))
    supervisor.start()
    supervisor.wait()
    assert stage.pauses == [1.0, 2.0, 3.0]
    assert stage.said[0] == "worker-1 ended with code 1; it is started again in 1 s"
    assert stage.said[-1] == "worker-1 ended with code 1 again and is not started any more"
    assert supervisor.pids() == {}
    written = log_path(tmp_path, "worker-1").read_text()
    assert written.index("life 0") < written.index("started again") < written.index("life 3")


def test_long_life_is_a_clean_slate(tmp_path: Path) -> None:
    stage = Stage([FakeChild(n, -11) for n in range(6)] + [FakeChild(6, 0)], lives_s=100.0)
    supervisor = stage.supervisor(tmp_path, RestartPolicy(most_deaths=3, healthy_after_s=60.0))
    supervisor.start()
    supervisor.wait()
    assert stage.pauses == [0.5] * 6
    assert "worker-1 was ended by SIGSEGV" in stage.said[0]
    assert stage.said[-1] == "worker-1 left the cluster (exit 0)"


@pytest.mark.parametrize(
    ("code", "said"), [(0, "left the cluster"), (2, "cannot start"), (10, "was refused")]
)
def test_some_ends_are_final(tmp_path: Path, code: int, said: str) -> None:
    stage = Stage([FakeChild(1, code)])
    supervisor = stage.supervisor(tmp_path)
    supervisor.start()
    supervisor.wait()
    assert stage.said == [f"worker-1 {said} (exit {code})"]
    assert stage.pauses == []


def test_stopping_ends_children_and_starts_no_others(tmp_path: Path) -> None:
    stage = Stage([FakeChild(7, None)])
    with stage.supervisor(tmp_path) as supervisor:
        assert stage.started.acquire(timeout=60)
    assert supervisor.pids() == {}
    assert not stage.children[0].was_killed
    assert stage.said == []


def test_deaf_children_are_killed(tmp_path: Path) -> None:
    stage = Stage([FakeChild(7, None, is_deaf=True)])
    supervisor = stage.supervisor(tmp_path)
    supervisor.start()
    assert stage.started.acquire(timeout=60)
    supervisor.stop(grace_s=0.0)
    assert stage.children[0].was_killed
    assert supervisor.pids() == {}


def test_program_that_cannot_be_started_counts_as_dead(tmp_path: Path) -> None:
    missing = Program("worker-1", (str(tmp_path / "missing"),))
    said: list[str] = []
    supervisor = Supervisor([missing], tmp_path, policy=RestartPolicy(most_deaths=1), say=said.append)
    supervisor.start()
    supervisor.wait()
    assert said == ["worker-1 ended with code 1 again and is not started any more"]


def test_real_child_hears_the_end_of_its_parent(tmp_path: Path) -> None:
    code = "import sys; print('hello', file=sys.stderr, flush=True); sys.stdin.read(); print('bye', file=sys.stderr)"
    child = spawn_process(Program("worker-1", (sys.executable, "-c", code)))
    lines = child.lines()
    assert next(lines) == "hello"
    child._process.stdin.close()  # type: ignore[attr-defined]
    assert list(lines) == ["bye"]
    assert child.wait() == 0


def test_secrets_stay_out_of_the_log(tmp_path: Path) -> None:
    secret = "sk-sc-" + "a" * 40
    stage = Stage([FakeChild(1, 0, (f"the key is {secret}",))])
    supervisor = stage.supervisor(tmp_path)
    supervisor.start()
    supervisor.wait()
    written = log_path(tmp_path, "worker-1").read_text()
    assert "the key is sk-sc-<redacted>" in written
    assert secret not in written
    assert log_path(tmp_path, "worker-1").stat().st_mode & 0o077 == 0
