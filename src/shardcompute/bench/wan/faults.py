"""`bench faults`: one model on machines far apart, asked while something befalls the network or one of them.

Every disturbed answer is preceded by an undisturbed one to the same question on the same cluster. What counts is that
the text stays the same, how long the client waits at most and what it sees meanwhile, and that the cluster is whole
again afterwards without anybody's help.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

from shardcompute.bench.questions import QUESTIONS
from shardcompute.bench.report import Say
from shardcompute.bench.wan.cluster import TimedAnswer, WanCluster, WanServing, wan_cluster
from shardcompute.bench.wan.run import emulated_homes
from shardcompute.core.errors import BackendError, UsageError
from shardcompute.sim import Change, Emulator, initial_conditions, ring_topology
from shardcompute.sim.faults import changed, cut_off, flapping, slowed

_WHOLE_AGAIN_S = 60.0
_LOOK_S = 0.05
_WARM_TOKENS = 8


@dataclass(frozen=True, slots=True)
class Fault:
    """Something that happens to a cluster; `befall` is given the machine of one of its stages."""

    words: str
    befall: Callable[[WanCluster, str], AbstractContextManager[None]]
    is_sudden: bool = False
    """It happens amid the answer, not before the question."""
    lasts_s: float | None = None
    """None: until the answer is there."""


FAULTS: Mapping[str, Fault] = {
    "loss": Fault(
        "every hundredth packet is lost", lambda cluster, stage: changed(cluster.network, Change(loss=0.01))
    ),
    "jitter": Fault(
        "packets take up to 50 ms longer",
        lambda cluster, stage: changed(cluster.network, Change(jitter_ms=50)),
    ),
    "loss-jitter": Fault(
        "both of them", lambda cluster, stage: changed(cluster.network, Change(loss=0.01, jitter_ms=50))
    ),
    "thin-link": Fault(
        "the line of a stage carries 1 Mbit/s",
        lambda cluster, stage: changed(
            cluster.network, Change(machines=(stage,), uplink_mbit=1, downlink_mbit=1)
        ),
    ),
    "collapse": Fault(
        "the uplink of a stage falls to 0.2 Mbit/s amid the answer",
        lambda cluster, stage: changed(cluster.network, Change(machines=(stage,), uplink_mbit=0.2)),
        is_sudden=True,
    ),
    "slow-stage": Fault(
        "a stage gets a fifth of the time", lambda cluster, stage: slowed(cluster.workers[stage].pid, 5)
    ),
    "blackout": Fault(
        "nobody reaches a stage for 2 s",
        lambda cluster, stage: cut_off(cluster.network, stage),
        is_sudden=True,
        lasts_s=2.0,
    ),
    "driver-blackout": Fault(
        "the driver reaches nobody for 2 s",
        lambda cluster, stage: cut_off(cluster.network, cluster.network.machines[0]),
        is_sudden=True,
        lasts_s=2.0,
    ),
    "flapping": Fault(
        "the line of a stage is away for 0.3 s, there for 0.5 s, and so on for 5 s",
        lambda cluster, stage: flapping(cluster.network, stage, 0.5, 0.3),
        is_sudden=True,
        lasts_s=5.0,
    ),
}


@dataclass(frozen=True, slots=True)
class FaultBench:
    """`spares` machines more than the stages need hold nothing at first, and take over where they must."""

    serving: WanServing
    faults: Sequence[str] = tuple(FAULTS)
    stages: int = 3
    spares: int = 0
    streams: int = 1
    rounds: int = 3
    tokens: int = 64
    ring_ms: float = 80.0
    mbit: float = 100.0
    drafter: str = "auto"
    after_pieces: int = 8
    """So far sudden faults let an answer come."""
    emulator: Emulator = Emulator.AUTO

    def __post_init__(self) -> None:
        unknown = [name for name in self.faults if name not in FAULTS]
        if unknown or not self.faults:
            raise UsageError(f"no fault is called {', '.join(unknown)!r}", hint=f"use {', '.join(FAULTS)}")
        if not 1 <= self.streams <= len(QUESTIONS):
            raise UsageError(f"{self.streams} streams cannot be", hint=f"use 1 to {len(QUESTIONS)}")


@dataclass(frozen=True, slots=True)
class FaultRow:
    """One answer with a fault and the undisturbed one before it."""

    fault: str
    round: int
    stream: int
    stage: str
    tokens: int
    undisturbed_s: float
    disturbed_s: float
    undisturbed_pause_s: float
    disturbed_pause_s: float
    pings: int
    epochs: int
    """How often the chain changed its shape."""
    whole_again_s: float
    """From the last answer of the round until the chain was ready."""
    text: str
    expected: str

    @property
    def speed(self) -> float:
        """Of the disturbed answer, with the undisturbed one as 1."""
        return self.undisturbed_s / self.disturbed_s if self.disturbed_s > 0 else 0.0

    @property
    def is_same(self) -> bool:
        return self.text == self.expected


def run_fault_bench(bench: FaultBench, say: Say) -> list[FaultRow]:
    """Raises BackendError where a stream fails or the cluster does not recover."""
    rows: list[FaultRow] = []
    with emulated_homes(bench.stages + bench.spares, bench.emulator) as network:
        say(f"starting a cluster on {len(network.machines)} machines ({network.emulator})")
        with wan_cluster(network, bench.serving) as cluster:
            topology = ring_topology(len(network.machines), bench.ring_ms, bench.mbit)
            network.impose(initial_conditions(topology, network.machines))
            cluster.ask_all(_bodies(bench, _WARM_TOKENS, "warm"))
            for number in range(bench.rounds):
                for name in bench.faults:
                    say(f"round {number + 1} of {bench.rounds}: {name} ({FAULTS[name].words})")
                    rows += _measure(bench, cluster, name, number)
    return rows


def _measure(bench: FaultBench, cluster: WanCluster, name: str, number: int) -> list[FaultRow]:
    stages = await_serving(cluster)
    stage = stages[number % len(stages)]
    undisturbed, _ = cluster.ask_all(_bodies(bench, bench.tokens, f"{name} {number}"))
    before = epoch_of(cluster)
    try:
        bodies = _bodies(bench, bench.tokens, f"{name} {number} disturbed")
        disturbed = ask_amid(cluster, bodies, FAULTS[name], stage, after_pieces=bench.after_pieces)
    except BackendError as error:
        raise BackendError(f"{name}, round {number + 1}: {error.message}", hint=error.hint) from error
    ended = time.perf_counter()
    await_serving(cluster)
    whole_again_s = time.perf_counter() - ended
    epochs = epoch_of(cluster) - before
    return [
        FaultRow(
            fault=name,
            round=number + 1,
            stream=index + 1,
            stage=stage,
            tokens=bad.tokens,
            undisturbed_s=good.last_s,
            disturbed_s=bad.last_s,
            undisturbed_pause_s=good.longest_gap_s,
            disturbed_pause_s=bad.longest_gap_s,
            pings=bad.pings,
            epochs=epochs,
            whole_again_s=whole_again_s,
            text=bad.text,
            expected=good.text,
        )
        for index, (good, bad) in enumerate(zip(undisturbed, disturbed, strict=True))
    ]


def ask_amid(
    cluster: WanCluster, bodies: Sequence[Mapping[str, Any]], fault: Fault, stage: str, *, after_pieces: int
) -> list[TimedAnswer]:
    """Answers during which a fault befalls the cluster; it is over when this returns. Raises BackendError."""
    begin = threading.Event()
    with _befalling(lambda: fault.befall(cluster, stage), begin, fault.lasts_s) as begun:
        if not fault.is_sudden:
            begin.set()
            begun.wait()
        answers, _ = cluster.ask_all(
            bodies, on_piece=lambda count: begin.set() if count >= after_pieces else None
        )
    return answers


@contextmanager
def _befalling(
    fault: Callable[[], AbstractContextManager[None]], begin: threading.Event, lasts_s: float | None
) -> Iterator[threading.Event]:
    """The fault begins with `begin`, if ever, and ends after its time or with the block. Yields what says that it
    has begun."""
    begun, over = threading.Event(), threading.Event()
    problems: list[Exception] = []

    def befall() -> None:
        begin.wait()
        try:
            if not over.is_set():
                with fault():
                    begun.set()
                    over.wait(lasts_s)
        except Exception as error:
            problems.append(error)
        finally:
            begun.set()

    thread = threading.Thread(target=befall, name="fault", daemon=True)
    thread.start()
    try:
        yield begun
    finally:
        over.set()
        begin.set()
        thread.join()
    if problems:
        raise BackendError(f"the fault could not be brought about: {problems[0]}") from problems[0]


def await_serving(cluster: WanCluster, most_s: float = _WHOLE_AGAIN_S) -> list[str]:
    """The machines that serve, once they do. BackendError if that takes too long."""
    deadline = time.monotonic() + most_s
    while not (machines := cluster.stage_machines()):
        if time.monotonic() > deadline:
            raise BackendError(
                f"no chain is ready after {most_s:g} s: {cluster.state()['chains']}",
                hint="see the logs of the coordinator and the workers",
            )
        time.sleep(_LOOK_S)
    return machines


def epoch_of(cluster: WanCluster) -> int:
    """Of all live chains together."""
    return sum(int(chain["epoch"]) for chain in cluster.state()["chains"])


def _bodies(bench: FaultBench, tokens: int, salt: str) -> list[dict[str, Any]]:
    """With another salt nothing that was computed before is used again."""
    return [
        {
            "messages": [{"role": "user", "content": question}],
            "max_tokens": tokens,
            "ignore_eos": True,
            "speculation": {"drafter": bench.drafter},
            "cache_salt": salt,
        }
        for question in QUESTIONS[: bench.streams]
    ]
