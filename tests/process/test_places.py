"""One `join`, several devices: a worker each, from one token of one use; they stop, come back and leave one by one.

The devices are made up, in every process that is started here: two that compute as the CPU does, under other names.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.swarm.processes import Swarm, run, started, swarm_of, wait_gone

MODEL = "SmolLM2-135M-Instruct.Q4_1"
SMALL = ("--kv-tokens", "2048", "--context", "512", "--threads", "1")
FAKE = """
from shardcompute.backends import device_choice, devices
from shardcompute.node.worker import speed_probe

probe = speed_probe.probe_backend
# What is measured on a GPU takes a CPU minutes.
speed_probe.probe_backend = lambda backend, device, threads: probe(backend, "cpu", threads)

def found(backend=""):
    gib = 1 << 30
    gpus = [
        devices.ComputeDevice(
            name=f"cuda:{n}", backend="onnx", label=f"Fake {n}", total_bytes=8 * gib, free_bytes=7 * gib
        )
        for n in range(2)
    ]
    useless = devices.ComputeDevice(
        name="cuda:2", backend="torch", label="Old Card", total_bytes=2 * gib, free_bytes=0,
        problem="its driver is too old", fix="update its driver",
    )
    return (*gpus, devices.host_device(), useless)

device_choice.find_devices = found
"""


@pytest.fixture(scope="module")
def swarm(smollm2_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Swarm]:
    folder = tmp_path_factory.mktemp("fake")
    (folder / "sitecustomize.py").write_text(FAKE)
    with pytest.MonkeyPatch.context() as monkeypatch:
        paths = [str(folder), *(path for path in sys.path if path), os.environ.get("PYTHONPATH", "")]
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
        with swarm_of(smollm2_gguf, folder / "cluster", *SMALL) as swarm:
            yield swarm


def test_up_starts_a_worker_on_each_gpu(swarm: Swarm) -> None:
    nodes = swarm.state()["nodes"]
    assert [(node["device"], node["device_label"], node["device_bytes"] >> 30) for node in nodes] == [
        ("cuda:0", "Fake 0", 8),
        ("cuda:1", "Fake 1", 8),
    ]
    assert [node["name"].rpartition("/")[2] for node in nodes] == ["cuda:0", "cuda:1"]
    swarm.started.wait_for("cuda:1: Fake 1, 8.0 GiB, 7.0 GiB free")
    swarm.started.wait_for("Old Card, 2.0 GiB: cannot be used, its driver is too old; update its driver")
    [[useless], []] = [node["unused_devices"] for node in nodes]
    assert (useless["label"], useless["fix"]) == ("Old Card", "update its driver")


def test_one_token_one_line_several_workers(swarm: Swarm, tmp_path: Path) -> None:
    token = swarm.ask("POST", "/cluster/tokens", {"max_uses": 1})["token"]
    arguments = ("--data-dir", tmp_path / "w", "--name", "box", "--threads", "1")
    with started("join", token, *arguments) as join:
        join.wait_for("2 workers of home: box/cuda:0, box/cuda:1; Ctrl-C stops them")
        join.wait_for("box/cuda:1: in the cluster")
        swarm.wait_until(lambda: {"box/cuda:0", "box/cuda:1"} <= set(swarm.node_names().values()))
        ids = {name: id for id, name in swarm.node_names().items() if name.startswith("box/")}
        assert run("join", token, *arguments).returncode == 2

        # One that dies comes back as the same node; the other takes no notice.
        [victim] = [child for child in join.children() if "box/cuda:1" in child.cmdline()]
        victim.kill()
        join.wait_for("cuda-1 was ended by SIGKILL; it is started again")
        swarm.wait_until(
            lambda: any(
                child.pid != victim.pid and "box/cuda:1" in child.cmdline() for child in join.children()
            )
        )
        swarm.wait_until(lambda: swarm.node_names().get(ids["box/cuda:1"]))

        # One that is emptied leaves; the other stays.
        assert run("drain", "box/cuda:1", "--data-dir", swarm.folder).returncode == 0
        join.wait_for("cuda-1 left the cluster")
        assert "box/cuda:0" in swarm.node_names().values()
        family = join.children()
        assert join.signal(signal.SIGTERM) == 0
        assert wait_gone(family) == []
    swarm.wait_until(lambda: not any(name.startswith("box/") for name in swarm.node_names().values()))

    # Without the token, the same nodes; and all of them stop together.
    with started("worker", *arguments) as worker:
        swarm.wait_until(lambda: set(ids.values()) <= set(swarm.node_names()))
        family = worker.children()
        assert run("down", "--data-dir", tmp_path / "w").returncode == 0
        assert worker.end() == 0
        assert wait_gone(family) == []
