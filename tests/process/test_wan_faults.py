"""Stages on machines far apart, one more than are needed: whatever the network does, the text stays the same."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import pytest

from shardcompute.bench.wan_cluster import Answer, WanCluster, WanServing, wan_cluster
from shardcompute.sim import Change, Emulator, initial_conditions, ring_topology
from shardcompute.sim.faults import changed, cut_off, flapping, partitioned, slowed
from support.emulated import emulated

MACHINES = ("driver", "one", "two", "three")
QUESTION = "Name the planets of the solar system, and say a few words about each of them."
TOKENS = 24
AFTER_PIECES = 6
BLACKOUT_S = 2.0
PATIENCE_S = 60.0
EMULATORS = [
    pytest.param(Emulator.NAMESPACES),
    pytest.param(Emulator.LINKS, marks=pytest.mark.long),
]


@pytest.fixture(scope="module", params=EMULATORS)
def cluster(request: pytest.FixtureRequest, smollm2_gguf: Path) -> Iterator[WanCluster]:
    serving = WanServing(str(smollm2_gguf), kv_tokens=2048, context=1024, stages=2)
    with emulated(MACHINES, request.param) as network, wan_cluster(network, serving) as cluster:
        network.impose(initial_conditions(ring_topology(len(MACHINES), 40, 100), MACHINES))
        yield cluster


@pytest.fixture(scope="module")
def expected(cluster: WanCluster) -> str:
    """What is answered when nothing happens."""
    answer = _ask(cluster)
    assert answer.tokens == TOKENS
    return answer.text


def _stages(cluster: WanCluster) -> list[str]:
    """The machines that serve, once they do."""
    deadline = time.monotonic() + PATIENCE_S
    while not (machines := cluster.stage_machines()):
        assert time.monotonic() < deadline, cluster.state()
        time.sleep(0.1)
    return machines


def _ask(
    cluster: WanCluster,
    fault: Callable[[], AbstractContextManager[None]] = nullcontext,
    lasting_s: float = BLACKOUT_S,
) -> Answer:
    """An answer during which the fault begins, and lasts until the answer is there or that time has passed."""
    begun, over = threading.Event(), threading.Event()

    def befall() -> None:
        begun.wait()
        with fault():
            over.wait(lasting_s)

    thread = threading.Thread(target=befall)
    thread.start()
    try:
        return cluster.ask(
            {
                "messages": [{"role": "user", "content": QUESTION}],
                "max_tokens": TOKENS,
                "ignore_eos": True,
            },
            on_piece=lambda count: begun.set() if count == AFTER_PIECES else None,
        )
    finally:
        begun.set()
        over.set()
        thread.join()


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(Change(loss=0.01), id="loss"),
        pytest.param(Change(jitter_ms=50), id="jitter"),
        pytest.param(Change(uplink_mbit=1), id="thin"),
    ],
)
def test_bad_lines_do_not_change_the_text(cluster: WanCluster, expected: str, change: Change) -> None:
    _stages(cluster)
    with changed(cluster.network, change):
        assert _ask(cluster).text == expected


def test_blackout_of_a_stage(cluster: WanCluster, expected: str) -> None:
    machine = _stages(cluster)[0]
    assert _ask(cluster, lambda: cut_off(cluster.network, machine)).text == expected
    _stages(cluster)
    assert _ask(cluster).text == expected, "and it serves again"


def test_driver_blinks(cluster: WanCluster, expected: str) -> None:
    _stages(cluster)
    assert _ask(cluster, lambda: cut_off(cluster.network, "driver"), lasting_s=0.3).text == expected


@pytest.mark.long
def test_blackout_of_the_driver(cluster: WanCluster, expected: str) -> None:
    _stages(cluster)
    assert _ask(cluster, lambda: cut_off(cluster.network, "driver")).text == expected
    _stages(cluster)
    assert _ask(cluster).text == expected, "and it serves again"


def test_slow_stage(cluster: WanCluster, expected: str) -> None:
    with slowed(cluster.workers[_stages(cluster)[-1]].pid, 5):
        assert _ask(cluster).text == expected


@pytest.mark.long
def test_partition_and_flapping(cluster: WanCluster, expected: str) -> None:
    network = cluster.network
    assert _ask(cluster, lambda: partitioned(network, ("driver", "one"))).text == expected
    assert _ask(cluster, lambda: flapping(network, "three", 0.5, 0.3)).text == expected
    assert _ask(cluster).text == expected


@pytest.mark.long
def test_several_streams_through_a_blackout_of_everybody(cluster: WanCluster, expected: str) -> None:
    answers: list[Answer] = []
    threads = [
        threading.Thread(target=lambda: answers.append(_ask(cluster, lambda: cut_off(cluster.network))))
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [answer.text for answer in answers] == [expected] * 3
