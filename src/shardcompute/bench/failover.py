"""`bench failover`: a worker is killed or frozen mid-sentence; how long the client waits, and whether it notices."""

from __future__ import annotations

import os
import signal
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from shardcompute.bench.report import Result, Say
from shardcompute.bench.servers import Server, StreamedReply, cluster_arguments, serving
from shardcompute.core.errors import BackendError
from shardcompute.security import NodeIdentity


@dataclass(frozen=True, slots=True)
class FailoverBench:
    """`workers` are stages and standbys together; each stage in turn is lost in each way."""

    model_path: str
    form: str = "native"
    workers: int = 3
    max_memory: str = ""
    kv_tokens: int = 4096
    tokens: int = 160
    after_tokens: int = 40


def run_failover_bench(bench: FailoverBench, say: Say) -> list[Result]:
    results: list[Result] = []
    for how in ("SIGKILL", "SIGSTOP"):
        stage = 0
        while True:
            say(f"{how} on stage {stage}: starting {bench.workers} workers")
            arguments = cluster_arguments(bench.workers, bench.form, "--kv-tokens", str(bench.kv_tokens))
            if bench.max_memory:
                arguments += ["--max-memory", bench.max_memory]
            with serving("swarm", bench.model_path, arguments) as server:
                chain = _chain(server)
                count = len(chain["stages"])
                results += _lose(bench, server, stage, how, say)
            stage += 1
            if stage >= count:
                break
    return results


def _lose(bench: FailoverBench, server: Server, stage: int, how: str, say: Say) -> list[Result]:
    prompt = [int(token) for token in np.random.default_rng(1).integers(100, 40_000, 24)]
    undisturbed = server.stream(prompt, bench.tokens)
    _await_standby(server)
    chain = _chain(server)
    if stage >= len(chain["stages"]):
        say("this time fewer machines were enough: nothing to lose there (--max-memory settles how many)")
        return []
    victim = chain["stages"][stage]["node"]
    worker = _process_of(server, victim)
    outcome: list[StreamedReply | Exception] = []
    events: dict[str, float] = {}
    lost_s = [0.0]

    def watch() -> None:
        """When the cluster gave the victim up, and when the chain worked again."""
        epoch = chain["epoch"]
        while "resumed" not in events and time.perf_counter() - lost_s[0] < 60:
            state = server.state()
            node = next((n for n in state["nodes"] if n["id"] == victim), None)
            now = time.perf_counter()
            if "detected" not in events and (node is None or node["status"] in ("suspected", "lost", "gone")):
                events["detected"] = now
            current = next((c for c in state["chains"] if c["id"] == chain["id"]), None)
            if current is not None and current["epoch"] > epoch and current["status"] == "ready":
                events["resumed"] = now
            time.sleep(0.02)

    def ask() -> None:
        try:
            outcome.append(server.stream(prompt, bench.tokens))
        except Exception as error:
            outcome.append(error)

    asking = threading.Thread(target=ask)
    asking.start()
    time.sleep(bench.after_tokens * (undisturbed.arrivals_s[-1] / bench.tokens))
    say(f"{how} on stage {stage}")
    lost_s[0] = time.perf_counter()
    os.kill(worker.pid, getattr(signal, how))
    watching = threading.Thread(target=watch)
    watching.start()
    asking.join()
    watching.join()
    if how == "SIGSTOP":
        psutil.Process(worker.pid).kill()
    disturbed = outcome[0]
    if isinstance(disturbed, Exception):
        raise BackendError(f"the stream broke: {disturbed}")
    labels = {"stage": stage, "how": how, "has_standby": bool(chain["standbys"])}
    results = [
        Result("same_text", float(disturbed.text == undisturbed.text), "fraction", labels),
        Result("longest_gap", max(disturbed.gaps_s), "s", labels),
    ]
    times = {name: events[name] - lost_s[0] for name in ("detected", "resumed") if name in events}
    return results + [Result(name, seconds, "s", labels) for name, seconds in times.items()]


def _chain(server: Server) -> dict[str, Any]:
    chains: list[dict[str, Any]] = server.state()["chains"]
    return chains[0]


def _await_standby(server: Server, most_s: float = 20.0) -> None:
    """Give spare workers time to become standbys; go on without where there are none."""
    deadline = time.monotonic() + most_s
    while time.monotonic() < deadline:
        state = server.state()
        busy = {stage["node"] for stage in state["chains"][0]["stages"]}
        spare = [node for node in state["nodes"] if node["id"] not in busy]
        if not spare or all(node.get("layers") or node.get("shards") for node in spare):
            return
        time.sleep(0.2)


def _process_of(server: Server, node: str) -> psutil.Process:
    """The local worker process that runs a node."""
    for child in psutil.Process(server.process.pid).children(recursive=True):
        command = " ".join(child.cmdline())
        if "worker" not in command:
            continue
        folder = next((part for part in child.cmdline() if part.startswith(str(server.folder))), "")
        if _node_of(folder) == node:
            return child
    raise BackendError(f"no local process runs the node {node}")


def _node_of(folder: str) -> str:
    for path in (Path(folder), Path(folder) / "identity"):
        try:
            return NodeIdentity.load(path).node_id
        except OSError:
            continue
    return ""
