"""Stages on machines far apart: whatever befalls the network or a machine, every text is that of a single process,
whoever waits can see it, and the cluster is whole again by itself."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from shardcompute.bench.wan.cluster import TimedAnswer, WanCluster, WanServing, wan_cluster
from shardcompute.bench.wan.faults import FAULTS, Fault, ask_amid, await_serving, epoch_of
from shardcompute.core.generation import GenerationRequest, Sampling
from shardcompute.core.settings import load_settings
from shardcompute.node.local.service import EngineOptions, LocalService, open_model
from shardcompute.sim import Change, Emulator, initial_conditions, ring_topology
from shardcompute.sim.faults import changed, cut_off, partitioned
from support.network.emulated import emulated

MACHINES = ("driver", "one", "two", "three")
TOKENS = 24
AFTER_PIECES = 6
CONTEXT = 1024
PLAIN = "The planets of the solar system, and a few words about each of them:"
REPEATING = "red green blue, red green blue, red green blue, red green blue, red green"
QUICK = ("loss", "thin-link", "slow-stage", "blackout")
"""Faults that are tried every time; all others are for the long suite."""


@dataclass(frozen=True, slots=True)
class Wish:
    """Something to ask of one process, and of a cluster through its API."""

    prompt: str
    tokens: int = TOKENS
    temperature: float = 0.0
    seed: int = 0
    drafter: str = "auto"

    def request(self, service: LocalService) -> GenerationRequest:
        sampling = Sampling(temperature=self.temperature, seed=self.seed)
        return GenerationRequest(tuple(service.tokenizer.encode(self.prompt)), self.tokens, sampling)

    def body(self, service: LocalService, salt: str = "") -> dict[str, Any]:
        return {
            "prompt": service.tokenizer.encode(self.prompt),
            "max_tokens": self.tokens,
            "temperature": self.temperature,
            "seed": self.seed,
            "ignore_eos": True,
            "speculation": {"drafter": self.drafter},
            "cache_salt": salt,
        }


WISHES = (
    Wish(PLAIN),
    Wish(PLAIN, temperature=0.9, seed=7),
    Wish(REPEATING, 48, drafter="ngram"),
    Wish(REPEATING, 48, temperature=0.7, seed=8, drafter="ngram"),
)


class Bystander:
    """Asks the cluster, and knows from one process what it must answer."""

    def __init__(self, cluster: WanCluster, alone: LocalService) -> None:
        self.cluster = cluster
        self._alone = alone
        self._expected: dict[Wish, str] = {}
        self._asked = 0

    def expected(self, wish: Wish) -> str:
        if wish not in self._expected:
            deltas = self._alone.stream(wish.request(self._alone))
            self._expected[wish] = "".join(delta.text for delta in deltas)
        return self._expected[wish]

    def ask_amid(self, fault: Fault, stage: str, wishes: Sequence[Wish] = WISHES[:1]) -> list[TimedAnswer]:
        """Right answers, although the fault came about."""
        self._asked += 1
        bodies = [wish.body(self._alone, f"{self._asked}") for wish in wishes]
        answers = ask_amid(self.cluster, bodies, fault, stage, after_pieces=AFTER_PIECES)
        assert [answer.text for answer in answers] == [self.expected(wish) for wish in wishes]
        return answers

    def assert_whole(self) -> None:
        """It serves again, and as before."""
        await_serving(self.cluster)
        answer = self.cluster.ask(WISHES[0].body(self._alone))
        assert answer.text == self.expected(WISHES[0])


@pytest.fixture(scope="module")
def alone(smollm2_gguf: Path) -> Iterator[LocalService]:
    options = EngineOptions(threads=1, context_length=CONTEXT, kv_bytes=1 << 26)
    with open_model(str(smollm2_gguf), load_settings(), options) as service:
        yield service


@pytest.fixture(
    scope="module",
    params=[
        pytest.param((Emulator.NAMESPACES, 2), id="one to spare"),
        pytest.param((Emulator.NAMESPACES, 3), id="none to spare", marks=pytest.mark.long),
        pytest.param((Emulator.LINKS, 3), id="shaped links", marks=pytest.mark.long),
    ],
)
def bystander(request: pytest.FixtureRequest, smollm2_gguf: Path, alone: LocalService) -> Iterator[Bystander]:
    emulator, stages = request.param
    serving = WanServing(str(smollm2_gguf), kv_tokens=4096, context=CONTEXT, stages=stages)
    with emulated(MACHINES, emulator) as network, wan_cluster(network, serving) as cluster:
        network.impose(initial_conditions(ring_topology(len(MACHINES), 40, 100), MACHINES))
        yield Bystander(cluster, alone)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.long) for name in FAULTS]
)
def test_faults_do_not_change_the_text(bystander: Bystander, name: str) -> None:
    bystander.ask_amid(FAULTS[name], await_serving(bystander.cluster)[0])
    bystander.assert_whole()


@pytest.mark.long
@pytest.mark.parametrize("name", FAULTS)
def test_several_streams_with_drafts_under_way(bystander: Bystander, name: str) -> None:
    answers = bystander.ask_amid(FAULTS[name], await_serving(bystander.cluster)[-1], WISHES)
    assert answers[2].timings["drafted_tokens"] > 0
    bystander.assert_whole()


def test_who_waits_can_see_it(bystander: Bystander) -> None:
    """Nobody reaches anybody for a while: streams show that they live, and the cluster says what is the matter."""
    seen: set[str] = set()
    over = threading.Event()

    def watch() -> None:
        while not over.wait(0.1):
            seen.update(node["status"] for node in bystander.cluster.state()["nodes"])

    watching = threading.Thread(target=watch)
    watching.start()
    try:
        blackout = Fault("", lambda cluster, _: cut_off(cluster.network), is_sudden=True, lasts_s=4.0)
        [answer] = bystander.ask_amid(blackout, "")
    finally:
        over.set()
        watching.join()
    assert answer.pings > 0
    assert "suspected" in seen


@pytest.mark.long
def test_a_blackout_of_the_driver_alone_moves_nothing(bystander: Bystander) -> None:
    """It cannot tell that from the death of all others; but nobody could take over, so there is nothing to do."""
    await_serving(bystander.cluster)
    before = epoch_of(bystander.cluster)
    bystander.ask_amid(FAULTS["driver-blackout"], "")
    bystander.assert_whole()
    assert epoch_of(bystander.cluster) == before


@pytest.mark.long
def test_partition(bystander: Bystander) -> None:
    halves = Fault(
        "", lambda cluster, _: partitioned(cluster.network, ("driver", "one")), is_sudden=True, lasts_s=2.0
    )
    bystander.ask_amid(halves, "", WISHES)
    bystander.assert_whole()


@pytest.mark.long
def test_a_long_prompt_fills_a_thin_line(bystander: Bystander) -> None:
    """Heartbeats wait behind activations, for seconds: a machine that is held up is not a dead one."""
    if bystander.cluster.network.emulator is Emulator.LINKS:
        pytest.skip("there a heartbeat waits until whole frames are through, not only what is on the line")

    def fill(cluster: WanCluster, stage: str) -> AbstractContextManager[None]:
        change = Change(machines=(stage,), uplink_mbit=0.5, downlink_mbit=0.5, queue_ms=2000)
        return changed(cluster.network, change)

    wish = Wish("\n".join(f"{number} is followed by {number + 1}." for number in range(40)), 8)
    bystander.ask_amid(Fault("", fill), await_serving(bystander.cluster)[0], [wish])
    bystander.assert_whole()
