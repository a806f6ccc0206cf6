"""Pairing by a code over real connections: what an honest machine gets, and what strangers do not."""

from __future__ import annotations

import contextlib
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from shardcompute.core.errors import AuthError, LinkError, QueueFullError, ShardComputeError, UsageError
from shardcompute.node.enrolment.admission import (
    Admission,
    PairingAnswer,
    PairingGrant,
    PairingProof,
    PairingStart,
    receive,
    send,
)
from shardcompute.node.enrolment.join_server import JoinServer
from shardcompute.node.enrolment.pairing_client import pair, pairing_channel
from shardcompute.node.enrolment.pairing_server import PairingServer
from shardcompute.security import Role, TokenBook, join_server_context
from shardcompute.security.bootstrap import answer_join, open_pairing
from shardcompute.security.pairing.codes import MOST_BEGUN, PairingDesk
from shardcompute.security.pairing.cpace import agree, begin_exchange, proof_of
from support.network.papers import Papers

SESSION = bytes(range(16))


class PairingCluster:
    """A cluster's join server that pairs, and what it has heard."""

    def __init__(self, folder: Path, *, role: Role = Role.COORDINATOR, digits: int = 1_234_567) -> None:
        self.papers = Papers.found(folder)
        self.codes = PairingDesk(random_below=lambda bound: digits)
        self.granted: list[str] = []
        self.refused: list[str] = []
        own = self.papers.node("coordinator", role)
        self.context = join_server_context(own.identity, own.certificate_pem)
        authority = self.papers.authority
        self._server = JoinServer(
            "127.0.0.1",
            0,
            self.context,
            authority.certificate_pem,
            lambda application, peer: Admission(error="no", code="AuthError"),
            timeout_s=20.0,
            pairing=PairingServer(self.codes, authority.fingerprint, self._grant, self.refused.append),
        )
        self.address = f"127.0.0.1:{self._server.port}"

    def _grant(self, machine: str) -> str:
        self.granted.append(machine)
        authority = self.papers.authority
        _, token = TokenBook().create(
            addresses=["10.9.8.7:7421"],
            fingerprint=authority.fingerprint,
            cluster=authority.name,
            now_s=time.time(),
        )
        return token.encode()

    def begin(self, content: bytes) -> tuple[ssl.SSLSocket, bytes]:
        """What is answered to these first words, by hand."""
        host, port = self.address.split(":")
        connection, _ = open_pairing(socket.create_connection((host, int(port)), timeout=20))
        send(connection, content)
        return connection, receive(connection)

    def begin_guess(self, code: bytes) -> tuple[ssl.SSLSocket, bytes]:
        """As somebody who knows the protocol and not the code: a connection, and what to prove there."""
        share = begin_exchange(code, pairing_channel(self.papers.authority.fingerprint), SESSION)
        start = PairingStart(SESSION, share.public, "guesser")
        connection, content = self.begin(msgspec.json.encode(start))
        answer = msgspec.json.decode(content, type=PairingAnswer)
        return connection, proof_of(agree(share, SESSION, share.public, answer.share), "initiator")

    def close(self) -> None:
        self._server.close()


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., PairingCluster]]:
    with contextlib.ExitStack() as stack:
        made: list[PairingCluster] = []

        def build(**options: Any) -> PairingCluster:
            folder = tmp_path / str(len(made))
            folder.mkdir()
            made.append(stack.enter_context(contextlib.closing(PairingCluster(folder, **options))))
            return made[-1]

        yield build


@pytest.fixture
def cluster(make: Callable[..., PairingCluster]) -> PairingCluster:
    return make()


def test_a_machine_with_the_code_gets_a_token_with_the_address_that_works(cluster: PairingCluster) -> None:
    token = pair(cluster.address, cluster.codes.open().shown, "lap\x1btop")
    assert token.fingerprint == cluster.papers.authority.fingerprint
    assert token.addresses == (cluster.address, "10.9.8.7:7421")
    assert cluster.granted == ["laptop"]
    assert cluster.refused == []


def test_a_code_lets_one_machine_in(cluster: PairingCluster) -> None:
    code = cluster.codes.open().shown
    pair(cluster.address, code, "first")
    with pytest.raises(AuthError, match="lets nobody pair now"):
        pair(cluster.address, code, "second")


def test_nobody_pairs_while_no_code_is_shown(cluster: PairingCluster) -> None:
    with pytest.raises(AuthError, match="lets nobody pair now"):
        pair(cluster.address, PairingDesk().open().shown, "stranger")


def test_a_wrong_code_is_the_only_try(cluster: PairingCluster) -> None:
    code = cluster.codes.open()
    wrong = PairingDesk(random_below=lambda bound: 7_654_321).open().shown
    with pytest.raises(AuthError, match="is wrong"):
        pair(cluster.address, wrong, "guesser")
    assert cluster.refused == ["guesser"]
    with pytest.raises(AuthError, match="lets nobody pair now"):
        pair(cluster.address, code.shown, "honest but late")
    assert cluster.granted == []


def test_a_slip_of_the_hand_is_caught_here(cluster: PairingCluster) -> None:
    code = cluster.codes.open().digits
    with pytest.raises(UsageError, match="no pairing code"):
        pair(cluster.address, f"{code[:-1]}{(int(code[-1]) + 1) % 10}", "clumsy")
    pair(cluster.address, code, "careful")


def test_many_guesses_at_once_are_one_try(cluster: PairingCluster) -> None:
    code = cluster.codes.open().digits.encode()
    begun = [cluster.begin_guess(guess) for guess in (b"00000000", b"11111111", code, b"22222222")]
    answers: list[PairingGrant] = []
    for connection, proof in begun:
        with connection:
            send(connection, msgspec.json.encode(PairingProof(proof)))
            answers.append(msgspec.json.decode(receive(connection), type=PairingGrant))
    assert [answer.token for answer in answers] == [""] * 4
    assert ["is wrong" in answer.error for answer in answers] == [True, False, False, False]


def test_a_proof_that_is_nonsense_uses_the_code_up(cluster: PairingCluster) -> None:
    cluster.codes.open()
    share = begin_exchange(b"00000000", b"", SESSION)
    connection, _ = cluster.begin(msgspec.json.encode(PairingStart(SESSION, share.public)))
    with connection:
        send(connection, b"[]")
        assert "is wrong" in msgspec.json.decode(receive(connection), type=PairingGrant).error
    with pytest.raises(AuthError):
        cluster.codes.begin()


def test_a_proof_sent_back_proves_nothing(cluster: PairingCluster) -> None:
    """The coordinator's own kind of proof is not the machine's."""
    code = cluster.codes.open()
    share = begin_exchange(
        code.digits.encode(), pairing_channel(cluster.papers.authority.fingerprint), SESSION
    )
    connection, content = cluster.begin(msgspec.json.encode(PairingStart(SESSION, share.public)))
    with connection:
        answer = msgspec.json.decode(content, type=PairingAnswer)
        key = agree(share, SESSION, share.public, answer.share)
        send(connection, msgspec.json.encode(PairingProof(proof_of(key, "responder"))))
        assert msgspec.json.decode(receive(connection), type=PairingGrant).token == ""


@pytest.mark.parametrize(
    "start",
    [
        PairingStart(b"", bytes(32)),
        PairingStart(SESSION, b""),
        PairingStart(SESSION, bytes(32)),
        PairingStart(SESSION, b"x" * 40_000),
    ],
)
def test_shares_that_nobody_sends(cluster: PairingCluster, start: PairingStart) -> None:
    cluster.codes.open()
    connection, content = cluster.begin(msgspec.json.encode(start))
    with connection:
        answer = msgspec.json.decode(content, type=PairingAnswer)
    assert (answer.share, answer.code) == (b"", "AuthError")
    cluster.codes.begin()


def test_strangers_who_only_knock_learn_nothing_and_are_limited(cluster: PairingCluster) -> None:
    code = cluster.codes.open()
    for _ in range(MOST_BEGUN):
        cluster.codes.begin()
    with pytest.raises(QueueFullError, match="Too many machines"):
        pair(cluster.address, code.shown, "one more")


class Between:
    """Somebody who answers as a cluster of his own and passes the exchange on to the real one."""

    def __init__(self, own: PairingCluster, victim: PairingCluster) -> None:
        self._own, self._victim = own, victim
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._socket.getsockname()[1]}"
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        sock, _ = self._socket.accept()
        sock.settimeout(20)
        pem = self._own.papers.authority.certificate_pem
        with (
            answer_join(sock, self._own.context, pem) as near,
            contextlib.suppress(ShardComputeError, OSError),
        ):
            far, content = self._victim.begin(receive(near))
            with far:
                send(near, content)
                send(far, receive(near))
                send(near, receive(far))

    def close(self) -> None:
        self._thread.join()
        self._socket.close()


def test_somebody_in_between_gets_nothing_passed_on(make: Callable[..., PairingCluster]) -> None:
    cluster, attacker = make(), make()
    code = cluster.codes.open().shown
    with (
        contextlib.closing(Between(attacker, cluster)) as between,
        pytest.raises(AuthError, match="is wrong"),
    ):
        pair(between.address, code, "victim")
    assert cluster.granted == []
    assert cluster.refused == ["victim"]


def test_a_cluster_that_does_not_know_the_code_is_not_believed(make: Callable[..., PairingCluster]) -> None:
    """It says yes to any proof, and hands out a token of its own."""
    attacker = make()
    attacker.codes.open()
    attacker.codes.settle = lambda code, *, is_right: None  # type: ignore[method-assign]
    right = PairingDesk(random_below=lambda bound: 42).open().shown
    with pytest.raises(AuthError, match="does not know the code"):
        pair(attacker.address, right, "victim")


def test_a_member_that_is_no_coordinator_cannot_pair(make: Callable[..., PairingCluster]) -> None:
    worker = make(role=Role.WORKER)
    with pytest.raises(AuthError, match="coordinator"):
        pair(worker.address, worker.codes.open().shown, "victim")


def test_nobody_answers_at_the_address(cluster: PairingCluster) -> None:
    code = PairingDesk().open().shown
    for address in ("127.0.0.1:1", "127.0.0.1:99999", "nowhere", "127.0.0.1:x"):
        with pytest.raises(LinkError, match="no cluster answers"):
            pair(address, code, "lost")


def test_an_answer_that_is_none(tmp_path: Path) -> None:
    server = socket.create_server(("127.0.0.1", 0))

    def answer() -> None:
        sock, _ = server.accept()
        with sock:
            sock.recv(8)
            sock.sendall(struct.pack("!H", 3) + b"xyz")

    thread = threading.Thread(target=answer)
    thread.start()
    with pytest.raises(LinkError, match="does not speak the join protocol"):
        pair(f"127.0.0.1:{server.getsockname()[1]}", PairingDesk().open().shown, "lost")
    thread.join()
    server.close()
