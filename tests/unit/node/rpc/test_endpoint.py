"""Who gets a link to a node, and who does not. Every endpoint is a real one on loopback."""

from __future__ import annotations

import contextlib
import logging
import socket
import ssl
import struct
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shardcompute.core.errors import LinkClosedError, LinkError, UsageError
from shardcompute.node.rpc.commands import Peer
from shardcompute.node.rpc.endpoint import Endpoint, OnLink, receive_all
from shardcompute.security import Credentials, Revocations, Role
from shardcompute.wire import (
    VERSION_MAX,
    VERSION_MIN,
    Hello,
    Link,
    LinkOptions,
    Message,
    Ping,
    Pong,
    TcpTransport,
    Transports,
    default_transports,
)
from shardcompute.wire.tcp import TcpListener
from support.network.papers import Papers, connect, connect_tls, dial_as, frame_bytes, hello_of, read_end

Open = Callable[..., Endpoint]


def listening(credentials: Credentials, roles: Mapping[str, OnLink], *, advertise: str = "") -> Endpoint:
    return Endpoint(
        credentials, "tcp://127.0.0.1:0", roles, transports=default_transports(), advertise=advertise
    )


def echo(link: Link) -> None:
    while True:
        message, _ = link.receive()
        assert isinstance(message, Ping)
        link.send(Pong(message.nonce, 0.0))


def is_answered(link: Link) -> bool:
    link.send(Ping(7, 0.0))
    message, _ = link.receive(20)
    return message == Pong(7, 0.0)


def is_ended(link: Link) -> bool:
    try:
        link.receive(20)
    except LinkClosedError:
        return True
    return False


@pytest.fixture
def papers(tmp_path: Path) -> Papers:
    return Papers.found(tmp_path)


@pytest.fixture
def server(papers: Papers) -> Credentials:
    return papers.node("server", Role.COORDINATOR)


@pytest.fixture
def client(papers: Papers) -> Credentials:
    return papers.node("client", Role.WORKER)


@pytest.fixture
def open_endpoint() -> Iterator[Open]:
    with contextlib.ExitStack() as opened:

        def open_one(credentials: Credentials, **roles: Callable[[Link], None]) -> Endpoint:
            endpoint = listening(credentials, roles or {"echo": echo})
            opened.callback(endpoint.close)
            endpoint.start()
            return endpoint

        yield open_one


@pytest.fixture
def endpoint(open_endpoint: Open, server: Credentials) -> Endpoint:
    return open_endpoint(server)


def test_members_meet(open_endpoint: Open, endpoint: Endpoint, client: Credentials) -> None:
    dialler = open_endpoint(client)
    with dialler.dial(endpoint.url, "echo", endpoint.node, needs=Role.COORDINATOR) as link:
        assert link.peer == endpoint.node
        assert is_answered(link)


def test_a_node_reaches_itself_where_its_own_address_leads_nowhere(server: Credentials) -> None:
    with contextlib.closing(listening(server, {"echo": echo}, advertise="host.invalid")) as endpoint:
        endpoint.start()
        with endpoint.dial(endpoint.url, "echo", endpoint.node) as link:
            assert is_answered(link)


def test_the_listening_url_chooses_the_transport(server: Credentials) -> None:
    asked: list[str] = []

    class Noting(TcpTransport):
        def listen(self, url: str, *rest: Any) -> TcpListener:
            asked.append(url)
            return super().listen(url, *rest)

    transports = Transports({"tcp": Noting()})
    with contextlib.closing(Endpoint(server, "tcp://127.0.0.1:0", {}, transports=transports)):
        assert asked == ["tcp://127.0.0.1:0"]
    with pytest.raises(UsageError, match="no known scheme"):
        Endpoint(server, "quic://127.0.0.1:0", {}, transports=transports)


def test_messages_come_with_who_sent_them(
    open_endpoint: Open, server: Credentials, client: Credentials
) -> None:
    taken: list[tuple[Message, str]] = []
    came = threading.Event()

    def take(message: Message, body: memoryview, sender: str) -> None:
        taken.append((message, sender))
        came.set()

    endpoint = open_endpoint(server, stage=lambda link: receive_all(link, take))
    with dial_as(client, endpoint.url, "stage") as link:
        link.send(Ping(1, 0.0))
        assert came.wait(20)
    assert taken == [(Ping(1, 0.0), client.identity.node_id)]


def test_links_that_come_before_the_start_wait(server: Credentials, client: Credentials) -> None:
    endpoint = listening(server, {"echo": echo})
    with contextlib.closing(endpoint), dial_as(client, endpoint.url, "echo") as link:
        link.send(Ping(1, 0.0))
        with pytest.raises(TimeoutError):
            link.receive(0.05)
        endpoint.start()
        assert link.receive(20)[0] == Pong(1, 0.0)


def test_closing_without_a_start(server: Credentials) -> None:
    endpoint = listening(server, {})
    endpoint.close()
    with pytest.raises(LinkError, match="cannot be reached"):
        dial_as(server, endpoint.url, "echo")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"node": "n" + "a" * 20}, "was expected"),
        ({"role": "control"}, "does not serve links of role 'control'"),
        ({"role": "x" * 4000}, "does not serve links of role"),
        ({"cluster": "elsewhere"}, "belongs to cluster 'home'"),
        ({"version_min": VERSION_MAX + 1, "version_max": 99}, "speaks protocol versions"),
        ({"version_min": 0, "version_max": VERSION_MIN - 1}, "speaks protocol versions"),
    ],
)
def test_false_greetings(
    endpoint: Endpoint, client: Credentials, change: dict[str, object], reason: str
) -> None:
    honest = hello_of(client, "echo")
    fields = {name: getattr(honest, name) for name in Hello.__struct_fields__}
    with pytest.raises(LinkError, match=reason):
        dial_as(client, endpoint.url, "echo", Hello(**{**fields, **change}))
    with dial_as(client, endpoint.url, "echo") as link:
        assert is_answered(link)


def test_another_cluster_of_the_same_name(endpoint: Endpoint, papers: Papers, tmp_path: Path) -> None:
    stranger = Papers.found(tmp_path / "other").node("stranger")
    with pytest.raises(LinkError, match="TLS"):
        dial_as(stranger, endpoint.url, "echo")
    # Even one that does not mind whom it talks to.
    trusting = replace(stranger, authority_pem=papers.authority.certificate_pem)
    with pytest.raises(LinkError):
        dial_as(trusting, endpoint.url, "echo")


def test_no_certificate_at_all(endpoint: Endpoint) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with connect_tls(endpoint.url, context) as sock:
        assert read_end(sock) == b""


def test_tls_1_2(endpoint: Endpoint, client: Credentials) -> None:
    context = client.client_context()
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    with pytest.raises(ssl.SSLError, match="protocol"):
        connect_tls(endpoint.url, context)


@pytest.mark.parametrize(
    "content",
    [
        b"\x00" * 64,
        b"GET / HTTP/1.1\r\nhost: x\r\n\r\n",
        bytes(range(256)) * 64,
        frame_bytes(Ping(1, 0.0)),
        b"\x16\x03\x01\xff\xff" + b"\x01" * 70_000,
        b"\x16\x03\x01\x02\x00\x01\xff\xff\xff",
    ],
    ids=["zeros", "http", "bytes", "no TLS", "long record", "absurd handshake"],
)
def test_garbage_instead_of_tls(endpoint: Endpoint, client: Credentials, content: bytes) -> None:
    with connect(endpoint.url) as sock:
        with contextlib.suppress(OSError):
            sock.sendall(content)
            sock.shutdown(socket.SHUT_WR)
        assert len(read_end(sock)) < 64
    with dial_as(client, endpoint.url, "echo") as link:
        assert is_answered(link)


@pytest.mark.parametrize(
    "content",
    [
        b"\xff" * 64,
        b"SCw\x02" + bytes(12),
        struct.pack("<3sBIQ", b"SCw", 1, 0xFFFFFFFF, 0),
        struct.pack("<3sBIQ", b"SCw", 1, 10, 1 << 63),
        struct.pack("<3sBIQ", b"SCw", 1, 0, 0),
        struct.pack("<3sBIQ", b"SCw", 1, 8, 0) + b"\x91" * 8,
        struct.pack("<3sBIQ", b"SCw", 1, 4000, 0) + b"\x91" * 4000,
        frame_bytes(Ping(1, 0.0)),
    ],
    ids=["bytes", "layout", "header", "body", "nothing", "nested", "deeply nested", "no greeting"],
)
def test_garbage_inside_tls(endpoint: Endpoint, client: Credentials, content: bytes) -> None:
    with connect_tls(endpoint.url, client.client_context()) as sock:
        sock.sendall(content)
        assert read_end(sock) == b""
    with dial_as(client, endpoint.url, "echo") as link:
        assert is_answered(link)


def test_a_frame_that_is_cut_short_ends_its_link_alone(endpoint: Endpoint, client: Credentials) -> None:
    with dial_as(client, endpoint.url, "echo") as link:
        with connect_tls(endpoint.url, client.client_context()) as sock:
            sock.sendall(frame_bytes(hello_of(client, "echo")))
            assert sock.recv(4096).startswith(b"SCw")
            sock.sendall(frame_bytes(Ping(1, 0.0))[:-1])
        assert is_answered(link)


def test_strangers_are_logged_once(
    endpoint: Endpoint, client: Credentials, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    strangers: list[str] = []
    for _ in range(20):
        with connect(endpoint.url) as sock:
            strangers.append("connection from tcp://{}:{} dropped".format(*sock.getsockname()))
            sock.sendall(b"GET / HTTP/1.1\r\n\r\n")
            read_end(sock)
    with dial_as(client, endpoint.url, "echo") as link:
        assert is_answered(link)
    # Listeners of other tests may still be closing and log too.
    logged = [record.getMessage() for record in caplog.records]
    assert len([text for text in logged if text.startswith(tuple(strangers))]) == 1


def test_silent_connections_keep_nobody_out(endpoint: Endpoint, client: Credentials) -> None:
    with contextlib.ExitStack() as opened:
        for _ in range(3 * LinkOptions().max_pending):
            opened.enter_context(connect(endpoint.url))
        assert is_answered(opened.enter_context(dial_as(client, endpoint.url, "echo")))


# Revocation


def test_a_revoked_node_is_refused(endpoint: Endpoint, client: Credentials, papers: Papers) -> None:
    endpoint.heed(Revocations().with_node(client.identity.node_id))
    with pytest.raises(LinkError, match="has been removed"):
        dial_as(client, endpoint.url, "echo")
    with dial_as(papers.node("other"), endpoint.url, "echo") as link:
        assert is_answered(link)


def test_open_links_of_a_revoked_node_end(endpoint: Endpoint, client: Credentials, papers: Papers) -> None:
    with (
        dial_as(client, endpoint.url, "echo") as link,
        dial_as(papers.node("b"), endpoint.url, "echo") as other,
    ):
        assert is_answered(link)
        assert is_answered(other)
        endpoint.heed(Revocations().with_node(client.identity.node_id))
        assert is_ended(link)
        assert is_answered(other)


def test_links_to_a_revoked_node_end(open_endpoint: Open, endpoint: Endpoint, client: Credentials) -> None:
    dialler = open_endpoint(client)
    with dialler.dial(endpoint.url, "echo") as link:
        assert is_answered(link)
        dialler.heed(Revocations().with_node(endpoint.node))
        assert is_ended(link)
    with pytest.raises(LinkError, match="has been removed"):
        dialler.dial(endpoint.url, "echo")


def test_an_older_list_readmits_nobody(endpoint: Endpoint, client: Credentials) -> None:
    endpoint.heed(Revocations().with_node(client.identity.node_id))
    endpoint.heed(Revocations())
    with pytest.raises(LinkError, match="has been removed"):
        dial_as(client, endpoint.url, "echo")


def test_news_that_come_between_greeting_and_service(server: Credentials, client: Credentials) -> None:
    endpoint = listening(server, {"echo": echo})
    with contextlib.closing(endpoint), dial_as(client, endpoint.url, "echo") as link:
        endpoint.revocations = Revocations().with_node(client.identity.node_id)
        endpoint.start()
        assert is_ended(link)


# Whom we dial


def test_another_node_than_expected(open_endpoint: Open, endpoint: Endpoint, client: Credentials) -> None:
    dialler = open_endpoint(client)
    with pytest.raises(LinkError, match="was expected"):
        dialler.dial(endpoint.url, "echo", dialler.node)
    dial = dialler.dialler("echo")
    with pytest.raises(LinkError, match="was expected"):
        dial(Peer(dialler.node, endpoint.url))
    with dial(Peer(endpoint.node, endpoint.url)) as link:
        assert is_answered(link)


def test_only_a_coordinator_coordinates(open_endpoint: Open, papers: Papers, client: Credentials) -> None:
    impostor = open_endpoint(papers.node("impostor", Role.WORKER, Role.DRIVER), control=echo)
    dialler = open_endpoint(client)
    with pytest.raises(LinkError, match="may not act as coordinator"):
        dialler.dial(impostor.url, "control", needs=Role.COORDINATOR)


def test_a_node_that_answers_under_another_name(
    open_endpoint: Open, server: Credentials, papers: Papers, client: Credentials
) -> None:
    liar = papers.node("liar")
    hello = replace_node(hello_of(liar, ""), server.identity.node_id)
    dialler = open_endpoint(client)
    options = LinkOptions(tls=liar.server_context())
    with (
        TcpTransport().listen("tcp://127.0.0.1:0", hello, options) as listener,
        pytest.raises(LinkError, match="was expected"),
    ):
        dialler.dial(listener.address, "echo")


def replace_node(hello: Hello, node: str) -> Hello:
    return Hello(hello.version_min, hello.version_max, node, hello.role, hello.cluster)
