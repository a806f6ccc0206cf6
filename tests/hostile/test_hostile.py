"""A running swarm among enemies: strangers at its ports, bad tokens, members that meddle with chains and weights.

After every test the swarm must answer as before, from the same epoch of the same chain.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import struct
from pathlib import Path

import msgspec
import pytest

from shardcompute.core.errors import AuthError, ForbiddenError, LinkError, ShardComputeError, UsageError
from shardcompute.core.generation import TokenChoice
from shardcompute.node.enrolment.admission import Admission, Application
from shardcompute.node.enrolment.join_client import join_cluster
from shardcompute.security import Credentials, JoinToken, Role, parse_token
from shardcompute.security.bootstrap import open_join
from shardcompute.weights.card import Card, decode_card
from shardcompute.wire import (
    Link,
    Message,
    Ping,
    SegmentHeader,
    SessionClose,
    StageTiming,
    StepFailed,
    StepFrame,
    StepResult,
    open_session,
    pack_ids,
)
from shardcompute.wire.control import (
    CardReply,
    Command,
    CommandReply,
    FetchFailed,
    FetchModel,
    FetchTensor,
    NodeEvent,
)
from support.network.lab_links import LabLink
from support.network.papers import Papers, connect, connect_tls, dial_as, frame_bytes, hello_of, read_end
from support.swarm.lab import LabSwarm, LabWorker
from support.swarm.siege import BAD_JSON, PROMPT, Siege, deliver, receive, suspended

pytestmark = pytest.mark.usefixtures("outlasts")
IDLE_CONNECTIONS = 500
STRANGER = "127.0.0.77"
"""An address of this machine that no other test comes from."""


@pytest.fixture
def expected(besieged: Siege) -> tuple[TokenChoice, ...]:
    return besieged.expected


def ports(lab: LabSwarm) -> list[str]:
    return [
        lab.cluster.url,
        lab.workers[0].url,
        f"tcp://{lab.token.addresses[0]}",
    ]


# Strangers

GARBAGE = {
    "zeros": b"\0" * 4096,
    "http": b"POST / HTTP/1.1\r\ncontent-length: 99999999999\r\n\r\n",
    "a frame without TLS": frame_bytes(Ping(1, 0.0)),
    "absurd lengths": struct.pack("<3sBIQ", b"SCw", 1, 0xFFFFFFFF, 1 << 62),
    "a record that is cut short": b"\x16\x03\x01\x40\x00\x01",
    "join, then nothing good": b"SCJOIN1\n" + b"\xff" * 4096,
}


@pytest.mark.parametrize("content", GARBAGE.values(), ids=GARBAGE)
def test_garbage_at_every_port(lab: LabSwarm, content: bytes) -> None:
    for url in ports(lab):
        with connect(url) as sock:
            with contextlib.suppress(OSError):
                sock.sendall(content)
                sock.shutdown(socket.SHUT_WR)
            assert len(read_end(sock)) < 1024


def test_papers_of_another_cluster(lab: LabSwarm, tmp_path: Path) -> None:
    stranger = Papers.found(tmp_path, lab.cluster.options.name).node("stranger", Role.COORDINATOR)
    for url in (lab.cluster.url, lab.workers[0].url):
        with pytest.raises(LinkError, match="TLS"):
            dial_as(stranger, url, "control")


def test_a_crowd_of_silent_connections(lab: LabSwarm) -> None:
    """While they stand there tokens flow, and a new machine joins, registers and leaves."""
    with contextlib.ExitStack() as crowd:
        for url in ports(lab):
            for _ in range(IDLE_CONNECTIONS // 2):
                crowd.enter_context(connect(url))
        talk = lab.start(PROMPT)
        newcomer = lab.add_worker(0)
        lab.wait_until(lambda: newcomer.node in lab.state.nodes, "the newcomer")
        talk.result()
    lab.workers.remove(newcomer)
    newcomer.close()
    lab.wait_until(lambda: not lab.state.nodes[newcomer.node].is_live, "the newcomer's end")


def test_a_stranger_fills_no_log(lab: LabSwarm, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    for _ in range(30):
        for url in ports(lab):
            with connect(url, source=STRANGER) as sock:
                sock.sendall(b"\0" * 64)
                read_end(sock)

    def lines() -> list[str]:
        return [line for line in (each.getMessage() for each in list(caplog.records)) if STRANGER in line]

    # One line a minute for each port.
    lab.wait_until(lambda: len(lines()) >= len(ports(lab)), lambda: f"a line for each port: {lines()}")
    assert len(lines()) == len(ports(lab)), lines()


# Join tokens


def tries_to_join(lab: LabSwarm, token: JoinToken, name: str, role: Role = Role.WORKER) -> Credentials:
    return join_cluster(token, lab.folder / name, role)[0]


def test_a_token_beyond_its_uses(lab: LabSwarm) -> None:
    token = parse_token(lab.cluster.access.create_token(max_uses=1))
    first = tries_to_join(lab, token, "first")
    with pytest.raises(AuthError, match="used up"):
        tries_to_join(lab, token, "second")
    # Who has used it may ask again: the answer may have got lost.
    assert tries_to_join(lab, token, "first").identity.node_id == first.identity.node_id
    assert not (lab.folder / "second" / "certificate.pem").exists()


def test_a_token_that_was_revoked(lab: LabSwarm) -> None:
    token = parse_token(lab.cluster.access.create_token())
    lab.cluster.access.revoke_token(token.token_id)
    with pytest.raises(AuthError, match="is revoked"):
        tries_to_join(lab, token, "late")


def test_a_token_that_has_expired(lab: LabSwarm) -> None:
    token = parse_token(lab.cluster.access.create_token(life_s=1e-6))
    with pytest.raises(AuthError, match="has expired"):
        tries_to_join(lab, token, "late")


def test_a_token_for_another_role(lab: LabSwarm) -> None:
    token = parse_token(lab.cluster.access.create_token(roles=(Role.DRIVER,)))
    with pytest.raises(ForbiddenError, match="does not admit a worker"):
        tries_to_join(lab, token, "role")
    with pytest.raises(UsageError, match="nobody joins as"):
        tries_to_join(lab, token, "role", Role.COORDINATOR)


def test_a_wrong_secret_looks_like_an_unknown_token(lab: LabSwarm) -> None:
    good = lab.token
    for changed in ({"secret": bytes(20)}, {"token_id": "0" * 12}):
        parts = {name: getattr(good, name) for name in JoinToken.__slots__}
        with pytest.raises(AuthError, match="not known to this cluster"):
            tries_to_join(lab, JoinToken(**{**parts, **changed}), "guess")


def test_roles_that_are_none(lab: LabSwarm) -> None:
    token = lab.token
    for role in ("coordinator", "", "worker,coordinator", "\0"):
        application = msgspec.json.encode(Application(token.token_id, token.secret, role, "n", ""))
        connection, _ = open_join(connect(f"tcp://{token.addresses[0]}"), token)
        with connection:
            connection.sendall(struct.pack("!I", len(application)) + application)
            admission = msgspec.json.decode(read_end(connection)[4:], type=Admission)
        assert (admission.code, admission.certificate_pem) == ("UsageError", "")
        assert "nobody joins as" in admission.error


# Members that meddle with chains


def forged_frame(lab: LabSwarm, session: int) -> StepFrame:
    chain = lab.chain()
    ids = pack_ids([1, 2, 3])
    opened = open_session(session, PROMPT.sampling, 3)
    return StepFrame(
        chain.id, chain.epoch, 1, [SegmentHeader(session, 0, 3, 1, ids)], 3, 0, "", opens=[opened]
    )


def with_token(result: StepResult, token: int) -> StepResult:
    """The same result, had the model said something else."""
    rows = [msgspec.structs.replace(row, token=token) for row in result.rows]
    return msgspec.structs.replace(result, rows=rows)


def waits_for_line(lab: LabSwarm, caplog: pytest.LogCaptureFixture, *parts: str) -> None:
    lab.wait_until(
        lambda: any(all(part in record.getMessage() for part in parts) for record in list(caplog.records)),
        f"a line with {parts}",
    )


@pytest.mark.parametrize("role", ["stage", "driver"])
def test_frames_of_somebody_who_has_no_place_in_the_chain(
    lab: LabSwarm, role: str, expected: tuple[TokenChoice, ...], caplog: pytest.LogCaptureFixture
) -> None:
    """Neither a member nor another stage of the same chain may send the first stage anything to compute."""
    first, forged = lab.stage(0), {77, 78}
    # Nobody has heard of it yet, so that its first line is not kept back.
    newcomer = tries_to_join(lab, lab.token, f"newcomer of role {role}")
    for session, sender in zip(sorted(forged), (newcomer, lab.stage(-1).credentials), strict=True):
        with dial_as(sender, first.url, role) as link:
            deliver(lab, link, sender, forged_frame(lab, session))
    waits_for_line(lab, caplog, newcomer.identity.node_id, "no such place")
    # What is computed in turn has been computed since.
    assert lab.ask(PROMPT).tokens == expected
    assert not forged & first.session_ids()


def test_sessions_are_ended_by_their_chain_alone(
    lab: LabSwarm, member: Credentials, expected: tuple[TokenChoice, ...]
) -> None:
    chain, first = lab.chain(), lab.stage(0)
    with dial_as(member, first.url, "stage") as link:
        with suspended(lab) as answer:
            sessions = [row.session for row in answer.result.rows]
            assert sessions
            assert first.sessions() > 0
            for epoch in (0, chain.epoch):
                deliver(lab, link, member, SessionClose(chain.id, sessions, epoch))
            assert not answer.talk.is_over
        assert answer.talk.result().tokens == expected


@pytest.mark.parametrize("who", ["a member", "the first stage"])
def test_results_of_anybody_but_the_last_stage(
    lab: LabSwarm, member: Credentials, who: str, expected: tuple[TokenChoice, ...]
) -> None:
    sender = member if who == "a member" else lab.stage(0).credentials
    with dial_as(sender, lab.cluster.url, "stage") as link:
        with suspended(lab) as answer:
            true = answer.result
            forged: list[Message] = [with_token(true, 65)]
            # A stage may say that a step failed; a member may not.
            if who == "a member":
                forged.append(StepFailed(true.chain, true.epoch, true.sequence, [], "UsageError", "no"))
            assert forged[0] != true
            deliver(lab, link, sender, *forged)
            assert not answer.talk.is_over
        assert answer.talk.result().tokens == expected


def test_a_token_that_the_model_does_not_have(lab: LabSwarm) -> None:
    """From the last stage itself: the request fails, the chain goes on."""
    with suspended(lab) as answer:
        lab.cluster.pool.take(with_token(answer.result, 1 << 30), memoryview(b""), lab.stage(-1).node)
    with pytest.raises(ShardComputeError, match="token that the model does not have"):
        answer.talk.result()


def test_stages_that_do_not_exist(lab: LabSwarm, expected: tuple[TokenChoice, ...]) -> None:
    """The last stage hands on what all stages took; names and times that it makes up are counted nowhere."""
    nodes = set(lab.chain().nodes)
    invented = [StageTiming(f"nobody {number}", 1e6, 1e6) for number in range(1000)]
    absurd = [StageTiming(lab.stage(-1).node, float("nan"), float("inf"), -1e300)]
    with suspended(lab) as answer:
        forged = msgspec.structs.replace(answer.result, timings=[*absurd, *invented])
        lab.cluster.pool.take(forged, memoryview(b""), lab.stage(-1).node)
    assert answer.talk.result().tokens == expected
    load = lab.cluster.pool.load()
    assert {stage.node for stage in load.stages} == nodes
    assert all(0 <= stage.compute_s < 1e5 for stage in load.stages)


# Weights


def weights_links(lab: LabSwarm, member: Credentials) -> list[tuple[Link, str]]:
    """A link to everybody who serves weights, and what they call the model."""
    workers: list[LabWorker] = lab.workers
    fingerprint = card_of(lab, member).fingerprint
    return [
        (dial_as(member, lab.cluster.url, "weights"), lab.model),
        *((dial_as(member, worker.url, "weights"), fingerprint) for worker in workers),
    ]


def card_of(lab: LabSwarm, member: Credentials) -> Card:
    with dial_as(member, lab.cluster.url, "weights") as link:
        link.send(FetchModel(1, lab.model))
        return decode_card(receive(link, CardReply).card)


def test_weights_that_cannot_be_had(lab: LabSwarm, member: Credentials) -> None:
    tensor, entry = next(iter(card_of(lab, member).entries.items()))
    most = (1 << 63) - 1
    for link, model in weights_links(lab, member):
        with link:
            for request in (
                FetchModel(1, "no such model"),
                FetchModel(1, "../../../etc/passwd"),
                FetchModel(1, "\0" * 500),
                FetchTensor(1, "no such model", tensor, 0, 1),
                FetchTensor(1, model, "no such tensor", 0, 1),
                FetchTensor(1, model, "../" * 100, 0, 1),
                FetchTensor(1, model, tensor, entry.size_bytes, 1),
                FetchTensor(1, model, tensor, most, most),
                FetchTensor(1, model, tensor, 0, most),
                FetchTensor(1, model, tensor, most, 0),
            ):
                link.send(request)
                reply = receive(link, FetchFailed)
                assert reply.number == 1
                assert len(reply.reason) <= 2000
            link.send(FetchModel(2, model))
            assert receive(link, CardReply).number == 2


def test_other_messages_on_a_link_for_weights(lab: LabSwarm, member: Credentials) -> None:
    for link, _ in weights_links(lab, member):
        with link:
            link.send(NodeEvent(b"{}"))
            with pytest.raises(LinkError, match="ended the link"):
                link.receive(20)


# What a worker is told


@pytest.mark.parametrize("content", BAD_JSON.values(), ids=BAD_JSON)
def test_commands_that_are_none(lab: LabSwarm, content: bytes) -> None:
    worker, coordinator, number = lab.workers[0].node, lab.cluster.node, 1 << 40
    replies: list[CommandReply] = []

    def watch(link: LabLink, message: Message) -> None:
        if link.peer == worker and isinstance(message, CommandReply) and message.number == number:
            replies.append(message)

    with lab.network.watched(watch):
        lab.network.send(coordinator, worker, "control", Command(number, content))
        lab.wait_until(lambda: bool(replies), "a reply")
    assert "cannot be understood" in replies[0].error


def test_frames_cut_short_and_half_sent_inside_a_link(lab: LabSwarm, member: Credentials) -> None:
    frame = frame_bytes(forged_frame(lab, 5))
    for url, role in ((lab.cluster.url, "control"), (lab.workers[0].url, "stage")):
        for content in (frame[:-1], frame[:7], frame[:-1] + b"\xc1", b"SCw\x01" + b"\xff" * 12):
            with connect_tls(url, member.client_context()) as sock:
                sock.sendall(frame_bytes(hello_of(member, role)))
                assert sock.recv(4096).startswith(b"SCw")
                sock.sendall(content)
