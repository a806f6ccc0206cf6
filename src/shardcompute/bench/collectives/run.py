"""Starts the ranks of `bench collectives` on this machine and collects what they measured."""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from shardcompute.bench.collectives import rank as rank_process
from shardcompute.bench.collectives.lan import LanNotes
from shardcompute.bench.collectives.rank import AUTO_NAME, RankTask
from shardcompute.bench.report import Result, Say
from shardcompute.collectives import Algorithm
from shardcompute.core.errors import BackendError, UsageError
from shardcompute.security.authority import ClusterAuthority
from shardcompute.security.identity import NodeIdentity
from shardcompute.security.names import Role

LINES = ("local", "tls", "tcp", "gloo")
LAN_LINE = "tls"
"""Over which emulated LANs go, as between machines."""
_LOOPBACK = "tcp://127.0.0.1:0"
_END_S = 10.0


@dataclass(frozen=True, slots=True)
class CollectivesBench:
    """`lines` are those of this machine; each of `rtt_ms` is an emulated LAN beside them."""

    ranks: Sequence[int] = (2, 3, 4)
    sizes: Sequence[int] = (1 << 10, 8 << 10, 64 << 10, 1 << 20)
    lines: Sequence[str] = LINES
    rtt_ms: Sequence[float] = ()
    mbit: float = 1000.0
    algorithms: Sequence[str] = (AUTO_NAME, *Algorithm)
    rounds: int = 5
    calls: int = 100


def run_collectives_bench(bench: CollectivesBench, say: Say) -> list[Result]:
    known = (AUTO_NAME, *Algorithm)
    wrong = [each for each in bench.lines if each not in LINES] + [
        each for each in bench.algorithms if each not in known
    ]
    if wrong:
        raise UsageError(
            f"there is no line or algorithm {wrong[0]!r}", hint=f"use some of {', '.join((*LINES, *known))}"
        )
    results: list[Result] = []
    for ranks in bench.ranks:
        for line in bench.lines:
            say(f"{ranks} ranks, {line}")
            results += _run_world(bench, ranks, line, 0.0)
        for rtt_ms in bench.rtt_ms:
            say(f"{ranks} ranks, emulated LAN of {rtt_ms:g} ms")
            results += _run_world(bench, ranks, LAN_LINE, rtt_ms)
    return results


def _run_world(bench: CollectivesBench, ranks: int, line: str, rtt_ms: float) -> list[Result]:
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="sc-")))
        url, lan = rank_url(line), folder / "lan"
        if rtt_ms:
            LanNotes.open(lan, ranks).become(rtt_ms, bench.mbit)
        tasks = [
            RankTask(
                rank=rank,
                ranks=ranks,
                line=line,
                url=url,
                lan=str(lan) if rtt_ms else "",
                folder=str(folder),
                sizes=bench.sizes,
                algorithms=bench.algorithms,
                rounds=bench.rounds,
                calls=bench.calls if not rtt_ms else max(10, bench.calls // 5),
                certificate_pem=papers["certificate_pem"],
                authority_pem=papers["authority_pem"],
            )
            for rank, papers in enumerate(rank_papers(folder, ranks))
        ]
        processes = [stack.enter_context(started_rank(task)) for task in tasks]
        met = [read_line(each) for each in processes]
        for process in processes:
            write_line(
                process, {"urls": [each["url"] for each in met], "nodes": [each.get("node") for each in met]}
            )
        told = [read_line(each) for each in processes]
    labels = {"ranks": ranks, "line": line if not rtt_ms else f"lan {rtt_ms:g} ms"}
    return [result for arm in told[0]["arms"] for result in _results(arm, labels)]


def _results(arm: Mapping[str, Any], labels: Mapping[str, Any]) -> Iterator[Result]:
    labels = {
        "algorithm": arm["algorithm"],
        **labels,
        "size": _size_name(arm["size_bytes"]),
        "chosen": arm["chosen"],
        "calls": arm["calls"],
    }
    for name in ("p10", "median", "p90"):
        yield Result(f"all_reduce_{name}", 1e6 * arm[f"{name}_s"], "µs", labels)
    yield Result("sent", arm["sent_bytes"] / arm["size_bytes"], "of the array", labels)


def _size_name(size_bytes: int) -> str:
    return f"{size_bytes >> 10} KB" if size_bytes < 1 << 20 else f"{size_bytes >> 20} MB"


def rank_url(line: str) -> str:
    """Where ranks listen on this machine; for gloo a port."""
    if line != "gloo":
        return _LOOPBACK
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return str(probe.getsockname()[1])


def rank_papers(folder: Path, ranks: int) -> list[dict[str, str]]:
    """Certificates of a cluster that lives as long as the measurement."""
    authority = ClusterAuthority.create(folder / "authority", "bench", now_s=time.time())
    papers = []
    for rank in range(ranks):
        identity = NodeIdentity.open(folder / f"n{rank}")
        certificate = authority.issue(
            identity.certificate_request(), node_id=identity.node_id, roles=[Role.WORKER], now_s=time.time()
        )
        papers.append({"certificate_pem": certificate, "authority_pem": authority.certificate_pem})
    return papers


@contextlib.contextmanager
def started_rank(task: RankTask, module: str = rank_process.__name__) -> Iterator[subprocess.Popen[str]]:
    """A process that runs `module` and has been told its task."""
    process = subprocess.Popen(
        [sys.executable, "-m", module],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        write_line(process, asdict(task))
        yield process
        # What it has measured is told; where it ends too slowly, it is ended.
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=_END_S)
    finally:
        process.kill()
        process.communicate()


def write_line(process: subprocess.Popen[str], content: Mapping[str, Any]) -> None:
    if process.stdin is not None:
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(json.dumps(content) + "\n")
            process.stdin.flush()


def read_line(process: subprocess.Popen[str]) -> dict[str, Any]:
    line = process.stdout.readline() if process.stdout is not None else ""
    if not line:
        _, errors = process.communicate()
        last = errors.strip().splitlines()[-1:] or ["it said nothing"]
        raise BackendError(f"a rank ended early: {last[0]}")
    answer: dict[str, Any] = json.loads(line)
    return answer
