"""Clusters as users start them: real processes in folders of their own, on free ports."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil

from shardcompute.bench.stages import memory_per_stage
from shardcompute.security.local_secret import read_local_secret

COMMAND = (sys.executable, "-m", "shardcompute")
FREE_PORTS = ("--port", "0", "--cluster-port", "0", "--join-port", "0")
PATIENCE_S = 60.0


def memory_for(model: Path, stages: int) -> tuple[str, str]:
    """So much for each worker that so many hold the model with KV for 2048 tokens together, and fewer do not."""
    memory = memory_per_stage(str(model), "native", stages, kv_tokens=2048, context=8192)
    return "--max-memory", str(memory)


class Started:
    """A command that is running, and the lines that it has said so far."""

    def __init__(self, *arguments: str | Path, within: tuple[str, ...] = ()) -> None:
        self.process = subprocess.Popen(
            [*within, *COMMAND, *map(str, arguments)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env={**os.environ, "NO_COLOR": "1"},
        )
        self.lines: list[str] = []
        self._changed = threading.Condition()
        self._has_ended = False
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        return self.process.pid

    def wait_for(self, pattern: str) -> re.Match[str]:
        """The first line that matches, said already or yet to come."""
        deadline = time.monotonic() + PATIENCE_S
        with self._changed:
            while True:
                for line in self.lines:
                    if found := re.search(pattern, line):
                        return found
                left_s = deadline - time.monotonic()
                assert not self._has_ended, f"ended without {pattern!r}: {self.lines}"
                assert left_s > 0, f"no {pattern!r} in {self.lines}"
                self._changed.wait(left_s)

    def signal(self, number: int) -> int:
        """Send a signal and wait for the exit code."""
        self.process.send_signal(number)
        return self.end()

    def end(self) -> int:
        code = self.process.wait(PATIENCE_S)
        self._reader.join(PATIENCE_S)
        return code

    def children(self) -> list[psutil.Process]:
        return psutil.Process(self.pid).children(recursive=True)

    def _read(self) -> None:
        assert self.process.stderr is not None
        for raw in self.process.stderr:
            with self._changed:
                self.lines.append(raw.decode(errors="replace").rstrip("\n"))
                self._changed.notify_all()
        with self._changed:
            self._has_ended = True
            self._changed.notify_all()
        self.process.stderr.close()


class Swarm:
    """A cluster that serves."""

    def __init__(self, started: Started, folder: Path) -> None:
        self.started = started
        self.folder = folder
        self.url = started.wait_for(r"is ready at (http://\S+)")[1]
        self.token = started.wait_for(r"shardcompute join (sc1\.\S+)")[1]
        started.wait_for("Ctrl-C stops it")

    def state(self) -> dict[str, Any]:
        state: dict[str, Any] = self.ask("GET", "/cluster/state")
        return state

    def ask(self, method: str, path: str, body: object = None) -> Any:
        """As a command on this machine would."""
        headers = {"authorization": f"Bearer {read_local_secret(self.folder)}"}
        content = None if body is None else json.dumps(body).encode()
        headers |= {} if body is None else {"content-type": "application/json"}
        order = urllib.request.Request(f"{self.url}{path}", content, headers, method=method)
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(order) as answer:
            return json.load(answer)

    def node_names(self) -> dict[str, str]:
        """Of live nodes, by id."""
        return {n["id"]: n["name"] for n in self.state()["nodes"] if n["status"] not in ("lost", "gone")}

    def stage_names(self) -> list[str]:
        """Who serves, from the first layers to the last; [] while nobody does."""
        state = self.state()
        names = {node["id"]: node["name"] for node in state["nodes"]}
        chains = [chain for chain in state["chains"] if chain["status"] == "ready"]
        return [names[stage["node"]] for stage in chains[0]["stages"]] if chains else []

    def worker(self, name: str) -> psutil.Process:
        """The process of a local worker."""
        [found] = [child for child in self.started.children() if name in child.cmdline()]
        return found

    def wait_until(self, is_so: Callable[[], object], patience_s: float = PATIENCE_S) -> None:
        deadline = time.monotonic() + patience_s
        while not is_so():
            assert time.monotonic() < deadline, self.state()
            time.sleep(0.1)


@contextlib.contextmanager
def started(*arguments: str | Path, within: tuple[str, ...] = ()) -> Iterator[Started]:
    """A command that is gone, with all its children, when the block ends."""
    command = Started(*arguments, within=within)
    try:
        yield command
    finally:
        family = []
        with contextlib.suppress(psutil.NoSuchProcess):
            family = [*command.children(), psutil.Process(command.pid)]
        for process in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        command.end()


@contextlib.contextmanager
def swarm_of(model: Path, folder: Path, *arguments: str, within: tuple[str, ...] = ()) -> Iterator[Swarm]:
    with started("up", model, "--data-dir", folder, *FREE_PORTS, *arguments, within=within) as command:
        yield Swarm(command, folder)


def wait_gone(processes: list[psutil.Process]) -> list[psutil.Process]:
    """Those that are still there after a while."""
    return psutil.wait_procs(processes, timeout=PATIENCE_S)[1]


def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *map(str, arguments)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_S,
    )
