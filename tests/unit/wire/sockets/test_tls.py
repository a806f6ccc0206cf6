from __future__ import annotations

import gc
import os
import socket
import ssl
import struct
import warnings
from typing import Any

import pytest

from shardcompute.core.errors import LinkError
from shardcompute.wire import Hello, LinkOptions, Ping, TcpTransport
from shardcompute.wire.socket_link import open_link, wrap_answering
from shardcompute.wire.streams import wait_until_ready
from shardcompute.wire.tcp import split_address

ME = Hello(1, 1, "me", "worker", "home")
LOOPBACK = "tcp://127.0.0.1:0"


def test_both_sides_show_their_certificates(credentials: Any) -> None:
    seen: list[bytes | None] = []

    def admit(hello: Hello, certificate: bytes | None) -> str | None:
        seen.append(certificate)
        return None

    with (
        TcpTransport().listen(LOOPBACK, ME, LinkOptions(tls=credentials.server), admit) as listener,
        TcpTransport().dial(
            listener.address, ME, LinkOptions(tls=credentials.client, server_name="node")
        ) as near,
        listener.accept(10) as far,
    ):
        assert near.certificate == far.certificate == credentials.der
        assert near.stats.tls_version == far.stats.tls_version == "TLSv1.3"
    assert seen == [credentials.der]


def test_a_link_inside_tls_hides_what_it_carries(credentials: Any) -> None:
    with TcpTransport().listen(LOOPBACK, ME, LinkOptions(tls=credentials.server)) as listener:
        options = LinkOptions(tls=credentials.client, server_name="node")
        with TcpTransport().dial(listener.address, ME, options) as near, listener.accept(10) as far:
            near.send(Ping(1, 0.0))
            wait_until_ready(far._sock, select_write=False, deadline=None)
            on_the_wire = socket.socket.recv(far._sock, 4096, socket.MSG_PEEK)
            assert on_the_wire
            assert b"SCw" not in on_the_wire
            assert far.receive(10)[0] == Ping(1, 0.0)


def test_a_stranger_is_not_let_in(credentials: Any, strangers: Any) -> None:
    with TcpTransport().listen(LOOPBACK, ME, LinkOptions(tls=credentials.server)) as listener:
        with pytest.raises(LinkError, match="CERTIFICATE_VERIFY_FAILED"):
            TcpTransport().dial(listener.address, ME, LinkOptions(tls=strangers.client, server_name="node"))
        with pytest.raises(LinkError):
            TcpTransport().dial(
                listener.address, ME, LinkOptions(tls=credentials.anonymous_client, server_name="node")
            )
        with pytest.raises(TimeoutError):
            listener.accept(0)


def test_the_wrong_name_is_noticed(credentials: Any) -> None:
    with (
        TcpTransport().listen(LOOPBACK, ME, LinkOptions(tls=credentials.server)) as listener,
        pytest.raises(LinkError, match="CERTIFICATE_VERIFY_FAILED"),
    ):
        TcpTransport().dial(listener.address, ME, LinkOptions(tls=credentials.client))


def test_plain_and_tls_do_not_mix(credentials: Any) -> None:
    with (
        TcpTransport().listen(LOOPBACK, ME, LinkOptions(tls=credentials.server)) as listener,
        pytest.raises(LinkError),
    ):
        TcpTransport().dial(listener.address, ME)
    with (
        TcpTransport().listen(LOOPBACK, ME) as listener,
        pytest.raises(LinkError, match="TLS with"),
    ):
        TcpTransport().dial(listener.address, ME, LinkOptions(tls=credentials.client, server_name="node"))


def test_a_client_that_never_starts_tls_is_dropped_at_the_deadline(credentials: Any) -> None:
    options = LinkOptions(tls=credentials.server, handshake_timeout_s=0.1)
    with (
        TcpTransport().listen(LOOPBACK, ME, options) as listener,
        socket.create_connection(split_address(listener.address), timeout=10) as silent,
    ):
        assert silent.recv(1) == b""


def test_a_server_that_never_answers_is_given_up() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        url = f"tcp://127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(LinkError, match="timed out"):
            TcpTransport().dial(url, ME, LinkOptions(tls=context, handshake_timeout_s=0.1))


@pytest.mark.parametrize("is_answering", [True, False])
def test_a_peer_that_goes_before_tls_begins_leaves_nothing_open(credentials: Any, is_answering: bool) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        near = socket.create_connection(server.getsockname())
        far, _ = server.accept()
    # Closed without lingering it resets the connection.
    far.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    far.close()
    fd = near.fileno()
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        if is_answering:
            with pytest.raises(ConnectionResetError):
                wrap_answering(near, LinkOptions(tls=credentials.server))
        else:
            options = LinkOptions(tls=credentials.client, server_name="node")
            with pytest.raises(LinkError, match="TLS with"):
                open_link(near, "tcp://near", "node", ME, options)
        gc.collect()
    assert heard == []
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
