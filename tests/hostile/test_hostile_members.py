"""Members of a running swarm that lie about themselves and about others. The coordinator believes none of it.

After every test the swarm must answer as before, from the same epoch of the same chain.
"""

from __future__ import annotations

import contextlib
import itertools
import queue
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from shardcompute.control import events as happened
from shardcompute.control.events import Event, NodeJoined, encode_event
from shardcompute.control.state import Holding, Shard
from shardcompute.core.errors import LinkError
from shardcompute.node.enrolment.join_client import join_cluster
from shardcompute.node.rpc.commands import Probe
from shardcompute.security import Credentials, NodeIdentity, Role
from shardcompute.wire import (
    Link,
    Message,
    Pong,
    Refused,
)
from shardcompute.wire.control import (
    CertificateIssued,
    Command,
    CommandReply,
    NodeEvent,
    Register,
    Registered,
    RenewCertificate,
    StepOverdue,
    TensorBytes,
)
from support.network.lab_links import LabLink
from support.network.papers import dial_as, hello_of
from support.swarm.lab import DEADLINE_S, LabSwarm
from support.swarm.siege import BAD_JSON, receive

pytestmark = pytest.mark.usefixtures("outlasts")
_marks = itertools.count()


# Members that lie about who they are


@contextlib.contextmanager
def control_link(lab: LabSwarm, member: Credentials) -> Iterator[Link]:
    with dial_as(member, lab.cluster.url, "control") as link:
        yield link


def description(member: Credentials, **changes: Any) -> NodeJoined:
    """A node that is of no use to anybody."""
    fields: dict[str, Any] = {
        "node": member.identity.node_id,
        "name": "member",
        "role": "worker",
        "address": "tcp://127.0.0.1:1",
        "device": "cpu",
        "memory_bytes": 0,
        "threads": 1,
        "version": "1",
        "incarnation": 0,
        "now_s": 0.0,
        "seconds_per_byte": 1e-9,
    }
    return NodeJoined(**{**fields, **changes})


@pytest.mark.parametrize("role", ["control", "stage", "driver", "weights", "probe", "", "coordinator"])
def test_a_greeting_in_another_name(lab: LabSwarm, member: Credentials, role: str) -> None:
    honest = hello_of(member, role)
    victim = msgspec.structs.replace(honest, node=lab.workers[0].node)
    for url in (lab.cluster.url, lab.workers[1].url):
        with pytest.raises(LinkError, match="was expected"):
            dial_as(member, url, role, victim)


def test_registering_another_node(lab: LabSwarm, member: Credentials) -> None:
    victim = lab.workers[0].node
    before = lab.state.nodes[victim]
    with control_link(lab, member) as link:
        link.send(Register(encode_event(description(member, node=victim))))
        assert "only register itself" in receive(link, Refused).reason
    assert lab.state.nodes[victim].incarnation == before.incarnation
    assert lab.state.nodes[victim].memory_bytes == before.memory_bytes


RANGE = {"model": "m", "start": 0, "stop": 1}
CLAIMS: dict[str, dict[str, Any]] = {
    "less than no memory": {"memory_bytes": -1},
    "all the memory": {"memory_bytes": 1 << 60},
    "more than any number": {"memory_bytes": 10**400},
    "a reason that is a novel": {"memory_reason": "x" * 1001},
    "no threads": {"threads": 0},
    "free of cost": {"seconds_per_byte": 0.0},
    "faster than light": {"seconds_per_byte": -1e-9},
    "faster than anything": {"seconds_per_byte": 5e-324},
    "slower than anything": {"seconds_per_byte": 1e308},
    "overhead": {"overhead_s": -1.0},
    "escape sequences": {"name": "\x1b[2J"},
    "a novel": {"name": "x" * 301},
    "no name": {"name": ""},
    "no device": {"device": "c\npu"},
    "no address": {"address": "tcp://"},
    "another scheme": {"address": "file:///etc/passwd"},
    "a port that is none": {"address": "tcp://127.0.0.1:99999"},
    "no port at all": {"address": "tcp://127.0.0.1:0"},
    "a scheme within this process": {"address": "inproc://127.0.0.1:7420"},
    "a web address": {"address": "http://127.0.0.1:80"},
    "a socket of the system": {"address": "unix://run:1"},
    "a host with a password": {"address": "tcp://me:secret@127.0.0.1:80"},
    "a host with a path": {"address": "tcp://127.0.0.1:80/../../x"},
    "a host with spaces": {"address": "tcp://a b:80"},
    "a script for the page": {"api_url": "javascript:alert(1)//:80"},
    "a file for the page": {"api_url": "file:///etc/passwd"},
    "an API that is none": {"api_url": "http://"},
    "a version as long as a book": {"version": "1" * 400},
    "very many codecs": {"codecs": ("exact",) * 65},
    "shards before the first layer": {"shards": (Shard("c", "m", -1, 1, 1),)},
    "shards of nothing": {"shards": (Shard("c", "m", 3, 3, 1),)},
    "shards behind the last layer": {"shards": (Shard("c", "m", 0, 1 << 40, 1),)},
    "shards of less than nothing": {"shards": (Shard("c", "m", 0, 1, -1),)},
    "holdings": {"cached": (Holding("m", 5, 2),)},
    "very many holdings": {"cached": (Holding("m", 0, 1),) * 5000},
}


@pytest.mark.parametrize("claim", CLAIMS.values(), ids=CLAIMS)
def test_absurd_claims(lab: LabSwarm, member: Credentials, claim: dict[str, Any]) -> None:
    with control_link(lab, member) as link:
        link.send(Register(encode_event(description(member, **claim))))
        assert receive(link, Refused).reason.startswith("This node is not registered: ")
    assert member.identity.node_id not in lab.state.nodes


@pytest.mark.parametrize("content", BAD_JSON.values(), ids=BAD_JSON)
@pytest.mark.parametrize("kind", [Register, NodeEvent])
def test_events_that_are_none_end_their_link_alone(
    lab: LabSwarm, member: Credentials, kind: type, content: bytes
) -> None:
    with control_link(lab, member) as link:
        link.send(kind(content))
        with pytest.raises(LinkError, match="ended the link"):
            link.receive(20)


# Members that lie about others


@pytest.fixture
def registered(lab: LabSwarm, member: Credentials) -> Iterator[tuple[Link, int]]:
    """The member's control link and its incarnation."""
    node = member.identity.node_id
    with control_link(lab, member) as link:
        link.send(Register(encode_event(description(member))))
        incarnation = receive(link, Registered).incarnation
        lab.wait_until(lambda: node in lab.state.nodes and lab.state.nodes[node].is_live, "the member")
        yield link, incarnation
    lab.wait_until(lambda: not lab.state.nodes[node].is_live, "the member's end")


def reports(lab: LabSwarm, link: Link, member: Credentials, *events: Event) -> None:
    """Tell the coordinator; afterwards it has looked at all of it."""
    node = member.identity.node_id
    for event in events:
        link.send(NodeEvent(encode_event(event)))
    mark = f"mark {next(_marks)}"
    incarnation = lab.state.nodes[node].incarnation
    link.send(
        NodeEvent(encode_event(happened.ShardFailed(node, incarnation, "none", mark, 0, 1, "a mark", 0.0)))
    )
    lab.wait_until(
        lambda: any(refusal.model == mark for refusal in lab.state.nodes[node].refusals), "the last report"
    )


def test_speaking_for_others(lab: LabSwarm, member: Credentials, registered: tuple[Link, int]) -> None:
    link, _ = registered
    victim, other = lab.stage(0).node, lab.stage(1).node
    life, chain = lab.state.nodes[victim].incarnation, lab.chain()
    before = lab.state.nodes[victim]
    reports(
        lab,
        link,
        member,
        happened.NodeLeft(victim, life),
        happened.NodeLost(victim, life, "gone", 0.0),
        happened.NodeDrained(victim),
        happened.NodeSuspected(victim, life, "strange", 0.0),
        happened.NodeMeasured(node=victim, incarnation=life, seconds_per_byte=1.0),
        happened.ShardFailed(victim, life, chain.id, chain.model, 0, 2, "broken", 0.0),
        happened.ShardUnloaded(victim, life, chain.id, 0, 2),
        happened.MemoryRegained(victim, life, 1 << 40, True),
        happened.LinkBroken(other, victim, 0.0),
        happened.LinkBroken("coordinator", victim, 0.0),
        happened.LinkMeasured(victim, other, 100.0, 1.0, False),
        happened.ChainRetired(chain.id, "because"),
        happened.ChainReshaped(chain.id, chain.epoch + 1, chain.stages),
        happened.ModelDropped(chain.model),
        happened.LinkClosed(victim, other, 1.0),
        happened.CoordinatorStarted(0.0),
    )
    after = lab.state.nodes[victim]
    assert after.memory_bytes == before.memory_bytes
    assert (after.status, after.shards, after.accusers, after.refusals, after.seconds_per_byte) == (
        "ready",
        before.shards,
        (),
        (),
        before.seconds_per_byte,
    )
    assert lab.chain().status == "ready"
    assert lab.state.models[chain.model].is_wanted
    assert lab.state.link(victim, other) != happened.LinkMeasured(victim, other, 100.0, 1.0, False)


def test_absurd_reports(lab: LabSwarm, member: Credentials, registered: tuple[Link, int]) -> None:
    link, life = registered
    node, driver = member.identity.node_id, lab.cluster.node
    links = lab.state.links
    reports(
        lab,
        link,
        member,
        happened.NodeMeasured(node=node, incarnation=life, seconds_per_byte=1e308),
        happened.NodeMeasured(node=node, incarnation=life, model=lab.model, layer_s=5e-324),
        happened.NodeMeasured(node=node, incarnation=life, overhead_s=1e300),
        happened.ShardLoaded(node, life, "c", lab.model, -5, 10**12, -1),
        happened.ShardProgressed(node, life, "c", 5, 1, 7.0),
        happened.LinkMeasured(node, "a node that nobody knows", 1.0, 1.0),
        happened.LinkMeasured(node, driver, -1.0, 1e308),
        happened.LinkBroken(node, "\x1b[2J", 0.0),
        happened.ShardFailed(node, life, "c", "more", 0, 1, "less than nothing", 0.0, -1),
        happened.ShardFailed(node, life, "c", "long", 0, 1, "x" * 5_000, 0.0),
        happened.MemoryRegained(node, life, 1 << 60, True),
    )
    known = lab.state.nodes[node]
    assert known.memory_bytes < 1 << 50
    assert (known.seconds_per_byte, known.overhead_s, known.layer_times) == (1e-9, 0.0, ())
    assert (known.shards, known.loading) == ((), ())
    assert lab.state.links == links
    assert max(len(refusal.reason) for refusal in known.refusals) == 1000


def test_a_node_may_say_of_itself_what_is_so(
    lab: LabSwarm, member: Credentials, registered: tuple[Link, int]
) -> None:
    link, life = registered
    node = member.identity.node_id
    measured = happened.NodeMeasured(node=node, incarnation=life, seconds_per_byte=2e-9)
    # Often: the median of what it measured is believed, and it began with other values at each registration.
    reports(lab, link, member, *[measured] * 20)
    assert lab.state.nodes[node].seconds_per_byte == 2e-9


# Members that say too much


@pytest.fixture
def talker(lab: LabSwarm) -> Credentials:
    """A member that the others do not share: what it says counts against nobody else."""
    return join_cluster(lab.token, lab.folder / f"talker {next(_marks)}", Role.WORKER)[0]


def ended(link: Link) -> bool:
    """Whether the coordinator has ended this link."""
    with contextlib.suppress(TimeoutError):
        try:
            while True:
                link.receive(DEADLINE_S)
        except LinkError:
            return True
    return False


def can_send(link: Link, events: Iterable[Event]) -> bool:
    """Whether the link held while all of these were reported."""
    with contextlib.suppress(LinkError):
        for event in events:
            link.send(NodeEvent(encode_event(event)))
        return True
    return False


def journal_bytes(lab: LabSwarm) -> int:
    return sum(path.stat().st_size for path in (lab.folder / "cluster").glob("journal.sqlite*"))


@pytest.mark.parametrize(
    "message",
    [
        CommandReply(1, "x" * (4 << 20)),
        CommandReply(1, "", b"x" * (5 << 20)),
        NodeEvent(b" " * (1 << 20)),
        Register(b" " * (1 << 20)),
    ],
    ids=["an error of 4 MB", "a result of 5 MB", "a report of 1 MB", "a registration of 1 MB"],
)
def test_what_is_far_too_long_is_not_even_read(
    lab: LabSwarm, member: Credentials, message: Message, caplog: pytest.LogCaptureFixture
) -> None:
    with control_link(lab, member) as link:
        link.send(message)
        assert ended(link)
    assert max(map(len, caplog.messages), default=0) < 3000


def test_errors_are_lines(lab: LabSwarm, member: Credentials, registered: tuple[Link, int]) -> None:
    """What a member answers to a command is shown to people: no text steers their terminals or fakes a line."""
    link, _ = registered
    answers = lab.cluster.coordinator.registry.ask(member.identity.node_id, Probe([]))
    while not isinstance(message := link.receive(20)[0], Command):
        pass
    for number in range(message.number + 50):
        link.send(CommandReply(number, "\x1b[2J\nroot: all is well"))
    assert answers.get(timeout=DEADLINE_S).error == " [2J root: all is well"


def test_names_that_are_made_up_do_not_fill_the_state(lab: LabSwarm, talker: Credentials) -> None:
    node = talker.identity.node_id
    with control_link(lab, talker) as link:
        link.send(Register(encode_event(description(talker))))
        life = receive(link, Registered).incarnation
        lab.wait_until(lambda: node in lab.state.nodes, "the member")
        for number in range(300):
            name = f"made up {number}"
            for event in (
                happened.ShardLoaded(node, life, name, name, 0, 1, 1),
                happened.ShardProgressed(node, life, name, 0, 1, 0.5),
                happened.NodeMeasured(node=node, incarnation=life, model=name, layer_s=0.1),
            ):
                link.send(NodeEvent(encode_event(event)))
        reports(lab, link, talker)
        known = lab.state.nodes[node]
        assert len(known.shards) <= 256
        assert len(known.loading) <= 256
        assert len(known.layer_times) == 256


def test_a_flood_of_reports_ends_its_own_link_and_leaves_the_journal_small(
    lab: LabSwarm, talker: Credentials
) -> None:
    node, before = talker.identity.node_id, journal_bytes(lab)
    event = happened.ShardFailed(node, 1, "c", "m", 0, 1, "y" * 990, 0.0)
    with control_link(lab, talker) as link:
        link.send(Register(encode_event(description(talker))))
        assert receive(link, Registered).incarnation == 1
        assert not can_send(
            link,
            (msgspec.structs.replace(event, model=f"m{number % 50}") for number in range(100_000)),
        )
    lab.wait_until(lambda: not lab.state.nodes[node].is_live, "the member's end")
    assert journal_bytes(lab) - before < 6 << 20
    # The others were not disturbed.
    assert all(lab.state.nodes[worker.node].status == "ready" for worker in lab.workers)


def test_answers_to_commands_of_others_and_other_nonsense(
    lab: LabSwarm, member: Credentials, registered: tuple[Link, int]
) -> None:
    link, life = registered
    node = member.identity.node_id
    asked, may_answer = lab.workers[0].node, threading.Event()
    true: queue.SimpleQueue[CommandReply] = queue.SimpleQueue()

    def watch(end: LabLink, message: Message) -> None:
        if end.peer == asked and isinstance(message, CommandReply) and not may_answer.is_set():
            true.put(message)
            may_answer.wait(DEADLINE_S)

    with lab.network.watched(watch):
        answers = lab.cluster.coordinator.registry.ask(asked, Probe([]))
        reply = true.get(timeout=DEADLINE_S)
        try:
            for number in (*range(200), reply.number):
                link.send(CommandReply(number, "I refuse for all of them", b"\xff"))
            link.send(Registered(99, 0.0, b"\xff"))
            link.send(Command(1, b"{}"))
            link.send(TensorBytes(1, 3), (b"abc",))
            link.send(Pong(1, 1.0))
            reports(lab, link, member, happened.NodeMeasured(node=node, incarnation=life, overhead_s=0.5))
            assert lab.state.nodes[node].overhead_s == 0.5
            assert answers.empty()
        finally:
            may_answer.set()
    assert answers.get(timeout=DEADLINE_S) == reply


# Members that miss what is not theirs, and want papers that are not theirs


@pytest.mark.parametrize("waited_s", [0.0, 1e9, float("inf"), float("nan"), -1.0])
def test_a_step_that_somebody_else_would_miss(lab: LabSwarm, talker: Credentials, waited_s: float) -> None:
    """Nobody is asked about it, and no stage replaced."""
    chain, namespace = lab.chain(), lab.cluster.pool.session_namespace
    with control_link(lab, talker) as link:
        for sequence in range(200):
            link.send(StepOverdue(chain.id, chain.epoch, namespace, sequence, waited_s, waited_s))
            link.send(StepOverdue("x" * 500, 0, 0, sequence, waited_s, 0.0))
        link.send(RenewCertificate("heard to the end"))
        assert receive(link, CertificateIssued).error
    assert (lab.chain().epoch, lab.chain().is_interrupted) == (chain.epoch, False)


def test_papers_that_a_member_has_no_right_to(lab: LabSwarm, talker: Credentials, tmp_path: Path) -> None:
    others = NodeIdentity.open(tmp_path).certificate_request()
    own = talker.identity.certificate_request()
    with control_link(lab, talker) as link:
        for request in (others, own, "", "x" * 16_000, own.replace("A", "B")):
            link.send(RenewCertificate(request))
            issued = receive(link, CertificateIssued)
            assert issued.certificate_pem == ""
            assert issued.error
