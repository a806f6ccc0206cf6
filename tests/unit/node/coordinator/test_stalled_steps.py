"""Whoever owes a step is found by what the stages say; who is stuck is replaced, who is slow is not."""

from __future__ import annotations

from typing import Any

import pytest

from shardcompute.control import events as happened
from shardcompute.core.errors import LinkError
from shardcompute.node.coordinator.stalled_steps import (
    DRIVER,
    LostOnTheWay,
    StalledSteps,
    StuckStage,
    UnderWay,
    find_step,
)
from shardcompute.node.rpc.commands import NodeCommand, Redial, StepTraced, TraceStep, encode_answer
from shardcompute.wire.control import StepOverdue
from support.swarm.fake_cluster import MODEL, serving_cluster

from .conftest import FakeDriver, Shell

CHAIN = f"{MODEL.name}#1"
SENT, AWAY, IDLE = StepTraced("sent"), StepTraced("away"), StepTraced("queued")
BUSY, STUCK = StepTraced("computing", 3.0, 10.0), StepTraced("computing", 12.0, 10.0)


@pytest.mark.parametrize(
    ("traces", "found"),
    [
        ([SENT, SENT, SENT], LostOnTheWay(2, DRIVER)),
        ([SENT, AWAY, AWAY], LostOnTheWay(0, 1)),
        ([AWAY, AWAY, AWAY], LostOnTheWay(DRIVER, 0)),
        ([SENT, StepTraced("failed"), AWAY], LostOnTheWay(1, DRIVER)),
        ([SENT, StepTraced("dropped"), AWAY], LostOnTheWay(1, 2)),
        ([SENT, SENT, StepTraced("dropped")], LostOnTheWay(2, DRIVER)),
        ([SENT, StepTraced("sending", 12.0, 10.0), AWAY], LostOnTheWay(1, 2)),
    ],
)
def test_what_was_lost(traces: list[StepTraced | None], found: LostOnTheWay) -> None:
    assert find_step(traces, 5.0) == found


@pytest.mark.parametrize(
    "traces",
    [
        [SENT, BUSY, AWAY],
        [SENT, IDLE, AWAY],
        [SENT, StepTraced("queued", 3.0, 10.0), AWAY],
        [SENT, StepTraced("sending", 3.0, 10.0), AWAY],
        [StepTraced("sent", unsent=2), AWAY, AWAY],
        [SENT, None, AWAY],
        [None, None, None],
    ],
)
def test_who_is_at_work_or_silent_is_waited_for_but_not_for_ever(traces: list[StepTraced | None]) -> None:
    assert isinstance(find_step(traces, 5.0), UnderWay)
    if traces[0] is None or traces[0].unsent == 0:
        assert isinstance(find_step(traces, 10_000.0), StuckStage | LostOnTheWay)


@pytest.mark.parametrize("stuck", [STUCK, StepTraced("queued", 12.0, 10.0)])
def test_who_is_stuck(stuck: StepTraced) -> None:
    found = find_step([SENT, stuck, AWAY], 15.0)
    assert isinstance(found, StuckStage)
    assert found.stage == 1


class Chain:
    """A chain of machines a and b, whose stages say what a test has them say; a spare c could take over."""

    def __init__(self, *, has_spare: bool) -> None:
        cluster = serving_cluster(500, 500)
        if has_spare:
            cluster.join("c", 500)
        self.shell = Shell(cluster.coordinator.state)
        self.pauses: list[float] = []
        self.stalled = StalledSteps(
            self.shell.coordinator, self.shell.registry, self.shell.ports, self.pauses.append
        )
        self.nodes = self.shell.coordinator.state.chains[CHAIN].nodes

    def say(self, *traces: StepTraced | None) -> None:
        for node, traced in zip(self.nodes, traces, strict=True):
            answer: bytes | None = None if traced is None else encode_answer(traced)
            self.shell.pumps[node].answers[TraceStep] = answer if answer is not None else "no answer"

    def miss(self, driver: str = FakeDriver.node, **changes: Any) -> None:
        fields: dict[str, Any] = {
            "chain": CHAIN,
            "epoch": self.shell.coordinator.state.chains[CHAIN].epoch,
            "session_namespace": FakeDriver.session_namespace,
            "sequence": 9,
            "waited_s": 5.0,
            "allowed_s": 2.0,
        }
        self.stalled.look_for(StepOverdue(**{**fields, **changes}), driver)

    def told(self, node: str, kind: type) -> list[Any]:
        return self.shell.pumps[node].told(kind)


@pytest.fixture
def chain() -> Chain:
    return Chain(has_spare=True)


def test_every_stage_is_asked_for_what_the_one_before_sent(chain: Chain) -> None:
    chain.say(SENT, BUSY)
    chain.miss()
    first, second = chain.nodes
    [asked] = chain.told(first, TraceStep)
    assert (asked.sender, asked.sequence, asked.session_namespace) == ("head", 9, 77)
    [asked] = chain.told(second, TraceStep)
    assert asked.sender == first
    assert chain.shell.coordinator.applied == []


def test_the_link_that_lost_it_is_ended_by_its_sender(chain: Chain) -> None:
    chain.say(SENT, AWAY)
    chain.miss()
    first, second = chain.nodes
    assert chain.told(first, Redial) == [Redial(CHAIN, second, by_driver=False)]
    assert chain.pauses == [0.5], "it is looked for twice"
    assert chain.shell.coordinator.applied == [], "the node reports the link itself"
    chain.say(SENT, SENT)
    chain.miss()
    assert chain.told(second, Redial) == [Redial(CHAIN, "head", by_driver=False)]
    chain.say(AWAY, AWAY)
    chain.miss()
    assert chain.shell.driver.told(Redial) == [Redial(CHAIN, first, by_driver=True)]


def test_a_step_that_moves_on_between_two_looks_was_not_lost(chain: Chain) -> None:
    chain.say(SENT, AWAY)
    pause = chain.pauses.append
    chain.stalled._pause = lambda seconds: (pause(seconds), chain.say(SENT, BUSY))
    chain.miss()
    assert chain.told(chain.nodes[0], Redial) == []


@pytest.mark.parametrize("traces", [(SENT, SENT), (SENT, STUCK)])
def test_results_that_came_while_they_were_looked_for(
    chain: Chain, traces: tuple[StepTraced, StepTraced]
) -> None:
    """Who stood still for a while misses much at once, and finds it in the next moment."""
    chain.say(*traces)
    chain.shell.driver.failures = [LinkError("it is missed no more")]
    chain.miss()
    assert chain.told(chain.nodes[1], Redial) == []
    assert chain.shell.coordinator.applied == []


def test_a_sender_that_has_no_such_link_does_not_keep_the_chain_waiting(chain: Chain) -> None:
    chain.say(SENT, SENT)
    chain.shell.pumps[chain.nodes[1]].answers[Redial] = "there is no link to head"
    chain.miss()
    [broken] = chain.shell.coordinator.of(happened.LinkBroken)
    assert (broken.reporter, broken.node) == ("head", chain.nodes[1])
    assert chain.shell.coordinator.state.chains[CHAIN].is_interrupted


def test_the_own_driver_without_a_link(chain: Chain) -> None:
    chain.say(AWAY, AWAY)
    ask = chain.shell.driver.ask

    def have_no_link(command: NodeCommand) -> None:
        if isinstance(command, Redial):
            raise LinkError("there is none")
        ask(command)

    chain.shell.driver.ask = have_no_link  # type: ignore[method-assign]
    chain.miss()
    assert chain.shell.coordinator.state.chains[CHAIN].is_interrupted


def test_a_stage_that_is_stuck_is_left_alone_with_the_model(chain: Chain) -> None:
    chain.say(SENT, STUCK)
    chain.miss()
    [stalled] = chain.shell.coordinator.of(happened.StageStalled)
    assert stalled.node == chain.nodes[1]
    state = chain.shell.coordinator.state
    assert state.chains[CHAIN].is_interrupted
    assert state.nodes[stalled.node].is_refusing(MODEL.name, 29.0)
    assert not state.nodes[stalled.node].is_refusing(MODEL.name, 31.0)
    assert state.nodes[stalled.node].shards, "it holds them until it has let go of them"


def test_where_nobody_can_take_over_a_stuck_stage_is_waited_for_longer() -> None:
    chain = Chain(has_spare=False)
    chain.say(SENT, STUCK)
    chain.miss()
    assert chain.shell.coordinator.applied == []
    chain.miss(waited_s=121.0)
    assert len(chain.shell.coordinator.of(happened.StageStalled)) == 1


@pytest.mark.parametrize(
    "changes",
    [
        {"epoch": 7},
        {"chain": "other"},
        {"driver": "a"},
        {"session_namespace": 5},
        {"waited_s": float("nan")},
        {"allowed_s": float("nan")},
    ],
)
def test_what_does_not_concern_the_chain_as_it_is_asks_nobody(chain: Chain, changes: dict[str, Any]) -> None:
    chain.say(SENT, STUCK)
    chain.miss(**changes)
    assert chain.told(chain.nodes[0], TraceStep) == []


def test_one_look_at_a_time(chain: Chain) -> None:
    chain.say(SENT, BUSY)
    waiting: list[Any] = []
    chain.shell.coordinator.background = waiting.append  # type: ignore[method-assign]
    for _ in range(5):
        chain.miss()
    assert len(waiting) == 1
    waiting.pop()()
    chain.miss()
    assert len(waiting) == 1
