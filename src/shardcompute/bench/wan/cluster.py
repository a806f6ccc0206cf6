"""A real cluster on an emulated network: the coordinator on the first machine, a worker on each of the others.

Weights travel before anything is measured: start it under the conditions of a LAN, then impose those to measure.
"""

from __future__ import annotations

import contextlib
import re
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from shardcompute.bench.servers import last_words, running
from shardcompute.bench.stages import memory_per_stage
from shardcompute.bench.streaming import ask_at_once, chunks_of
from shardcompute.core.errors import BackendError
from shardcompute.security.private_files import create_private
from shardcompute.sim import EmulatedNetwork

_READY_S = 240.0
_ANSWER_S = 600.0
_DRAFTERS_S = 60.0
_TOKEN = re.compile(r"shardcompute join (sc1\.\S+)")


@dataclass(frozen=True, slots=True)
class WanServing:
    """What is served, and how each worker takes part.

    `max_memory_bytes` 0: with so much that `stages` of them hold the model, and fewer do not (`stages` 0: all workers).
    """

    model: str
    form: str = "native"
    kv_tokens: int = 24_576
    context: int = 4096
    threads: int = 1
    max_memory_bytes: int = 0
    stages: int = 0
    options: tuple[str, ...] = ()
    """More options of `shardcompute coordinator`."""


@dataclass(slots=True)
class TimedAnswer:
    """One streamed answer as its client saw it; `timings` is what the server said of it, {} if nothing."""

    text: str = ""
    tokens: int = 0
    prompt_tokens: int = 0
    first_s: float = 0.0
    last_s: float = 0.0
    longest_gap_s: float = 0.0
    pings: int = 0
    """Signs of life in between, while there was nothing to say."""
    timings: dict[str, Any] = field(default_factory=dict)


class WanCluster:
    """A cluster that serves. Everything asked of it comes from the coordinator's own machine."""

    def __init__(
        self,
        network: EmulatedNetwork,
        url: str,
        key: str,
        workers: Mapping[str, subprocess.Popen[bytes]],
        folder: Path,
    ) -> None:
        self.network = network
        self.folder = folder
        """The coordinator's."""
        self.workers = dict(workers)
        self._url = url
        self._headers = {"Authorization": f"Bearer {key}"}
        self._machine = network.machines[0]

    def state(self) -> dict[str, Any]:
        with self._client() as client:
            answer = client.get("/cluster/state")
            answer.raise_for_status()
            state: dict[str, Any] = answer.json()
        return state

    def stage_machines(self) -> list[str]:
        """Who serves, from the first layers to the last; [] while nobody does."""
        state = self.state()
        names = {node["id"]: node["name"] for node in state["nodes"]}
        ready = [chain for chain in state["chains"] if chain["status"] == "ready"]
        return [names[stage["node"]] for stage in ready[0]["stages"]] if ready else []

    def drafters(self) -> list[dict[str, Any]]:
        """What guesses tokens for the chain that serves, as `node.admin.drafters` tells it."""
        ready = [chain for chain in self.state()["chains"] if chain["status"] == "ready"]
        return list(ready[0]["drafters"]) if ready else []

    def tokenize(self, text: str) -> list[int]:
        with self._client() as client:
            answer = client.post("/tokenize", json={"prompt": text})
            answer.raise_for_status()
            ids: list[int] = answer.json()["tokens"]
        return ids

    def ask(self, body: Mapping[str, Any], *, on_piece: Callable[[int], None] | None = None) -> TimedAnswer:
        """Stream one greedy answer; `on_piece` hears how many pieces of text have come. Raises BackendError."""
        path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
        whole = {"temperature": 0, "stream": True, "stream_options": {"include_usage": True}, **body}
        answer = TimedAnswer()
        pieces = 0

        def on_ping() -> None:
            answer.pings += 1

        started = previous = time.perf_counter()
        with self._client() as client, client.stream("POST", path, json=whole) as response:
            for chunk in chunks_of(response, on_ping):
                now = time.perf_counter()
                if not _take(answer, chunk):
                    continue
                pieces += 1
                if pieces == 1:
                    answer.first_s = now - started
                else:
                    answer.longest_gap_s = max(answer.longest_gap_s, now - previous)
                answer.last_s, previous = now - started, now
                if on_piece is not None:
                    on_piece(pieces)
        return answer

    def ask_all(
        self, bodies: Sequence[Mapping[str, Any]], *, on_piece: Callable[[int], None] | None = None
    ) -> tuple[list[TimedAnswer], float]:
        """Several answers at once, and how long all of them took; `on_piece` hears of the pieces of each."""
        return ask_at_once(bodies, lambda body: self.ask(body, on_piece=on_piece))

    @contextlib.contextmanager
    def _client(self) -> Iterator[httpx.Client]:
        """A client whose connections are made on the coordinator's machine; for this thread alone."""
        with (
            self.network.inside(self._machine),
            httpx.Client(
                base_url=self._url, headers=self._headers, timeout=_ANSWER_S, trust_env=False
            ) as client,
        ):
            yield client


def _take(answer: TimedAnswer, chunk: dict[str, Any]) -> bool:
    """True if a chunk brought a piece of the answer."""
    if chunk.get("timings"):
        answer.timings = chunk["timings"]
    if chunk.get("usage"):
        answer.tokens = chunk["usage"]["completion_tokens"]
        answer.prompt_tokens = chunk["usage"]["prompt_tokens"]
    text = "".join(
        choice.get("text") or (choice.get("delta") or {}).get("content") or ""
        for choice in chunk.get("choices", ())
    )
    answer.text += text
    return bool(text)


@contextlib.contextmanager
def wan_cluster(network: EmulatedNetwork, serving: WanServing) -> Iterator[WanCluster]:
    """Started and ready; ended when the block is left."""
    first, *others = network.machines
    stages = serving.stages or len(others)
    memory = serving.max_memory_bytes or memory_per_stage(
        serving.model, serving.form, stages, kv_tokens=serving.kv_tokens, context=serving.context
    )
    key = f"sk-sc-{secrets.token_hex(20)}"
    with contextlib.ExitStack() as stack:
        folder = Path(
            stack.enter_context(
                tempfile.TemporaryDirectory(prefix="shardcompute-wan-", ignore_cleanup_errors=True)
            )
        )
        port = network.new_port(first)
        log = folder / "coordinator.log"
        key_file = folder / "keys"
        create_private(key_file, f"operate {key}\n".encode())
        command = _coordinator_command(network, serving, folder, port, key_file)
        coordinator = stack.enter_context(running(command, log))
        token = _await_token(coordinator, log)
        workers = {
            machine: stack.enter_context(
                running(
                    _worker_command(network, serving, machine, folder / machine, token, memory),
                    folder / f"{machine}.log",
                )
            )
            for machine in others
        }
        url = f"http://{network.host(first)}:{port}"
        cluster = WanCluster(network, url, key, workers, folder / "cluster")
        _await_ready(cluster, stages, folder)
        yield cluster


def _coordinator_command(
    network: EmulatedNetwork, serving: WanServing, folder: Path, port: int, key_file: Path
) -> list[str]:
    machine = network.machines[0]
    command = [sys.executable, "-m", "shardcompute", "coordinator", serving.model]
    command += ["--data-dir", str(folder / "cluster"), "--host", network.host(machine), "--port", str(port)]
    command += [
        "--cluster-port",
        str(network.new_port(machine)),
        "--join-port",
        str(network.new_port(machine)),
    ]
    command += ["--api-key-file", str(key_file), "--weights", serving.form, "--prefer", "throughput"]
    # The ring that is asked for goes through the first machine.
    command += ["--driver-placement", "here"]
    command += ["--kv-tokens", str(serving.kv_tokens), "--context", str(serving.context)]
    return network.command(machine, [*command, *network.options(machine), *serving.options])


def _worker_command(
    network: EmulatedNetwork, serving: WanServing, machine: str, folder: Path, token: str, memory: int
) -> list[str]:
    command = [sys.executable, "-m", "shardcompute", "worker", "--supervised", "--token", token]
    command += ["--data-dir", str(folder), "--name", machine, "--host", network.host(machine)]
    command += ["--port", str(network.new_port(machine)), "--threads", str(serving.threads)]
    command += ["--max-memory", str(memory)]
    return network.command(machine, [*command, *network.options(machine)])


def _await_token(coordinator: subprocess.Popen[bytes], log: Path) -> str:
    deadline = time.monotonic() + _READY_S
    while time.monotonic() < deadline and coordinator.poll() is None:
        found = _TOKEN.search(log.read_text(encoding="utf-8", errors="replace"))
        if found is not None:
            return found[1]
        time.sleep(0.05)
    raise BackendError(f"the coordinator did not start: {last_words(log)}")


def _await_ready(cluster: WanCluster, stages: int, folder: Path) -> None:
    deadline = time.monotonic() + _READY_S
    while time.monotonic() < deadline:
        with contextlib.suppress(httpx.HTTPError):
            if len(cluster.stage_machines()) >= stages:
                return
        dead = [name for name, process in cluster.workers.items() if process.poll() is not None]
        if dead:
            raise BackendError(f"{dead[0]} ended: {last_words(folder / f'{dead[0]}.log')}")
        time.sleep(0.1)
    raise BackendError(
        f"no chain of {stages} stages became ready in {_READY_S:g} s: {last_words(folder / 'coordinator.log')}"
    )


def await_drafters(cluster: WanCluster) -> None:
    """A chain serves before its last stage drafts. One that does not although it should would be measured as if it did:
    BackendError."""
    deadline = time.monotonic() + _DRAFTERS_S
    while True:
        idle = [each for each in cluster.drafters() if each["state"] != "at work"]
        if not idle:
            return
        if idle[0]["state"] == "missing" or time.monotonic() > deadline:
            raise BackendError(
                f"a drafter is not at work: {idle[0]['text']}", hint="give workers more with --max-memory"
            )
        time.sleep(0.1)
