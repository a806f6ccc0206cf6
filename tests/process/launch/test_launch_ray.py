"""`launch ray` on a real Ray of this machine: a worker on its node joins, serves, and is ended again."""

from __future__ import annotations

import importlib.util
import secrets
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from support.swarm.processes import run, started

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs the extra ray"),
]


@contextmanager
def local_ray(folder: Path) -> Iterator[str]:
    """Its address. One node with two processors; it holds what it started, and ends with it."""
    program = (
        "import ray, sys\n"
        f"ray.init(num_cpus=2, include_dashboard=False, object_store_memory=80_000_000, _temp_dir={str(folder)!r})\n"
        "print(ray.get_runtime_context().gcs_address, flush=True)\n"
        "sys.stdin.read()\n"
        "ray.shutdown()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as head:
        assert head.stdin is not None
        assert head.stdout is not None
        try:
            address = head.stdout.readline().strip()
            assert address, "Ray did not start"
            yield address
        finally:
            head.stdin.close()
            head.wait(120)


def test_a_worker_on_ray(
    smollm2_gguf: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Ray asks whoever connects for a token: this one is for this Ray alone, and both sides are given it.
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN", secrets.token_hex(32))
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    folder = tmp_path_factory.mktemp("r")
    cluster = folder / "cluster"
    common = ("--port", "0", "--cluster-port", "0", "--join-port", "0", "--data-dir", cluster)
    with local_ray(folder / "ray") as address, started("coordinator", smollm2_gguf, *common) as head:
        head.wait_for(r"the API listens at (http://\S+)")
        options = ("--address", address, "--folder", folder / "worker", "--data-dir", cluster)
        first = run("launch", "ray", *options, "--worker-options", "--name attic --threads 1")
        assert first.returncode == 0, first.stderr
        assert "a worker runs" in first.stderr
        head.wait_for(r"is ready at (http://\S+)")
        assert "attic" in run("nodes", "--data-dir", cluster).stdout
        again = run("launch", "ray", *options)
        assert "has a worker already" in again.stderr
        ended = run("launch", "ray", *options, "--stop")
        assert ended.returncode == 0, ended.stderr
        assert "1 machine stopped" in ended.stderr
        assert not (folder / "worker" / "worker.json").exists()
