"""A running swarm among enemies: strangers at its ports, bad tokens, members that meddle with chains and weights.

After every test the swarm must answer as before, from the same epoch of the same chain.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import struct
from pathlib import Path

import pytest

from shardcompute.core.errors import AuthError, ForbiddenError, LinkError, UsageError
from shardcompute.core.generation import GenerationRequest, TokenChoice
from shardcompute.node.enrolment.admission import Application
from shardcompute.node.enrolment.join_client import join_cluster
from shardcompute.security import Credentials, JoinToken, Role, parse_token
from shardcompute.wire import (
    Link,
    Ping,
    RowResult,
    SegmentHeader,
    SessionClose,
    StepFailed,
    StepFrame,
    StepResult,
    open_session,
    pack_ids,
)
from shardcompute.wire.control import (
    CardReply,
    Command,
    FetchFailed,
    FetchModel,
    FetchTensor,
    NodeEvent,
)
from support.network.papers import Papers, connect, connect_tls, dial_as, frame_bytes, hello_of, read_end
from support.swarm.lab import LabSwarm, LabWorker
from support.swarm.siege import BAD_JSON, PROMPT, Siege, receive

pytestmark = pytest.mark.usefixtures("outlasts")
IDLE_CONNECTIONS = 500


@pytest.fixture
def expected(besieged: Siege) -> tuple[TokenChoice, ...]:
    return besieged.expected


def ports(lab: LabSwarm) -> list[str]:
    return [
        lab.cluster.url,
        lab.workers[0]._endpoint.url,
        f"tcp://{lab._token.addresses[0]}",
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
    for url in (lab.cluster.url, lab.workers[0]._endpoint.url):
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
            with connect(url) as sock:
                sock.sendall(b"\0" * 64)
                read_end(sock)
    # One line a minute for each port and kind; earlier tests may have caused it already.
    lines = [record.getMessage() for record in caplog.records if "127.0.0.1" in record.getMessage()]
    assert len([line for line in lines if "dropped" in line or "applicant" in line]) <= 3, lines


# Join tokens


def tries_to_join(lab: LabSwarm, token: JoinToken, name: str, role: Role = Role.WORKER) -> Credentials:
    return join_cluster(token, lab.folder / name, role)[0]


def test_a_token_beyond_its_uses(lab: LabSwarm) -> None:
    token = parse_token(lab.cluster.create_token(max_uses=1))
    first = tries_to_join(lab, token, "first")
    with pytest.raises(AuthError, match="used up"):
        tries_to_join(lab, token, "second")
    # Who has used it may ask again: the answer may have got lost.
    assert tries_to_join(lab, token, "first").identity.node_id == first.identity.node_id
    assert not (lab.folder / "second" / "certificate.pem").exists()


def test_a_token_that_was_revoked(lab: LabSwarm) -> None:
    token = parse_token(lab.cluster.create_token())
    lab.cluster.revoke_token(token.token_id)
    with pytest.raises(AuthError, match="is revoked"):
        tries_to_join(lab, token, "late")


def test_a_token_that_has_expired(lab: LabSwarm) -> None:
    token = parse_token(lab.cluster.create_token(life_s=1e-6))
    with pytest.raises(AuthError, match="has expired"):
        tries_to_join(lab, token, "late")


def test_a_token_for_another_role(lab: LabSwarm) -> None:
    cluster = lab.cluster
    book, token = cluster._tokens.create(
        addresses=lab._token.addresses,
        fingerprint=lab._token.fingerprint,
        cluster=lab._token.cluster,
        now_s=0.0 + cluster._tokens.records[-1].created_at_s,
        roles=(Role.DRIVER,),
    )
    cluster._tokens = book
    with pytest.raises(ForbiddenError, match="does not admit a worker"):
        tries_to_join(lab, token, "role")
    with pytest.raises(UsageError, match="nobody joins as"):
        tries_to_join(lab, token, "role", Role.COORDINATOR)


def test_a_wrong_secret_looks_like_an_unknown_token(lab: LabSwarm) -> None:
    good = lab._token
    for changed in ({"secret": bytes(20)}, {"token_id": "0" * 12}):
        parts = {name: getattr(good, name) for name in JoinToken.__slots__}
        with pytest.raises(AuthError, match="not known to this cluster"):
            tries_to_join(lab, JoinToken(**{**parts, **changed}), "guess")


def test_roles_that_are_none(lab: LabSwarm) -> None:
    token = lab._token
    for role in ("coordinator", "", "worker,coordinator", "\0"):
        with pytest.raises(UsageError, match="nobody joins as"):
            lab.cluster._admit(Application(token.token_id, token.secret, role, "n", ""))


# Members that meddle with chains


def forged_frame(lab: LabSwarm, session: int) -> StepFrame:
    chain = lab.chain()
    ids = pack_ids([1, 2, 3])
    opened = open_session(session, PROMPT.sampling, 3)
    return StepFrame(
        chain.id, chain.epoch, 1, [SegmentHeader(session, 0, 3, 1, ids)], 3, 0, "", opens=[opened]
    )


def waits_for_line(lab: LabSwarm, caplog: pytest.LogCaptureFixture, *parts: str) -> None:
    lab.wait_until(
        lambda: any(all(part in record.getMessage() for part in parts) for record in list(caplog.records)),
        f"a line with {parts}",
    )


@pytest.mark.parametrize("role", ["stage", "driver"])
def test_frames_of_somebody_who_has_no_place_in_the_chain(
    lab: LabSwarm, member: Credentials, role: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Neither a member nor another stage of the same chain may send the first stage anything to compute."""
    first = lab.stage(0)
    first._stages._limited_log = type(first._stages._limited_log)(logging.getLogger("forged"))
    for number, sender in enumerate((member, lab.stage(-1)._endpoint._credentials)):
        with dial_as(sender, first._endpoint.url, role) as link:
            link.send(forged_frame(lab, session=77 + number))
            waits_for_line(lab, caplog, sender.identity.node_id, "no such place")
    assert first.sessions() == 0


def test_sessions_are_ended_by_their_chain_alone(
    lab: LabSwarm, member: Credentials, expected: tuple[TokenChoice, ...]
) -> None:
    chain, first = lab.chain().id, lab.stage(0)
    with dial_as(member, first._endpoint.url, "stage") as link:
        talk = lab.start(PROMPT)
        lab.wait_until(lambda: len(talk.tokens) > 2, "tokens")
        sessions = [
            session for driver in lab.cluster.pool._drivers.values() for session in driver._generations
        ]
        while not talk.is_over:
            link.send(SessionClose(chain, sessions))
        assert talk.result().tokens == expected


@pytest.mark.parametrize("who", ["a member", "the first stage"])
def test_results_of_anybody_but_the_last_stage(
    lab: LabSwarm, member: Credentials, who: str, expected: tuple[TokenChoice, ...]
) -> None:
    sender = member if who == "a member" else lab.stage(0)._endpoint._credentials
    chain = lab.chain()
    [driver] = lab.cluster.pool._drivers.values()
    with dial_as(sender, lab.cluster.url, "stage") as link:
        talk = lab.start(PROMPT)
        while not talk.is_over:
            for sequence in list(driver._in_flight):
                rows = [RowResult(session, 17, 65) for session in list(driver._generations)]
                link.send(StepResult(chain.id, chain.epoch, sequence, rows))
                if who == "a member":
                    link.send(StepFailed(chain.id, chain.epoch, sequence, [], "UsageError", "no"))
        assert talk.result().tokens == expected


def test_a_token_that_the_model_does_not_have(lab: LabSwarm) -> None:
    """From the last stage itself: the request fails, the chain goes on."""
    chain = lab.chain()
    [driver] = lab.cluster.pool._drivers.values()
    last = lab.stage(-1)
    talk = lab.start(GenerationRequest(PROMPT.prompt, 400))
    lab.wait_until(lambda: bool(driver._in_flight) or talk.is_over, "a frame")
    while not talk.is_over:
        for sequence in list(driver._in_flight):
            rows = [RowResult(session, 17, 1 << 30) for session in list(driver._generations)]
            result = StepResult(chain.id, chain.epoch, sequence, rows)
            lab.cluster.pool.take(result, memoryview(b""), last.node)
    with pytest.raises(Exception, match="token that the model does not have"):
        talk.result()


# Weights


def weights_links(lab: LabSwarm, member: Credentials) -> list[tuple[Link, str]]:
    """A link to everybody who serves weights, and what they call the model."""
    card = lab.cluster._served[lab.model].card
    workers: list[LabWorker] = lab.workers
    return [
        (dial_as(member, lab.cluster.url, "weights"), lab.model),
        *((dial_as(member, worker._endpoint.url, "weights"), card.fingerprint) for worker in workers),
    ]


def test_weights_that_cannot_be_had(lab: LabSwarm, member: Credentials) -> None:
    tensor, entry = next(iter(lab.cluster._served[lab.model].card.entries.items()))
    most = (1 << 63) - 1
    for link, model in weights_links(lab, member):
        with link:
            for request in (
                FetchModel(1, "no such model"),
                FetchModel(1, "../../../etc/passwd"),
                FetchModel(1, "\0" * 1000),
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
                assert len(reply.reason) < 5000
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
    worker = lab.workers[0]
    answers = []
    coordinator = lab.cluster.coordinator
    [told] = [each for each in coordinator._members.all() if each.node == worker.node]
    number = 1 << 40
    coordinator._members._waiting[number] = (told.pump, answers.append)
    told.pump.offer(Command(number, content))
    lab.wait_until(lambda: bool(answers), "an answer")
    assert "cannot be understood" in answers[0].error


def test_frames_cut_short_and_half_sent_inside_a_link(lab: LabSwarm, member: Credentials) -> None:
    frame = frame_bytes(forged_frame(lab, 5))
    for url, role in ((lab.cluster.url, "control"), (lab.workers[0]._endpoint.url, "stage")):
        for content in (frame[:-1], frame[:7], frame[:-1] + b"\xc1", b"SCw\x01" + b"\xff" * 12):
            with connect_tls(url, member.client_context()) as sock:
                sock.sendall(frame_bytes(hello_of(member, role)))
                assert sock.recv(4096).startswith(b"SCw")
                sock.sendall(content)
