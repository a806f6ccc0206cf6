"""Runs `bench drift`: a real cluster on an emulated network under load with noise, and then a change that stays.

For each fault there is a cluster of its own, whose machines are alike and one more than the model needs. First it is
only noisy: nothing may move. Then one stage becomes slow, or its line, and stays so. The best layout is then the one
before with another machine in that one's place, which is as fast: what the chain did before is what it can do again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from shardcompute.bench.drift.load import Load, load
from shardcompute.bench.drift.slowdown import slowed_down
from shardcompute.bench.questions import QUESTIONS
from shardcompute.bench.report import Say
from shardcompute.bench.wan.cluster import WanCluster, WanServing, wan_cluster
from shardcompute.core.errors import BackendError, UsageError
from shardcompute.sim import Change, Emulator, initial_conditions, open_network, ring_topology
from shardcompute.sim.faults import changed

_USUAL = 1.2
"""So much longer than it could every machine takes all the time, so that noise makes it faster as well as slower."""
_STAGE_TIMES = 3.0
_LINE_PART = 10.0
_STANDBY_S = 180.0
_RATE_S = 20.0
"""So long a throughput is measured, and so long a chain that has moved serves before."""
_AFTER_MOVE_S = 4.0
_MOVED_S = 120.0
_LOOK_S = 0.2


@dataclass(frozen=True, slots=True)
class DriftBench:
    serving: WanServing
    faults: Sequence[str] = ("stage", "line")
    """Of `FAULTS`."""
    stages: int = 2
    spares: int = 1
    streams: int = 8
    tokens: int = 256
    """Of each answer; clients ask again and again."""
    steady_s: float = 65.0
    """With noise alone, before the fault of each cluster."""
    noise: float = 0.2
    ring_ms: float = 10.0
    mbit: float = 20.0
    seed: int = 1
    emulator: Emulator = Emulator.AUTO

    def __post_init__(self) -> None:
        unknown = [name for name in self.faults if name not in FAULTS]
        if unknown:
            raise UsageError(f"nothing is called {', '.join(unknown)!r}", hint=f"use {', '.join(FAULTS)}")
        if not 1 <= self.streams <= len(QUESTIONS):
            raise UsageError(f"{self.streams} streams cannot be", hint=f"use 1 to {len(QUESTIONS)}")


@dataclass(frozen=True, slots=True)
class DriftOutcome:
    """What became of one cluster."""

    fault: str
    victim: str
    moves_before: int
    """Amid noise alone."""
    moves: int
    """From the fault on."""
    planned_s: float | None
    """From the fault until another layout was decided on; None: none was."""
    moved_s: float | None
    """Until it served."""
    before: float
    """Pieces a second of all streams, as are the next two."""
    during: float
    after: float
    longest_pause_s: float
    """Between two pieces of one stream, from the fault on."""
    answers: int
    is_same: bool
    sentences: tuple[str, ...]

    @property
    def part_of_best(self) -> float:
        return self.after / self.before if self.before else 0.0


def _slow_stage(bench: DriftBench, cluster: WanCluster, victim: str) -> AbstractContextManager[None]:
    return slowed_down(
        cluster.workers[victim].pid, _STAGE_TIMES * _USUAL, bench.noise, bench.seed + len(cluster.workers)
    )


def _thin_line(bench: DriftBench, cluster: WanCluster, victim: str) -> AbstractContextManager[None]:
    mbit = bench.mbit / _LINE_PART
    return changed(cluster.network, Change(machines=(victim,), uplink_mbit=mbit, downlink_mbit=mbit))


FAULTS: Mapping[str, Callable[[DriftBench, WanCluster, str], AbstractContextManager[None]]] = {
    "stage": _slow_stage,
    "line": _thin_line,
}


def run_drift_bench(bench: DriftBench, say: Say) -> list[DriftOutcome]:
    """Raises BackendError where an answer fails."""
    return [_run_one(bench, fault, say) for fault in bench.faults]


def _run_one(bench: DriftBench, fault: str, say: Say) -> DriftOutcome:
    machines = ["driver", *(f"stage-{number + 1}" for number in range(bench.stages + bench.spares))]
    topology = ring_topology(len(machines), bench.ring_ms, bench.mbit)
    with open_network(topology, machines, bench.emulator) as network:
        say(f"{fault}: starting a cluster on {len(machines)} machines ({network.emulator})")
        # Weights are fetched over these lines, too: the coordinator's is the only one that is not thin.
        network.impose(initial_conditions(topology, machines))
        network.change(
            Change(machines=("driver",), uplink_mbit=20 * bench.mbit, downlink_mbit=20 * bench.mbit)
        )
        with wan_cluster(network, bench.serving) as cluster:
            ready_s = time.monotonic()
            _await_standby(cluster)
            say(f"{fault}: {bench.streams} streams, {bench.noise:.0%} noise, nothing else")
            with _noise(bench, cluster) as noise, load(cluster, bench.streams, bench.tokens) as seen:
                return _watch(bench, cluster, fault, (ready_s, noise, seen), say)


def _watch(
    bench: DriftBench,
    cluster: WanCluster,
    fault: str,
    watched: tuple[float, Mapping[str, ExitStack], Load],
    say: Say,
) -> DriftOutcome:
    ready_s, noise, seen = watched
    _sleep_until(max(ready_s + bench.steady_s, time.monotonic() + _RATE_S + _AFTER_MOVE_S), seen)
    moves_before, victim = _chain(cluster)["moves"], _await_standby(cluster)
    began_s = time.monotonic()
    before = seen.rate(began_s - _RATE_S, began_s)
    say(f"{fault}: {len(moves_before)} moves so far, {before:.1f} tokens/s; now {victim} changes")
    if fault == "stage":
        noise[victim].close()
    seen.restart_gaps()
    with FAULTS[fault](bench, cluster, victim):
        planned_s, moved_s = _await_move(cluster, victim, len(moves_before), began_s, seen)
        from_s = time.monotonic() + _AFTER_MOVE_S
        during = seen.rate(began_s, from_s - _AFTER_MOVE_S)
        _sleep_until(from_s + _RATE_S, seen)
        after = seen.rate(from_s, from_s + _RATE_S)
        moves = _chain(cluster)["moves"]
    say(f"{fault}: {during:.1f} tokens/s until it moved, {after:.1f} since")
    return DriftOutcome(
        fault=fault,
        victim=victim,
        moves_before=len(moves_before),
        moves=len(moves) - len(moves_before),
        planned_s=planned_s,
        moved_s=moved_s,
        before=before,
        during=during,
        after=after,
        longest_pause_s=seen.longest_gap_s,
        answers=seen.whole_answers,
        is_same=seen.is_same,
        sentences=tuple(f"{move['reason']} — {move['outcome'] or 'not known yet'}" for move in moves),
    )


@contextmanager
def _noise(bench: DriftBench, cluster: WanCluster) -> Iterator[Mapping[str, ExitStack]]:
    """On every machine and line; leave one machine's stack to spare it."""
    jitter_ms = bench.noise * bench.ring_ms / len(cluster.network.machines)
    with ExitStack() as stack:
        stack.enter_context(changed(cluster.network, Change(jitter_ms=jitter_ms)))
        own = {}
        for number, (machine, process) in enumerate(sorted(cluster.workers.items())):
            own[machine] = stack.enter_context(ExitStack())
            own[machine].enter_context(slowed_down(process.pid, _USUAL, bench.noise, bench.seed + number))
        yield own


def _chain(cluster: WanCluster) -> dict[str, Any]:
    chains: list[dict[str, Any]] = cluster.state()["chains"]
    if not chains:
        raise BackendError("there is no chain any more", hint="the logs of the coordinator say why")
    return chains[0]


def _await_standby(cluster: WanCluster) -> str:
    """The machine whose layers a standby holds, once there is one."""
    deadline = time.monotonic() + _STANDBY_S
    while time.monotonic() < deadline:
        state = cluster.state()
        names = {str(node["id"]): str(node["name"]) for node in state["nodes"]}
        chain = state["chains"][0]
        places = {(each["start"], each["stop"]) for each in chain["standbys"]}
        for stage in chain["stages"]:
            if (stage["start"], stage["stop"]) in places and chain["status"] == "ready":
                return names[stage["node"]]
        time.sleep(_LOOK_S)
    raise BackendError(f"no standby was there after {_STANDBY_S:g} s", hint="start with more --spares")


def _await_move(
    cluster: WanCluster, victim: str, moves: int, began_s: float, seen: Load
) -> tuple[float | None, float | None]:
    """When another layout was decided on, and when it served, both since the fault; None where it was not."""
    planned_s = None
    while time.monotonic() - began_s < _MOVED_S:
        chain = _chain(cluster)
        now_s = time.monotonic() - began_s
        if planned_s is None and len(chain["moves"]) > moves:
            planned_s = now_s
        if victim not in cluster.stage_machines() and chain["status"] == "ready":
            return planned_s, now_s
        _check(seen)
        time.sleep(_LOOK_S)
    return planned_s, None


def _sleep_until(at_s: float, seen: Load) -> None:
    while time.monotonic() < at_s:
        _check(seen)
        time.sleep(min(_LOOK_S, max(0.0, at_s - time.monotonic())))


def _check(seen: Load) -> None:
    if seen.problems:
        raise BackendError(f"an answer failed: {seen.problems[0]}", hint="the logs of the cluster say why")
