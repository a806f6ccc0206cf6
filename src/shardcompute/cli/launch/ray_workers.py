"""Workers on a Ray cluster: one detached actor on each node that keeps a worker's process, found again by its name."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from shardcompute.cli.launch.invitation import READY, LaunchOutcome
from shardcompute.core.errors import UsageError
from shardcompute.version import VERSION

NAMESPACE = "shardcompute"
_PREFIX = "worker-"
_STOP_S = 20.0
_LOOK_S = 0.2


class WorkerKeeper:
    """Runs inside an actor on a node of the Ray cluster; ends its worker with itself."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, release: str, token: str, options: list[str], folder: str, timeout_s: float) -> str:
        """ "" once the worker serves, or why it does not. `release` is that of whoever asks."""
        if release != VERSION:
            return f"it has release {VERSION}, and who launches it {release}: install the same on both"
        place = Path(folder).expanduser() if folder else Path(tempfile.mkdtemp(prefix="shardcompute-ray-"))
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
        log = place / "launch.log"
        with log.open("wb") as output:
            command = [sys.executable, "-m", "shardcompute", "worker", "--token", "-"]
            self._process = subprocess.Popen(
                [*command, "--data-dir", str(place), *options],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
            )
        assert self._process.stdin is not None
        with self._process.stdin as given:
            given.write(f"{token}\n".encode())
        deadline_s = time.monotonic() + timeout_s
        while time.monotonic() < deadline_s:
            said = log.read_text(errors="replace")
            if re.search(READY, said):
                return ""
            if self._process.poll() is not None:
                return " ".join(said.splitlines()[-3:]) or "it ended at once"
            time.sleep(_LOOK_S)
        self.stop()
        return f"it did not serve within {timeout_s:g} s"

    def stop(self) -> None:
        if self._process is None or self._process.poll() is not None:
            return
        # Ray's own processes ignore SIGINT, and so do those that they start.
        self._process.terminate()
        try:
            self._process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def import_ray() -> Any:
    try:
        import ray  # type: ignore[import-not-found, unused-ignore]
    except ImportError as error:
        raise UsageError(
            "Ray is not installed here",
            hint="pip install 'shardcompute[ray]', in the release that the cluster has",
        ) from error
    return ray


def connect(ray: Any, address: str) -> None:
    """To a Ray cluster that is there; none is started."""
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    try:
        ray.init(
            address=address,
            namespace=NAMESPACE,
            log_to_driver=False,
            configure_logging=False,
            ignore_reinit_error=True,
        )
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise UsageError(
            f"no Ray cluster answers at {address!r}: {str(error).splitlines()[0]}",
            hint="run this on one of its nodes, or give --address ray://HOST:10001",
        ) from error


def start_workers(
    ray: Any, token: str, options: Sequence[str], *, folder: str, cpus: float, timeout_s: float
) -> Iterator[LaunchOutcome]:
    """On every node that is there and has none yet."""
    from ray.util.scheduling_strategies import (  # type: ignore[import-not-found, unused-ignore]
        NodeAffinitySchedulingStrategy,
    )

    taken = set(_names(ray))
    keeper = ray.remote(WorkerKeeper)
    begun: list[tuple[str, Any, Any]] = []
    for node in alive_nodes(ray):
        name, host = f"{_PREFIX}{node['NodeID']}", str(node["NodeManagerHostname"])
        if name in taken:
            yield LaunchOutcome(host, text="has a worker already")
            continue
        actor = keeper.options(
            name=name,
            lifetime="detached",
            num_cpus=cpus,
            max_concurrency=2,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node_id=node["NodeID"], soft=False),
        ).remote()
        begun.append((host, actor, actor.start.remote(VERSION, token, list(options), folder, timeout_s)))
    for host, actor, answer in begun:
        error = _answer(ray, answer, timeout_s + _STOP_S)
        if error:
            ray.kill(actor)
            yield LaunchOutcome(host, error=f"the worker does not run: {error}")
        else:
            yield LaunchOutcome(host, text="a worker runs")


def stop_workers(ray: Any) -> Iterator[LaunchOutcome]:
    for name in _names(ray):
        actor = ray.get_actor(name, namespace=NAMESPACE)
        error = _answer(ray, actor.stop.remote(), 2 * _STOP_S)
        ray.kill(actor)
        yield LaunchOutcome(name, text="stopped") if not error else LaunchOutcome(name, error=error)


def alive_nodes(ray: Any) -> list[dict[str, Any]]:
    return [node for node in ray.nodes() if node["Alive"]]


def _answer(ray: Any, answer: Any, timeout_s: float) -> str:
    try:
        return str(ray.get(answer, timeout=timeout_s) or "")
    except ray.exceptions.RayError as error:
        return shlex.join(str(error).splitlines()[:1])


def _names(ray: Any) -> list[str]:
    listed = ray.util.list_named_actors(all_namespaces=True)
    return [
        each["name"] for each in listed if each["namespace"] == NAMESPACE and each["name"].startswith(_PREFIX)
    ]
