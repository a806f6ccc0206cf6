from __future__ import annotations

import contextlib
import logging
import socket
import struct
import sys
from collections.abc import Callable, Iterator

import pytest

from shardcompute.core.errors import LinkClosedError, LinkError, UsageError
from shardcompute.wire import Hello, LinkOptions, Ping, TcpTransport, WireLimits, pack_frame
from shardcompute.wire.limits import HANDSHAKE_LIMITS
from shardcompute.wire.tcp import TcpListener, join_address, split_address, tune_socket

ME = Hello(1, 1, "me", "worker", "home")
LOOPBACK = "tcp://127.0.0.1:0"
SHORT = LinkOptions(handshake_timeout_s=0.1)
Dial = Callable[[TcpListener], socket.socket]


@pytest.fixture
def raw() -> Iterator[Dial]:
    """Connects sockets that speak no protocol of ours."""
    with contextlib.ExitStack() as opened:
        yield lambda listener: opened.enter_context(
            socket.create_connection(split_address(listener.address), timeout=10)
        )


def introduce_by_hand(sock: socket.socket) -> None:
    sock.sendall(b"".join(pack_frame(ME, (), HANDSHAKE_LIMITS)))
    assert sock.recv(4096).startswith(b"SCw")


def read_end(sock: socket.socket) -> bytes:
    """What comes until the other side ends the connection, politely or not."""
    try:
        return sock.recv(4096)
    except ConnectionResetError:
        return b""


def test_the_address_names_the_port_that_was_bound() -> None:
    with TcpTransport().listen(LOOPBACK, ME) as listener:
        host, port = split_address(listener.address)
        assert host == "127.0.0.1"
        assert port > 0


def test_addresses() -> None:
    assert split_address("tcp://[::1]:80") == ("::1", 80)
    assert join_address("::1", 80) == "tcp://[::1]:80"
    for url in ("tcp://host", "tcp://:80", "tcp://host:port", "tcp://host:99999", "tcp://[::1:80"):
        with pytest.raises(UsageError, match="no address"):
            split_address(url)


def test_an_address_where_nobody_listens() -> None:
    listener = TcpTransport().listen(LOOPBACK, ME)
    listener.close()
    with pytest.raises(LinkError, match="cannot be reached"):
        TcpTransport().dial(listener.address, ME)


def test_an_address_in_use() -> None:
    with (
        TcpTransport().listen(LOOPBACK, ME) as listener,
        pytest.raises(LinkError, match="cannot be listened"),
    ):
        TcpTransport().listen(listener.address, ME)


def test_a_silent_connection_delays_nobody(raw: Dial) -> None:
    with TcpTransport().listen(LOOPBACK, ME, LinkOptions(handshake_timeout_s=60)) as listener:
        raw(listener)
        with TcpTransport().dial(listener.address, ME), listener.accept(10) as accepted:
            assert accepted.peer == "me"


def test_a_silent_connection_is_dropped_at_the_deadline(raw: Dial) -> None:
    with TcpTransport().listen(LOOPBACK, ME, SHORT) as listener:
        assert read_end(raw(listener)) == b""


def test_a_connection_that_trickles_is_dropped_at_the_deadline(raw: Dial) -> None:
    with TcpTransport().listen(LOOPBACK, ME, SHORT) as listener:
        sock = raw(listener)
        sock.sendall(b"SCw\x01")
        assert read_end(sock) == b""


def test_connections_beyond_the_bound_wait_their_turn(raw: Dial) -> None:
    options = LinkOptions(handshake_timeout_s=0.2, max_pending=1)
    with TcpTransport().listen(LOOPBACK, ME, options) as listener:
        silent = raw(listener)
        with TcpTransport().dial(listener.address, ME), listener.accept(10):
            # It was answered only after the silent one had to go.
            silent.setblocking(False)
            assert read_end(silent) == b""


def test_links_that_nobody_accepts_count_as_pending(raw: Dial) -> None:
    with TcpTransport().listen(LOOPBACK, ME, LinkOptions(max_pending=1)) as listener:
        first = TcpTransport().dial(listener.address, ME)
        with pytest.raises(LinkError, match="did not introduce itself"):
            TcpTransport().dial(listener.address, ME, SHORT)
        first.close()


def test_an_accepted_link_makes_room_for_the_next() -> None:
    with TcpTransport().listen(LOOPBACK, ME, LinkOptions(max_pending=1)) as listener:
        for _ in range(3):
            with TcpTransport().dial(listener.address, ME, LinkOptions(handshake_timeout_s=5)):
                listener.accept(10).close()


@pytest.mark.parametrize(
    "greeting",
    [
        b"GET / HTTP/1.1\r\nHost: here\r\n\r\n",
        struct.pack("<3sBIQ", b"SCw", 1, 9000, 0),
        struct.pack("<3sBIQ", b"SCw", 1, 9, 1),
        b"".join(pack_frame(Ping(1, 0.0), (), HANDSHAKE_LIMITS)),
    ],
    ids=["http", "large header", "body", "no hello"],
)
def test_strange_greetings_are_dropped_and_logged(
    raw: Dial, greeting: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO), TcpTransport().listen(LOOPBACK, ME) as listener:
        sock = raw(listener)
        sock.sendall(greeting)
        assert read_end(sock) == b""
        with TcpTransport().dial(listener.address, ME), listener.accept(10):
            pass
    assert "dropped" in caplog.text


def test_a_judge_that_fails_admits_nobody(caplog: pytest.LogCaptureFixture) -> None:
    def admit(hello: Hello, certificate: bytes | None) -> str | None:
        raise RuntimeError("no verdict")

    with TcpTransport().listen(LOOPBACK, ME, admit=admit) as listener:
        with pytest.raises(LinkClosedError):
            TcpTransport().dial(listener.address, ME)
        with pytest.raises(TimeoutError):
            listener.accept(0)
    assert "no verdict" in caplog.text


def test_closing_a_listener_ends_greetings_and_waiting_links(raw: Dial) -> None:
    listener = TcpTransport().listen(LOOPBACK, ME, LinkOptions(handshake_timeout_s=60))
    sock = raw(listener)
    with TcpTransport().dial(listener.address, ME) as waiting:
        listener.close()
        listener.close()
        assert read_end(sock) == b""
        with pytest.raises(LinkClosedError):
            waiting.receive(10)
    with pytest.raises(LinkClosedError, match="is closed"):
        listener.accept(10)


def test_an_accepted_link_outlives_its_listener() -> None:
    with TcpTransport().listen(LOOPBACK, ME) as listener:
        near, far = TcpTransport().dial(listener.address, ME), listener.accept(10)
    with near, far:
        near.send(Ping(1, 0.0))
        assert far.receive(10)[0] == Ping(1, 0.0)


def test_an_end_in_the_middle_of_a_frame(raw: Dial) -> None:
    with TcpTransport().listen(LOOPBACK, ME) as listener:
        sock = raw(listener)
        introduce_by_hand(sock)
        with listener.accept(10) as link:
            sock.sendall(b"SCw\x01\x09")
            sock.shutdown(socket.SHUT_WR)
            with pytest.raises(LinkClosedError, match="in the middle of a frame"):
                link.receive(10)


def test_a_reset_is_a_closed_link(raw: Dial) -> None:
    with TcpTransport().listen(LOOPBACK, ME) as listener:
        sock = raw(listener)
        introduce_by_hand(sock)
        with listener.accept(10) as link:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            sock.close()
            with pytest.raises(LinkClosedError, match="broke"):
                link.receive(10)


def test_a_frame_that_stops_coming_ends_the_link(raw: Dial) -> None:
    options = LinkOptions(frame_timeout_s=0.05, slowest_bytes_per_s=1e12)
    with TcpTransport().listen(LOOPBACK, ME, options) as listener:
        sock = raw(listener)
        introduce_by_hand(sock)
        with listener.accept(10) as link:
            sock.sendall(b"SCw\x01")
            with pytest.raises(LinkError, match="sends too slowly"):
                link.receive()
            with pytest.raises(LinkClosedError, match="sends too slowly"):
                link.receive()


def test_the_full_limits_hold_after_the_introduction(raw: Dial) -> None:
    limits = WireLimits(max_header_bytes=20_000)
    with TcpTransport().listen(LOOPBACK, ME, LinkOptions(limits=limits)) as listener:
        sock = raw(listener)
        introduce_by_hand(sock)
        with listener.accept(10) as link:
            sock.sendall(struct.pack("<3sBIQ", b"SCw", 1, 20_001, 0))
            with pytest.raises(LinkError, match="over the limit of 20000"):
                link.receive(10)


def test_sockets_do_not_delay_and_keep_alive() -> None:
    with (
        TcpTransport().listen(LOOPBACK, ME) as listener,
        TcpTransport().dial(listener.address, ME) as near,
        listener.accept(10) as far,
    ):
        for link in (near, far):
            assert link._sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            assert link._sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)


@pytest.mark.skipif(not hasattr(socket, "TCP_CONGESTION"), reason="this system does not tell")
def test_congestion_control_is_set_where_allowed_and_reported() -> None:
    reno, unknown = LinkOptions(congestion="reno"), LinkOptions(congestion="no-such-thing")
    with (
        TcpTransport().listen(LOOPBACK, ME, reno) as listener,
        TcpTransport().dial(listener.address, ME, unknown) as near,
        listener.accept(10) as far,
    ):
        assert far.stats.congestion == "reno"
        assert near.stats.congestion not in (None, "", "no-such-thing")
        assert near.stats.tls_version is None


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Linux alone can be told")
def test_what_was_lost_is_sent_again_soon() -> None:
    """However long the line was silent; older systems know only the first of the two."""
    with socket.socket() as sock:
        tune_socket(sock, None)
        assert sock.getsockopt(socket.IPPROTO_TCP, 16) == 1
        with contextlib.suppress(OSError):
            assert sock.getsockopt(socket.IPPROTO_TCP, 44) == 1000
