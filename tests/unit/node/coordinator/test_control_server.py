"""Who comes is registered once and told what there is; who goes, breaks off or is revoked leaves the others alone."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from shardcompute.control import events as happened
from shardcompute.control.events import Event, encode_event
from shardcompute.control.state import Shard
from shardcompute.core.errors import ForbiddenError
from shardcompute.node.coordinator.control_server import ControlServer
from shardcompute.node.coordinator.stalled_steps import StalledSteps
from shardcompute.node.rpc.commands import FenceOff, Introduce, Leave, Probe
from shardcompute.security import Role
from shardcompute.security.certificates import (
    PeerIdentity,
    certificate_der,
    parse_certificate,
    peer_from_certificate,
)
from shardcompute.wire import Refused
from shardcompute.wire.control import (
    CertificateIssued,
    CommandReply,
    DrawQuota,
    Heartbeat,
    NodeEvent,
    QuotaGranted,
    Register,
    Registered,
    RenewCertificate,
    ReportUsage,
    UsageTaken,
)
from support.network.papers import Papers
from support.swarm.fake_cluster import MODEL, serving_cluster

from .conftest import ORIGIN, FakePump, Shell

CHAIN = f"{MODEL.name}#1"


class FakeLiveness:
    """Knows what it was asked; `on_ended` is for the test to call."""

    def __init__(self) -> None:
        self.learned: list[tuple[str, str]] = []
        self.checks: dict[str, Any] = {}

    def learn(self, node: str, url: str) -> None:
        self.learned.append((node, url))

    def check(self, node: str, url: str, on_ended: Any) -> None:
        self.checks[node] = on_ended


class Served:
    def __init__(self, shell: Shell, papers: Papers) -> None:
        self.shell = shell
        self.papers = papers
        self.liveness = FakeLiveness()
        self.refuses_to_sign = False
        self.server = ControlServer(
            shell.coordinator,
            ORIGIN,
            shell.registry,
            shell.ports,
            shell.attachments,
            shell.executor,
            StalledSteps(shell.coordinator, shell.registry, shell.ports),
            self.liveness,  # type: ignore[arg-type]
            lambda: b"revoked",
            self.sign,
            accounts=self,
        )
        self.reports: list[tuple[str, ReportUsage]] = []

    def draw(self, node: str, message: DrawQuota) -> QuotaGranted:
        return QuotaGranted(message.number, tokens=message.tokens)

    def count(self, node: str, message: ReportUsage) -> bool:
        self.reports.append((node, message))
        return message.sequence < 3

    def sign(self, peer: PeerIdentity, request_pem: str) -> str:
        if self.refuses_to_sign:
            raise ForbiddenError("it was removed")
        return self.papers.authority.issue(
            request_pem, node_id=peer.node_id, roles=peer.roles, now_s=time.time()
        )

    def dial(self, name: str, role: Role = Role.WORKER) -> FakePump:
        """A node's link, with papers for a role."""
        papers = self.papers.node(name, role)
        der = certificate_der(parse_certificate(papers.certificate_pem))
        return FakePump(self.shell.registry, papers.identity.node_id, der)

    def register(self, pump: FakePump, **changes: Any) -> None:
        fields: dict[str, Any] = {
            "node": pump.link.peer,
            "name": "attic",
            "role": "worker",
            "address": "tcp://attic:1",
            "device": "cpu",
            "memory_bytes": 100,
            "threads": 1,
            "version": "1",
            "incarnation": 0,
            "now_s": 0.0,
        }
        self.receive(pump, Register(encode_event(happened.NodeJoined(**{**fields, **changes}))))

    def receive(self, pump: FakePump, message: Any) -> None:
        self.server.receive(pump, message)  # type: ignore[arg-type]

    def report(self, pump: FakePump, event: Event) -> None:
        self.receive(pump, NodeEvent(encode_event(event)))


def of(pump: FakePump, kind: type) -> list[Any]:
    return [message for message in pump.messages if isinstance(message, kind)]


@pytest.fixture(scope="module")
def papers(tmp_path_factory: pytest.TempPathFactory) -> Papers:
    return Papers.found(Path(tmp_path_factory.mktemp("papers")))


@pytest.fixture
def served(shell: Shell, papers: Papers) -> Served:
    return Served(shell, papers)


def test_a_node_that_registers_is_told_so_and_measures_its_links(served: Served) -> None:
    served.shell.coordinator.time_s = 5.0
    pump = served.dial("one")
    served.register(pump)
    node = served.shell.coordinator.state.nodes[pump.link.peer]
    assert (node.incarnation, node.last_seen_s, node.name) == (1, 5.0, "attic")
    assert of(pump, Registered) == [Registered(1, 0.5, b"revoked")]
    [probe] = pump.told(Probe)
    assert [peer.node for peer in probe.peers] == ["head", "a", "b"]
    assert served.liveness.learned == [(pump.link.peer, "tcp://attic:1")]


def test_each_registration_is_another_life(served: Served) -> None:
    first, second = served.dial("one"), served.dial("one")
    served.register(first)
    served.register(second)
    assert first.is_closed
    assert of(second, Registered)[0].incarnation == 2
    served.server.link_ended(first)  # type: ignore[arg-type]
    assert served.shell.coordinator.of(happened.LinkBroken) == [], "it has a newer link"


@pytest.mark.parametrize(
    "changes",
    [
        {"node": "a"},
        {"role": "driver", "memory_bytes": 0},
        {"memory_bytes": -1},
        {"session_namespace": -1},
        {"address": "nowhere"},
    ],
)
def test_who_is_not_what_it_says_is_refused(served: Served, changes: dict[str, Any]) -> None:
    pump = served.dial("one")
    served.register(pump, **changes)
    assert len(of(pump, Refused)) == 1
    assert served.shell.coordinator.applied == []


def test_two_drivers_never_number_sessions_alike(served: Served) -> None:
    first, second = served.dial("one", Role.DRIVER), served.dial("two", Role.DRIVER)
    for pump in (first, second):
        served.register(pump, role="driver", memory_bytes=0, session_namespace=4)
    assert of(first, Refused) == []
    assert len(of(second, Refused)) == 1
    assert second.link.peer not in served.shell.coordinator.state.nodes
    assert len(first.told(Introduce)) == 1


def test_who_comes_back_with_what_others_serve_now_forgets_its_sessions(served: Served) -> None:
    pump = served.dial("one")
    served.register(pump, shards=(Shard(CHAIN, MODEL.name, 0, 3, 9),))
    assert pump.told(FenceOff) == [FenceOff(CHAIN, 0, forgets=True)]


def test_heartbeats_are_of_the_coordinators_time(served: Served) -> None:
    pump = served.shell.pumps["a"]
    served.shell.coordinator.time_s = 2000.0
    served.receive(pump, Heartbeat(1))
    assert served.shell.coordinator.applied == [happened.NodeSeen("a", 1, 2000.0)]


def test_a_wattage_that_cannot_be_is_unknown(served: Served) -> None:
    served.shell.coordinator.time_s = 2000.0
    served.receive(served.shell.pumps["a"], Heartbeat(1, 5, 6, (), 65.0, float("nan"), 9))
    served.receive(served.shell.pumps["b"], Heartbeat(1, 0, 0, (), float("inf"), -1.0))
    assert served.shell.coordinator.applied == [
        happened.NodeSeen("a", 1, 2000.0, 5, 6, (), 65.0, 0.0, 9),
        happened.NodeSeen("b", 1, 2000.0),
    ]


def test_heartbeats_that_wait_are_heard_together(served: Served) -> None:
    coordinator, waiting = served.shell.coordinator, []
    coordinator.later = waiting.append  # type: ignore[method-assign]
    coordinator.time_s = 2000.0
    for name in ("a", "b"):
        served.receive(served.shell.pumps[name], Heartbeat(1))
    for task in waiting:
        task()
    both = (happened.NodeSeen("a", 1, 2000.0), happened.NodeSeen("b", 1, 2000.0))
    assert coordinator.applied == [happened.NodesSeen(both)]


def test_a_heartbeat_of_another_life_ends_the_link(served: Served) -> None:
    pump = served.shell.pumps["a"]
    served.receive(pump, Heartbeat(7))
    assert pump.is_closed
    assert served.shell.coordinator.applied == []


def test_reports_get_the_coordinators_time_and_others_news_is_none(served: Served) -> None:
    pump = served.shell.pumps["a"]
    served.shell.coordinator.time_s = 2000.0
    served.report(pump, happened.LinkBroken("a", "b", 1e9))
    served.report(pump, happened.LinkBroken("b", "a", 1e9))
    served.report(pump, happened.LinkClosed("a", "b", 1e9))
    served.report(pump, happened.ChainRetired(CHAIN, "because"))
    assert served.shell.coordinator.applied == [happened.LinkBroken("a", "b", 2000.0)]


def test_an_answer_reaches_whoever_asked(served: Served) -> None:
    pump = served.shell.pumps["a"]
    pump.answers[Leave] = None
    answer = served.shell.registry.ask("a", Leave())
    served.receive(pump, CommandReply(pump.messages[-1].number, "", b"done"))
    assert answer.get_nowait().result == b"done"


def test_a_link_that_ends_is_not_yet_the_end_of_its_node(served: Served) -> None:
    served.shell.coordinator.time_s = 3.0
    served.server.link_ended(served.shell.pumps["a"])  # type: ignore[arg-type]
    assert served.shell.coordinator.applied == [happened.LinkBroken("coordinator", "a", 3.0)]
    assert served.shell.coordinator.state.nodes["a"].is_live
    served.liveness.checks["a"]()
    assert served.shell.coordinator.state.nodes["a"].status_reason == "its process has ended"
    assert not served.shell.coordinator.state.nodes["a"].is_live


def test_a_node_that_says_goodbye_has_left(served: Served) -> None:
    pump = served.shell.pumps["a"]
    served.report(pump, happened.NodeLeft("a", 1))
    assert pump.is_closed
    assert served.shell.coordinator.state.nodes["a"].status == "gone"
    served.server.link_ended(pump)  # type: ignore[arg-type]
    assert served.shell.coordinator.of(happened.LinkBroken) == []


def test_a_node_that_wants_to_go_stays_until_it_is_relieved(served: Served) -> None:
    pump = served.shell.pumps["a"]
    served.report(pump, happened.NodeDrained("a"))
    assert not pump.is_closed
    assert served.shell.coordinator.state.nodes["a"].is_draining


def test_when_all_stop_nobody_is_missed(served: Served) -> None:
    served.shell.coordinator.has_stood_down = True
    going, ended = served.shell.pumps["a"], served.shell.pumps["b"]
    served.report(going, happened.NodeDrained("a"))
    assert going.is_closed, "it need not wait for others to take over"
    served.server.link_ended(ended)  # type: ignore[arg-type]
    assert served.shell.coordinator.applied == []


def test_a_revoked_node_is_told_and_the_others_get_the_news(served: Served) -> None:
    served.server.revoke("a")
    revoked, other = served.shell.pumps["a"], served.shell.pumps["b"]
    assert len(of(revoked, Refused)) == 1
    assert revoked.is_closed
    assert served.shell.coordinator.state.nodes["a"].status == "gone"
    assert of(other, Registered) == [Registered(1, 0.5, b"revoked")]
    served.server.revoke("nobody")
    assert len(served.shell.coordinator.applied) == 1


def test_a_drivers_stages_are_known_by_their_other_end(papers: Papers) -> None:
    """A stage that lost the coordinator's own driver says so; the driver is no node."""
    served = Served(Shell(serving_cluster(500, 500).coordinator.state), papers)
    served.report(served.shell.pumps["a"], happened.LinkBroken("a", "head", 0.0))
    assert served.shell.coordinator.applied == [happened.LinkBroken("head", "a", 0.0)]


def test_a_member_gets_its_next_certificate_over_its_link(served: Served, papers: Papers) -> None:
    pump = served.dial("one", Role.DRIVER)
    request = papers.node("one").identity.certificate_request()
    served.receive(pump, RenewCertificate(request))
    [issued] = of(pump, CertificateIssued)
    renewed = peer_from_certificate(parse_certificate(issued.certificate_pem))
    assert (renewed.node_id, renewed.roles) == (pump.link.peer, {Role.DRIVER})


def test_whoever_gets_none_is_told_why(served: Served, papers: Papers) -> None:
    pump = served.dial("one")
    served.receive(pump, RenewCertificate(papers.node("other").identity.certificate_request()))
    served.receive(pump, RenewCertificate("no request"))
    served.refuses_to_sign = True
    served.receive(pump, RenewCertificate(papers.node("one").identity.certificate_request()))
    answers = of(pump, CertificateIssued)
    assert [answer.certificate_pem for answer in answers] == [""] * 3
    for answer, words in zip(answers, ("its key belongs to", "cannot be read", "removed"), strict=True):
        assert words in answer.error
    assert not pump.is_closed


# Accounts


def test_drivers_draw_and_report_and_workers_do_not(served: Served) -> None:
    driver, worker = served.dial("one", Role.DRIVER), served.dial("two", Role.WORKER)
    asked, told = DrawQuota(5, 1, "key", 0, 1, 0, 0, 40), DrawQuota(0, 1, "key", 0, 2, 7, 33)
    for pump in (driver, worker):
        served.receive(pump, asked)
        served.receive(pump, told)
        for sequence in (1, 2, 3):
            served.receive(pump, ReportUsage(1, sequence, []))
    assert of(driver, QuotaGranted) == [QuotaGranted(5, tokens=40)]
    assert of(driver, UsageTaken) == [UsageTaken(1), UsageTaken(2)], "the third did not count"
    assert worker.messages == []
    assert {node for node, _ in served.reports} == {driver.link.peer}
