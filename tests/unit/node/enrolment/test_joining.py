"""The join server and its applicants, honest and otherwise. The server is a real one on loopback."""

from __future__ import annotations

import contextlib
import logging
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from shardcompute.core.errors import AuthError, CapacityError, ForbiddenError, LinkError, UsageError
from shardcompute.node.enrolment.admission import Admission, Application
from shardcompute.node.enrolment.join_client import join_cluster, join_together
from shardcompute.node.enrolment.join_server import JoinServer
from shardcompute.security import (
    JOIN_HELLO,
    JoinToken,
    Role,
    TokenBook,
    join_client_context,
    join_greeting,
    join_server_context,
)
from shardcompute.security.credentials import Credentials
from shardcompute.security.identity import NodeIdentity
from support.network.papers import Papers, drip, read_end

Admit = Callable[[Application], Admission]


class Desk:
    """A desk with an authority, a token and a list of those it has heard."""

    def __init__(self, folder: Path, role: Role = Role.COORDINATOR) -> None:
        self.papers = Papers.found(folder)
        self.heard: list[Application] = []
        self.refusal: Exception | None = None
        self.most_companions = 99
        self._opened = contextlib.ExitStack()
        self._own = self.papers.node("coordinator", role)

    def open(self, *, timeout_s: float = 20.0, most_at_once: int = 32) -> Desk:
        context = join_server_context(self._own.identity, self._own.certificate_pem)
        pem = self.papers.authority.certificate_pem
        desk = JoinServer(
            "127.0.0.1", 0, context, pem, self._admit, timeout_s=timeout_s, most_at_once=most_at_once
        )
        self._opened.callback(desk.close)
        self.port = desk.port
        return self

    @property
    def token(self) -> JoinToken:
        authority = self.papers.authority
        _, token = TokenBook().create(
            addresses=[f"127.0.0.1:{self.port}"],
            fingerprint=authority.fingerprint,
            cluster=authority.name,
            now_s=time.time(),
        )
        return token

    def _admit(self, application: Application, peer: str) -> Admission:
        self.heard.append(application)
        if self.refusal is not None:
            raise self.refusal
        certificate, *others = [
            self.papers.authority.issue(
                each.request_pem, node_id=each.node_id, roles=[Role(application.role)], now_s=time.time()
            )
            for each in (application, *application.companions)
        ]
        others = others[: self.most_companions]
        return Admission(certificate, ["tcp://0.0.0.0:7420", "tcp://10.0.0.1:7420"], others)

    def connect(self) -> socket.socket:
        return self._opened.enter_context(socket.create_connection(("127.0.0.1", self.port), timeout=20))

    def greet(self) -> ssl.SSLSocket:
        """As far as TLS, by hand."""
        sock = self.connect()
        sock.sendall(JOIN_HELLO)
        greeting = join_greeting(self.papers.authority.certificate_pem)
        received = b""
        while len(received) < len(greeting):
            received += sock.recv(len(greeting) - len(received))
        assert received == greeting
        context = join_client_context(self.papers.authority.certificate_pem)
        return self._opened.enter_context(context.wrap_socket(sock))

    def answer_to(self, content: bytes) -> Admission:
        sock = self.greet()
        sock.sendall(struct.pack("!I", len(content)) + content)
        return msgspec.json.decode(read_end(sock)[4:], type=Admission)

    def close(self) -> None:
        self._opened.close()


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    with contextlib.closing(Desk(tmp_path)) as desk:
        yield desk


def test_joins(desk: Desk, tmp_path: Path) -> None:
    credentials, urls = join_cluster(desk.open().token, tmp_path / "worker", Role.WORKER)
    assert credentials.own.roles == {Role.WORKER}
    assert credentials.own.cluster == "home"
    assert [heard.node_id for heard in desk.heard] == [credentials.identity.node_id]
    # A coordinator that listens everywhere is where it answered.
    assert urls == ["tcp://127.0.0.1:7420", "tcp://10.0.0.1:7420"]
    for path in (tmp_path / "worker").iterdir():
        assert path.stat().st_mode & 0o777 == 0o600, path


def test_several_nodes_of_a_machine_join_together(desk: Desk, tmp_path: Path) -> None:
    folders = [tmp_path / "worker", *(tmp_path / "worker" / "places" / f"cuda-{n}" for n in range(1, 32))]
    credentials, urls = join_together(desk.open().token, folders, Role.WORKER)
    assert len({each.identity.node_id for each in credentials}) == 32
    assert len(desk.heard) == 1
    assert urls[0] == "tcp://127.0.0.1:7420"
    for folder, each in zip(folders, credentials, strict=True):
        assert Credentials.load(NodeIdentity.load(folder)) == each
    with pytest.raises(UsageError, match="33 places of one machine"):
        join_together(desk.token, [*folders, tmp_path / "one more"], Role.WORKER)


def test_a_coordinator_that_forgets_one_is_no_answer(desk: Desk, tmp_path: Path) -> None:
    desk.most_companions = 0
    with pytest.raises(LinkError, match="1 certificates for 2"):
        join_together(desk.open().token, [tmp_path / "a", tmp_path / "b"], Role.WORKER)


def test_tries_every_address(desk: Desk, tmp_path: Path) -> None:
    token = desk.open().token
    with socket.create_server(("127.0.0.1", 0)) as nobody:
        dead = f"127.0.0.1:{nobody.getsockname()[1]}"
    join_cluster(replace(token, addresses=(dead, *token.addresses)), tmp_path / "worker", Role.WORKER)
    with pytest.raises(LinkError, match=f"home cannot be reached .{dead}"):
        join_cluster(replace(token, addresses=(dead,)), tmp_path / "worker", Role.WORKER)


@pytest.mark.parametrize(
    "refusal", [AuthError("The join token has expired"), ForbiddenError("not you"), CapacityError("full")]
)
def test_a_refusal_keeps_its_kind(desk: Desk, tmp_path: Path, refusal: Exception) -> None:
    desk.refusal = refusal
    with pytest.raises(type(refusal), match=str(refusal)):
        join_cluster(desk.open().token, tmp_path / "worker", Role.WORKER)
    assert not (tmp_path / "worker" / "certificate.pem").exists()


def test_the_secret_is_told_to_the_right_cluster_alone(desk: Desk, tmp_path: Path) -> None:
    other = Papers.found(tmp_path / "other").authority.fingerprint
    with pytest.raises(AuthError, match="another cluster"):
        join_cluster(replace(desk.open().token, fingerprint=other), tmp_path / "worker", Role.WORKER)
    assert desk.heard == []


def test_the_secret_is_told_to_a_coordinator_alone(tmp_path: Path) -> None:
    with contextlib.closing(Desk(tmp_path, Role.WORKER)) as impostor:
        with pytest.raises(ForbiddenError, match="may not act as coordinator"):
            join_cluster(impostor.open().token, tmp_path / "worker", Role.WORKER)
        assert impostor.heard == []


def still_joins(desk: Desk, folder: Path) -> bool:
    desk.refusal = None
    return join_cluster(desk.token, folder / "honest", Role.WORKER)[0].own.cluster == "home"


@pytest.mark.parametrize(
    "content",
    [
        b"\x00" * 16,
        b"GET / HTTP/1.1\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        JOIN_HELLO[:4],
        JOIN_HELLO + b"\x00" * 512,
        JOIN_HELLO + b"\x16\x03\x01\xff\xff" + b"\xaa" * 70_000,
    ],
    ids=["zeros", "http", "TLS at once", "half a greeting", "no TLS", "long record"],
)
def test_garbage_before_tls(desk: Desk, tmp_path: Path, content: bytes) -> None:
    sock = desk.open().connect()
    with contextlib.suppress(OSError):
        sock.sendall(content)
        sock.shutdown(socket.SHUT_WR)
    assert len(read_end(sock)) < 1024
    assert desk.heard == []
    assert still_joins(desk, tmp_path)


@pytest.mark.parametrize("size", [(64 << 10) + 1, 0x7FFFFFFF, 0xFFFFFFFF])
def test_an_absurd_length_is_not_believed(desk: Desk, tmp_path: Path, size: int) -> None:
    sock = desk.open().greet()
    sock.sendall(struct.pack("!I", size))
    assert read_end(sock) == b""
    assert still_joins(desk, tmp_path)


def test_an_application_that_is_cut_short(desk: Desk, tmp_path: Path) -> None:
    sock = desk.open().greet()
    sock.sendall(struct.pack("!I", 100) + b"{")
    sock.close()
    assert still_joins(desk, tmp_path)
    assert len(desk.heard) == 1


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"null",
        b"{}",
        b"\xff\xfe",
        b'{"token_id": 1}',
        b'{"x":' + b"[" * 60_000,
        b'{"token_id":"","secret":"","role":"","node_id":"","request_pem":"\xff"}',
    ],
    ids=["nothing", "null", "empty", "bytes", "types", "deep", "text"],
)
def test_applications_that_cannot_be_understood(desk: Desk, tmp_path: Path, content: bytes) -> None:
    answer = desk.open().answer_to(content)
    assert answer == Admission(error="The application cannot be understood", code="AuthError")
    assert desk.heard == []
    assert still_joins(desk, tmp_path)


@pytest.mark.parametrize(
    "change", [{"request_pem": "x" * 20_000}, {"request_pem": "é"}, {"node_id": "n" * 10_000}]
)
def test_requests_that_are_none(desk: Desk, tmp_path: Path, change: dict[str, str]) -> None:
    join_cluster(desk.open().token, tmp_path / "first", Role.WORKER)
    honest = desk.heard[0]
    fields = {name: getattr(honest, name) for name in Application.__struct_fields__}
    answer = desk.answer_to(msgspec.json.encode(Application(**{**fields, **change})))
    assert answer.certificate_pem == ""
    assert len(answer.error) < 500
    assert still_joins(desk, tmp_path)


def test_a_certificate_for_another_node_is_not_given(desk: Desk, tmp_path: Path) -> None:
    join_cluster(desk.open().token, tmp_path / "victim", Role.WORKER)
    join_cluster(desk.token, tmp_path / "thief", Role.WORKER)
    victim, thief = desk.heard
    mixed = Application(thief.token_id, thief.secret, "worker", victim.node_id, thief.request_pem)
    answer = desk.answer_to(msgspec.json.encode(mixed))
    assert answer.certificate_pem == ""
    assert "its key belongs to" in answer.error


def test_a_fault_of_ours_ends_one_application_alone(
    desk: Desk, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    desk.refusal = ZeroDivisionError("unforeseen")
    token = desk.open().token
    for _ in range(2):
        with pytest.raises(LinkError):
            join_cluster(token, tmp_path / "worker", Role.WORKER)
    assert still_joins(desk, tmp_path)
    wait_for_applicants()
    assert [r.levelname for r in caplog.records if "could not be served" in r.message] == ["ERROR"]


def test_slow_applicants_are_sent_away(desk: Desk, tmp_path: Path) -> None:
    """A byte now and then does not extend the time."""
    desk.open(timeout_s=0.3)
    silent, trickling = desk.connect(), desk.greet()
    trickling.sendall(struct.pack("!I", 1000))
    assert drip(trickling, b" ") == b""
    assert read_end(silent) == b""
    assert still_joins(desk, tmp_path)


def test_a_crowd_keeps_nobody_out(desk: Desk, tmp_path: Path) -> None:
    desk.open(timeout_s=600, most_at_once=4)
    crowd = [desk.connect() for _ in range(40)]
    assert still_joins(desk, tmp_path)
    # All but the latest had to go.
    assert [read_end(sock) for sock in crowd[:30]] == [b""] * 30


def test_closing_waits_for_nobody(desk: Desk) -> None:
    desk.open()
    silent, waiting = desk.connect(), desk.greet()
    desk.close()
    assert silent.fileno() == waiting.fileno() == -1
    wait_for_applicants()


def test_strangers_are_logged_once(desk: Desk, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    desk.open()
    for _ in range(20):
        sock = desk.connect()
        sock.sendall(b"\x00" * 8)
        read_end(sock)
    desk.refusal = AuthError("The join token is not known to this cluster")
    for _ in range(5):
        with pytest.raises(AuthError):
            join_cluster(desk.token, tmp_path / "worker", Role.WORKER)
    wait_for_applicants()
    lines = [record.message for record in caplog.records if "an applicant" in record.message]
    assert len(lines) == 2, lines
    assert "gave up" in lines[0]
    assert "was refused" in lines[1]


def test_a_port_in_use(desk: Desk) -> None:
    desk.open()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    with pytest.raises(LinkError, match="cannot be used for joining"):
        JoinServer("127.0.0.1", desk.port, context, "", lambda *_: Admission())


def test_nothing_but_usage_comes_of_a_role_that_is_none(desk: Desk, tmp_path: Path) -> None:
    desk.refusal = UsageError("nobody joins as 'king'")
    with pytest.raises(UsageError, match="king"):
        join_cluster(desk.open().token, tmp_path / "worker", Role.WORKER)


def wait_for_applicants() -> None:
    for thread in threading.enumerate():
        if thread.name.startswith("applicant"):
            thread.join(20)
            assert not thread.is_alive()
