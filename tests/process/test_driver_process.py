"""A driver in a process of its own: the same answers as the coordinator's, and nobody notices when it is killed."""

from __future__ import annotations

import json
import signal
import urllib.request
from pathlib import Path

from support.swarm.processes import Started, Swarm, memory_for, run, started, swarm_of

# No worker can hold the model alone.
TWO = ("--workers", "2", "--kv-tokens", "2048", "--threads", "1")


def complete(url: str) -> str:
    body = {"model": "default", "prompt": "Once upon a time", "max_tokens": 16, "temperature": 0}
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request, timeout=60) as reply:
        text: str = json.load(reply)["choices"][0]["text"]
    return text


def roles(swarm: Swarm) -> dict[str, str]:
    return {node["role"]: node["status"] for node in swarm.state()["nodes"]}


def ready(driver: Started) -> str:
    return driver.wait_for(r"is ready at (http://\S+)")[1]


def test_a_driver_comes_and_goes(smollm2_gguf: Path, tmp_path: Path) -> None:
    folder = tmp_path / "driver"
    with swarm_of(smollm2_gguf, tmp_path / "cluster", *TWO, *memory_for(smollm2_gguf, 2)) as swarm:
        assert len(swarm.stage_names()) == 2
        told = run("token", "create", "--role", "driver", "--data-dir", swarm.folder)
        token = told.stdout.split()[-1]
        assert run("join", token, "--data-dir", tmp_path / "worker").returncode != 0, "it is for drivers"
        expected = complete(swarm.url)
        with started("driver", token, "--data-dir", folder, "--api-port", "0", "--name", "porch") as driver:
            url = ready(driver)
            assert complete(url) == expected
            assert complete(swarm.url) == expected
            listed = run("nodes", "--data-dir", swarm.folder).stdout
            assert f"driver at {url}" in listed
            assert "porch (" in run("status", "--data-dir", swarm.folder).stdout
            assert driver.signal(signal.SIGKILL) == -signal.SIGKILL
        swarm.wait_until(lambda: roles(swarm)["driver"] == "lost")
        assert complete(swarm.url) == expected
        with started("driver", "--data-dir", folder, "--api-port", "0") as driver:
            assert complete(ready(driver)) == expected
            assert driver.signal(signal.SIGINT) == 0
            assert driver.lines[-1] == "stopped"


def test_a_folder_is_one_node_in_one_role(tmp_path: Path) -> None:
    nothing = run("driver", "--data-dir", tmp_path / "nothing")
    assert nothing.returncode == 2
    assert "shardcompute driver TOKEN" in nothing.stderr
