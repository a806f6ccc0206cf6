"""One rank of `bench collectives`, a process of its own.

Reads its task as a line of JSON, says where it listens, reads where all listen, measures in step with the others, and
says what it found. Rank 0's figures count: all leave a call at about the same time.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from shardcompute.bench.collectives.lan import LanFabric, LanNotes, WallClock, WorkClock
from shardcompute.collectives import Algorithm, Array, FabricGroup, Group, TopologyChoice, World
from shardcompute.collectives.measuring import measure_lines
from shardcompute.collectives.torch_group import TorchMeeting, connect_torch
from shardcompute.collectives.worlds import ROLE, Membership, connect_world, hearing
from shardcompute.security.credentials import Credentials
from shardcompute.security.identity import NodeIdentity
from shardcompute.wire import VERSION_MAX, VERSION_MIN, Hello, Link, LinkOptions, TcpTransport, Transport
from shardcompute.wire.local_sockets import LocalSockets

AUTO_NAME = "auto"
_QUICK_BYTES = 128 << 10
_WORLD = "bench"


@dataclass(frozen=True, slots=True)
class RankTask:
    """`line`: local, tls, tcp or gloo; `lan` is a file of `LanNotes` by which it is slowed down: in the time of day, or
    where that `counts` in processor time."""

    rank: int
    ranks: int
    line: str
    url: str
    folder: str
    certificate_pem: str = ""
    authority_pem: str = ""
    lan: str = ""
    counts: bool = False
    sizes: Sequence[int] = ()
    algorithms: Sequence[str] = ()
    rounds: int = 3
    calls: int = 100


@dataclass(slots=True)
class ArmTimes:
    """One size and algorithm: seconds of every call, and bytes that this rank sent in one."""

    size_bytes: int
    algorithm: str
    chosen: str
    seconds: list[float] = field(default_factory=list)
    sent_bytes: float = 0.0


def main() -> None:
    task = RankTask(**json.loads(sys.stdin.readline()))
    if task.line == "gloo":
        say_line({"url": task.url})
        hear_line()
        group = connect_torch(TorchMeeting(task.rank, task.ranks, int(task.url)))
        arms = _measure(task, {"gloo": group}, lambda _, size: "gather")
        say_line({"arms": [_summary(each) for each in arms]})
        group.barrier()
        return
    world = connect_rank(task)
    groups = {
        name: world
        if name == AUTO_NAME
        else FabricGroup(world.world, TopologyChoice(Algorithm(name)), name=name)
        for name in task.algorithms
    }
    chosen = {
        name: (lambda size, group=group: group.algorithm_for(size).value) for name, group in groups.items()
    }
    arms = _measure(task, groups, lambda name, size: chosen[name](size))
    say_line({"arms": [_summary(each) for each in arms], "line": asdict(world.line)})
    world.barrier()
    world.close()


def connect_rank(task: RankTask) -> FabricGroup:
    """Say where this rank listens, hear where all do, and meet them."""
    identity = NodeIdentity.open(Path(task.folder, f"n{task.rank}"))
    is_secure = task.line in ("local", "tls")
    credentials = Credentials(identity, task.certificate_pem, task.authority_pem)
    cluster = credentials.own.cluster
    transport: Transport = TcpTransport(
        LocalSockets(Path(task.folder, "s")) if task.line == "local" else None
    )
    hello = Hello(VERSION_MIN, VERSION_MAX, identity.node_id, ROLE, cluster)
    listener = transport.listen(
        task.url, hello, LinkOptions(tls=credentials.server_context() if is_secure else None)
    )
    say_line({"url": listener.address, "node": identity.node_id})
    told = hear_line()
    urls, nodes = told["urls"], told["nodes"]
    tls = credentials.client_context() if is_secure else None

    def dial(rank: int) -> Link:
        return transport.dial(urls[rank], hello, LinkOptions(tls=tls, node=nodes[rank]))

    try:
        membership = Membership(_WORLD, 1, task.rank, nodes)
        spin_s = 0.0 if task.counts else None
        group = connect_world(membership, dial, hearing(listener.accept), spin_s=spin_s)
    finally:
        listener.close()
    return _slowed(group, task) if task.lan else group


def _slowed(group: FabricGroup, task: RankTask) -> FabricGroup:
    """The same ranks over an emulated LAN, which they measure anew where it takes time that can be measured."""
    notes = LanNotes.open(Path(task.lan), task.ranks)
    if task.counts:
        return FabricGroup(World(LanFabric(group.world.fabric, notes, WorkClock())), name="lan")
    fabric = LanFabric(group.world.fabric, notes, WallClock())
    slowed = FabricGroup(World(fabric, frame_s=group.world.frame_s), name="lan")
    measure_lines(slowed)
    return slowed


def _measure(
    task: RankTask, groups: Mapping[str, Group], chosen: Callable[[str, int], str]
) -> list[ArmTimes]:
    """Arms take turns, so that whatever else the machine does falls on all of them."""
    arms = [ArmTimes(size, name, chosen(name, size)) for size in task.sizes for name in groups]
    for turn in range(-1, task.rounds):
        for arm in arms:
            group = groups[arm.algorithm]
            array: Array = np.full(arm.size_bytes // 4, 1.0 + task.rank, np.float32)
            calls = task.calls if arm.size_bytes <= _QUICK_BYTES else max(3, task.calls // 10)
            seconds, sent_bytes = _time_calls(group, array, calls)
            if turn >= 0:
                # The first turn warms up.
                arm.seconds += seconds
                arm.sent_bytes = sent_bytes / calls
    return arms


def _time_calls(group: Group, array: Array, calls: int) -> tuple[list[float], int]:
    out = np.empty_like(array)
    group.barrier()
    before = group.stats.bytes_sent
    seconds: list[float] = []
    for _ in range(calls):
        started_s = time.perf_counter()
        group.all_reduce(array, out)
        seconds.append(time.perf_counter() - started_s)
    return seconds, group.stats.bytes_sent - before


def _summary(arm: ArmTimes) -> dict[str, Any]:
    deciles = statistics.quantiles(arm.seconds, n=10)
    return {
        "size_bytes": arm.size_bytes,
        "algorithm": arm.algorithm,
        "chosen": arm.chosen,
        "sent_bytes": arm.sent_bytes,
        "p10_s": deciles[0],
        "median_s": deciles[4],
        "p90_s": deciles[8],
        "calls": len(arm.seconds),
    }


def say_line(content: Mapping[str, Any]) -> None:
    print(json.dumps(content), flush=True)


def hear_line() -> dict[str, Any]:
    answer: dict[str, Any] = json.loads(sys.stdin.readline())
    return answer


if __name__ == "__main__":
    main()
