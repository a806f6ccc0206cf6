"""Fine-tuning through processes that are killed amid it: the adapter has the bytes of a run that nobody disturbed."""

from __future__ import annotations

import contextlib
import json
import random
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from support.models.tiny_checkpoint import save_tiny_llama
from support.swarm.processes import Started, run, started

STEPS = 24
WORDS = ("red", "green", "blue", "one", "two", "three", "up", "down", "left", "right")
OPTIONS = (
    "--steps", STEPS, "--batch", 4, "--micro-batches", 4, "--rank", 2, "--rate", 1e-2, "--dropout", 0.1,
    "--max-length", 48, "--checkpoint-every", 3, "--no-samples",
)  # fmt: skip
WORKERS = 2
ADAPTER = "adapter_model.safetensors"


def write_data(folder: Path) -> Path:
    chance = random.Random(3)
    lines = [" ".join(chance.choices(WORDS, k=6)) for _ in range(20)]
    file = folder / "data.jsonl"
    file.write_text("\n".join(json.dumps({"text": line}) for line in lines))
    return file


def free_ports(count: int) -> list[str]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [str(each.getsockname()[1]) for each in sockets]


class Machines:
    """A coordinator and workers as processes of their own, each of which can be killed and comes back."""

    def __init__(self, model: Path, folder: Path, stack: contextlib.ExitStack) -> None:
        self.model, self.folder, self._stack = model, folder, stack
        api, cluster, join = free_ports(3)
        self._ports = ("--port", api, "--cluster-port", cluster, "--join-port", join)
        self.coordinator = self._coordinate()
        self._token = self.coordinator.wait_for(r"shardcompute join (sc1\.\S+)")[1]
        self.workers = [self._join(number) for number in range(WORKERS)]

    def finetune(self, data: Path, out: Path) -> Started:
        self.coordinator.wait_for("is served by")
        return self._start(
            "finetune", self.model, data, "--out", out, *OPTIONS, "--swarm", "--data-dir", self.folder / "c"
        )

    def kill_worker(self, chance: random.Random) -> None:
        number = chance.randrange(WORKERS)
        self.workers[number].signal(signal.SIGKILL)
        self.workers[number] = self._join(number)

    def kill_coordinator(self) -> None:
        self.coordinator.signal(signal.SIGKILL)
        self.coordinator = self._coordinate()

    def _coordinate(self) -> Started:
        return self._start(
            "coordinator", self.model, "--data-dir", self.folder / "c", *self._ports, "--kv-tokens", "2048"
        )

    def _join(self, number: int) -> Started:
        folder = self.folder / f"w{number}"
        return self._start("join", self._token, "--data-dir", folder, "--threads", "1")

    def _start(self, *arguments: object) -> Started:
        return self._stack.enter_context(started(*map(str, arguments)))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_data(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def expected(model: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    out = tmp_path_factory.mktemp("alone") / "adapter"
    done = run("finetune", model, data, "--out", out, *map(str, OPTIONS), "--threads", "1")
    assert done.returncode == 0, done.stderr
    return (out / ADAPTER).read_bytes()


@pytest.fixture
def machines(model: Path, tmp_path: Path) -> Iterator[Machines]:
    with contextlib.ExitStack() as stack:
        yield Machines(model, tmp_path, stack)


def teach(machines: Machines, data: Path, out: Path, kills: list[tuple[int, str]], seed: int) -> None:
    """A run during which, after the step of each, somebody is killed; to its end."""
    chance = random.Random(seed)
    run = machines.finetune(data, out)
    for step, victim in kills:
        run.wait_for(rf"step {step}/{STEPS}:")
        kill: dict[str, Callable[[], object]] = {
            "worker": lambda: machines.kill_worker(chance),
            "coordinator": machines.kill_coordinator,
            "driver": lambda run=run: run.signal(signal.SIGKILL),
        }
        kill[victim]()
        if victim == "driver":
            run = machines.finetune(data, out)
    run.wait_for("taught in")
    assert run.end() == 0


@pytest.mark.timeout(240)
def test_a_killed_worker_and_driver_change_no_byte(
    machines: Machines, data: Path, expected: bytes, tmp_path: Path
) -> None:
    teach(machines, data, tmp_path / "out", [(4, "worker"), (10, "driver")], 0)
    assert (tmp_path / "out" / ADAPTER).read_bytes() == expected


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", range(6))
def test_whoever_is_killed_changes_no_byte(
    machines: Machines, data: Path, expected: bytes, tmp_path: Path, seed: int
) -> None:
    chance = random.Random(seed)
    steps = sorted(chance.sample(range(2, STEPS - 1), 3))
    victims = [chance.choice(("worker", "driver", "coordinator")) for _ in steps]
    teach(machines, data, tmp_path / "out", list(zip(steps, victims, strict=True)), seed)
    assert (tmp_path / "out" / ADAPTER).read_bytes() == expected
