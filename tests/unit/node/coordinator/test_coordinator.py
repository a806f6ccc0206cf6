"""A whole cluster turned by hand: no thread, no socket, a clock that stands still until it is moved."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from shardcompute.control import ClusterState, PlacementPolicy, apply, memorable
from shardcompute.control import events as happened
from shardcompute.control.events import encode_event
from shardcompute.core.errors import LinkError
from shardcompute.node.coordinator.coordinator import Coordinator
from shardcompute.node.coordinator.journal import Journal, replay_journal
from shardcompute.node.rpc.commands import (
    Attach,
    Connect,
    Connected,
    FenceOff,
    LoadLayers,
    Probe,
    Retire,
    UnloadLayers,
    encode_answer,
)
from shardcompute.security import Role
from shardcompute.security.certificates import certificate_der, parse_certificate
from shardcompute.wire.control import Heartbeat, NodeEvent, Register
from support.models.plain_model import plain_model
from support.network.papers import Papers

from .conftest import ORIGIN, FakeDriver, FakePump

MODEL = plain_model()
STILL = PlacementPolicy(source_bytes_per_s=1e3)


class FakeNode:
    """A worker that does what it is told at once, and says so."""

    def __init__(self, lab: Lab, name: str, memory_bytes: int) -> None:
        self.lab = lab
        credentials = lab.papers.node(name, Role.WORKER)
        self.id = credentials.identity.node_id
        self._der = certificate_der(parse_certificate(credentials.certificate_pem))
        self._memory_bytes = memory_bytes
        self.held = Connected(True)
        self.dial()

    def dial(self) -> None:
        self.pump = FakePump(self.lab.coordinator.registry, self.id, self._der)
        self.loaded = 0
        self.pump.answers[Connect] = encode_answer(self.held)
        self.lab.say(
            self.pump,
            Register(
                encode_event(
                    happened.NodeJoined(
                        node=self.id,
                        name="n",
                        role="worker",
                        address=f"tcp://{self.id}:1",
                        device="cpu",
                        memory_bytes=self._memory_bytes,
                        threads=1,
                        version="1",
                        incarnation=0,
                        now_s=0.0,
                        seconds_per_byte=1.0,
                    )
                )
            ),
        )

    @property
    def incarnation(self) -> int:
        return self.lab.state.nodes[self.id].incarnation

    def beat(self) -> None:
        self.lab.say(self.pump, Heartbeat(self.incarnation))

    def load_all(self) -> None:
        asked = self.pump.told(LoadLayers)
        for command in asked[self.loaded :]:
            place = (self.id, self.incarnation, command.chain, command.model, command.start, command.stop)
            self.lab.say(self.pump, NodeEvent(encode_event(happened.ShardLoaded(*place, 1))))
        self.loaded = len(asked)


class Lab:
    def __init__(self, folder: Path, papers: Papers) -> None:
        self.papers = papers
        self.folder = folder
        self.clock_s = 1000.0
        self.nodes: list[FakeNode] = []
        self.tasks: list[Callable[[], None]] = []
        self.is_refusing = False
        self.open()

    def open(self) -> None:
        self.journal = Journal(self.folder / "journal")
        self.driver = FakeDriver()
        self.coordinator = Coordinator(
            ORIGIN.node,
            ORIGIN.url,
            self.journal,
            self.driver,
            dial=self._dial,
            initial=ClusterState(driver=ORIGIN.node, placing=STILL),
            clock=lambda: self.clock_s,
            background=self.tasks.append,
        )
        self.coordinator.post(happened.CoordinatorStarted(self.coordinator.now_s()))

    def restart(self) -> None:
        """The process dies and another one reads its journal, on a clock of its own."""
        self.journal.close()
        self.tasks.clear()
        self.clock_s = 5.0
        self.open()

    def _dial(self, url: str, node: str) -> Any:
        error = LinkError("nobody listens")
        if self.is_refusing:
            raise error from ConnectionRefusedError()
        return FakePump(self.coordinator.registry, node)

    @property
    def state(self) -> ClusterState:
        return self.coordinator.state

    def say(self, pump: FakePump, message: Any) -> None:
        self.coordinator.control_server.receive(pump, message)  # type: ignore[arg-type]
        self.turn()

    def join(self, name: str, memory_bytes: int = 500) -> FakeNode:
        node = FakeNode(self, name, memory_bytes)
        self.nodes.append(node)
        return node

    def node(self, id: str) -> FakeNode:
        return next(node for node in self.nodes if node.id == id)

    def turn(self) -> None:
        self.coordinator.turn()
        tasks, self.tasks[:] = list(self.tasks), []
        for task in tasks:
            task()
        if tasks:
            self.turn()

    def settle(self) -> None:
        for _ in range(6):
            for node in self.nodes:
                node.load_all()
            self.pass_time(0.3)

    def pass_time(self, seconds: float) -> None:
        while seconds > 0:
            self.clock_s += min(seconds, 0.4)
            seconds -= 0.4
            for node in self.nodes:
                node.beat()
            self.turn()

    @property
    def chain(self) -> Any:
        return self.state.live_chains()[0]


@pytest.fixture(scope="module")
def papers(tmp_path_factory: pytest.TempPathFactory) -> Papers:
    return Papers.found(Path(tmp_path_factory.mktemp("papers")))


@pytest.fixture
def lab(tmp_path: Path, papers: Papers) -> Iterator[Lab]:
    made = Lab(tmp_path, papers)
    yield made
    made.journal.close()


@pytest.fixture
def serving(lab: Lab) -> Lab:
    for name in ("one", "two"):
        lab.join(name)
    lab.coordinator.post(happened.ModelRequested(MODEL))
    lab.settle()
    assert lab.chain.status == "ready"
    return lab


def test_what_is_remembered_while_it_runs_is_what_a_restart_would_replay(serving: Lab) -> None:
    serving.pass_time(3.0)
    again = happened.CoordinatorStarted(5.0)
    replayed = replay_journal(serving.journal, ClusterState(driver=ORIGIN.node, placing=STILL)).state
    assert replayed.nodes != serving.state.nodes, "heartbeats are not in it"
    assert apply(memorable(serving.state), again) == apply(replayed, again)


def test_a_journal_that_was_replaced_by_its_outcome(serving: Lab) -> None:
    before = serving.chain
    serving.coordinator.record._compact()
    assert len(list(serving.journal.events())) == 1
    serving.restart()
    for node in serving.nodes:
        node.dial()
    serving.settle()
    assert (serving.chain.id, serving.chain.status) == (before.id, "ready")
    assert serving.chain.epoch > before.epoch


def test_what_changes_nothing_is_not_journalled(serving: Lab) -> None:
    count = len(list(serving.journal.events()))
    for _ in range(50):
        serving.coordinator.post(happened.NodeDrained("nobody"))
        serving.coordinator.post(happened.ChainRetired("none", "because"))
    serving.turn()
    assert len(list(serving.journal.events())) == count


def test_from_registration_to_a_chain_in_use(serving: Lab) -> None:
    assert {node.id for node in serving.nodes} == set(serving.chain.nodes)
    [attach] = serving.driver.told(Attach)
    assert (attach.chain, attach.epoch, attach.resumption) == (serving.chain.id, 1, None)
    assert attach.nodes == list(serving.chain.nodes)


def test_a_stage_that_dies_is_replaced_and_sessions_go_on(serving: Lab) -> None:
    spare = serving.join("three")
    serving.settle()
    assert [standby.node for standby in serving.chain.standbys] == [spare.id]
    [standby] = serving.chain.standbys
    dead = serving.node(next(s.node for s in serving.chain.stages if s.start == standby.start))
    serving.nodes.remove(dead)
    serving.is_refusing = True
    serving.coordinator.control_server.link_ended(dead.pump)  # type: ignore[arg-type]
    serving.turn()
    assert serving.state.nodes[dead.id].status == "lost", "its port refuses: its process is gone"
    assert serving.driver.told(FenceOff)[-1] == FenceOff(serving.chain.id, 1)
    serving.settle()
    assert (serving.chain.status, serving.chain.epoch) == ("ready", 2)
    assert spare.id in serving.chain.nodes
    assert serving.driver.told(Attach)[-1].resumption is not None
    keeping = {node.id: node.pump.told(Connect)[-1].keeps_sessions for node in serving.nodes}
    assert keeping[spare.id] is False
    assert sum(keeping.values()) == 1


def test_a_dropped_model_is_retired_fenced_and_unloaded(serving: Lab) -> None:
    chain = serving.chain.id
    serving.coordinator.post(happened.ModelDropped(MODEL.name))
    serving.turn()
    assert serving.driver.told(Retire) == [Retire(chain)]
    assert serving.driver.told(FenceOff) == [FenceOff(chain, 1)]
    serving.settle()
    assert all(len(node.pump.told(UnloadLayers)) == 1 for node in serving.nodes)
    assert (serving.state.chains, serving.state.models) == ({}, {})


def test_a_link_lost_by_the_own_driver_is_of_the_one_clock(serving: Lab) -> None:
    first = serving.chain.nodes[0]
    serving.clock_s += 0.2
    heard: list[ClusterState] = []
    serving.coordinator.listen(heard.append)
    serving.coordinator.lost_link(first)
    serving.turn()
    assert heard[0].chains[serving.chain.id].is_interrupted
    assert serving.chain.epoch == 2


def test_a_closed_link_is_probed_again_after_a_restart(serving: Lab) -> None:
    """Those who come back find it still down; it is tried again all the same, as long as it is closed."""
    a, b = serving.nodes
    serving.coordinator.post(happened.LinkClosed(a.id, b.id, serving.clock_s))
    serving.turn()
    serving.restart()
    for node in serving.nodes:
        node.dial()
    serving.settle()
    link = serving.state.link(a.id, b.id)
    assert link is not None
    assert not link.is_open

    def tries() -> int:
        return sum([peer.node for peer in probe.peers] == [b.id] for probe in a.pump.told(Probe))

    assert tries() == 1
    serving.pass_time(31.0)
    assert tries() == 2
    serving.pass_time(31.0)
    assert tries() == 3
    measured = happened.LinkMeasured(a.id, b.id, 0.01, 1e6)
    serving.say(a.pump, NodeEvent(encode_event(measured)))
    serving.pass_time(31.0)
    assert tries() == 3
    serving.settle()
    assert serving.chain.status == "ready"


def test_a_coordinator_that_stood_still_misses_nobody(serving: Lab) -> None:
    serving.clock_s += 600.0
    serving.turn()
    assert all(node.is_live for node in serving.state.nodes.values())


def test_silence_is_noticed(serving: Lab) -> None:
    silent = serving.nodes.pop()
    serving.join("three")
    serving.settle()
    serving.pass_time(30.0)
    assert serving.state.nodes[silent.id].status == "lost"
    assert silent.id not in serving.chain.nodes


def test_what_goes_wrong_with_one_event_is_no_harm_to_the_next(
    serving: Lab, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> None:
        raise RuntimeError("a fault")

    serving.coordinator.later(fail)
    serving.coordinator.post(happened.NodeDrained(serving.nodes[0].id))
    serving.turn()
    assert serving.state.nodes[serving.nodes[0].id].is_draining
    assert "an event could not be dealt with" in caplog.text


def test_nothing_is_decided_once_all_stop(serving: Lab) -> None:
    serving.coordinator.stand_down()
    serving.coordinator.post(happened.ModelDropped(MODEL.name))
    serving.turn()
    assert serving.chain.status == "ready"
