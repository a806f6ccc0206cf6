"""Connecting side by side, and listening over IPv6 and IPv4 at one port."""

from __future__ import annotations

import contextlib
import errno
import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest

from shardcompute.core.sockets import connecting
from shardcompute.core.sockets.connecting import ConnectError, connect, connect_first
from shardcompute.core.sockets.hosts import bracketed, plain_address, with_host
from shardcompute.core.sockets.listening import listen

PATIENCE_S = 60.0
"""What a silent address would cost whoever waits for it alone."""
SOON_S = 20.0


def has_ipv6() -> bool:
    try:
        listen("::1", 0).close()
    except OSError:
        return False
    return True


needs_ipv6 = pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6 on loopback")


@pytest.fixture
def silent() -> Iterator[tuple[str, int]]:
    """An address that answers nobody: its queue is full."""
    with contextlib.ExitStack() as opened:
        server = opened.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        address = server.getsockname()
        for _ in range(8):
            caller = opened.enter_context(socket.socket())
            caller.setblocking(False)
            caller.connect_ex(address)
        yield address


def resolving(*addresses: tuple[str, int]) -> Any:
    """A name server that names these for every host, in this order."""

    def getaddrinfo(host: str, port: int, **_: object) -> list[tuple[Any, ...]]:
        return [
            (
                socket.AF_INET6 if ":" in each[0] else socket.AF_INET,
                socket.SOCK_STREAM,
                0,
                "",
                (*each, 0, 0) if ":" in each[0] else each,
            )
            for each in addresses
        ]

    return getaddrinfo


def refusing() -> tuple[str, int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address: tuple[str, int] = server.getsockname()
    return address


def test_a_silent_address_costs_its_head_start_alone(silent: tuple[str, int]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        began_s = time.monotonic()
        sock, place = connect_first([silent, server.getsockname()], PATIENCE_S)
        with sock:
            assert place == 1
            assert sock.getpeername() == server.getsockname()
            assert sock.gettimeout() == PATIENCE_S
        assert time.monotonic() - began_s < SOON_S


def test_who_refuses_makes_room_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a head start of its own: that is for those who say nothing."""
    monkeypatch.setattr(connecting, "HEAD_START_S", PATIENCE_S)
    with socket.create_server(("127.0.0.1", 0)) as server:
        sock, place = connect_first([refusing(), server.getsockname()], PATIENCE_S)
        sock.close()
    assert place == 1


@needs_ipv6
def test_of_a_names_addresses_ipv6_is_first(monkeypatch: pytest.MonkeyPatch) -> None:
    with listen("::1", 0) as six, listen("127.0.0.1", 0) as four:
        monkeypatch.setattr(socket, "getaddrinfo", resolving(four.getsockname(), six.getsockname()[:2]))
        with connect("both.example", 1, PATIENCE_S) as sock:
            assert sock.family == socket.AF_INET6


@needs_ipv6
def test_ipv6_that_is_broken_is_left_soon(monkeypatch: pytest.MonkeyPatch, silent: tuple[str, int]) -> None:
    """Several of its addresses say nothing; the other kind's turn comes after the first."""
    with listen("::1", 0, backlog=0) as six, contextlib.ExitStack() as opened:
        dead = six.getsockname()[:2]
        for _ in range(8):
            caller = opened.enter_context(socket.socket(socket.AF_INET6))
            caller.setblocking(False)
            caller.connect_ex(dead)
        with listen("127.0.0.1", 0) as four:
            monkeypatch.setattr(socket, "getaddrinfo", resolving(dead, dead, dead, four.getsockname()))
            began_s = time.monotonic()
            with connect("both.example", 1, PATIENCE_S) as sock:
                assert sock.family == socket.AF_INET
            assert time.monotonic() - began_s < SOON_S


def test_nobody_answers_and_each_reason_is_told(silent: tuple[str, int]) -> None:
    with pytest.raises(ConnectError) as raised:
        connect_first([refusing(), ("no-such-name.invalid", 1), silent], 0.5)
    reasons = raised.value.reasons
    assert set(reasons) == {0, 1, 2}
    assert "refused" in reasons[0]
    assert "timed out" in reasons[2]
    assert raised.value.strerror


def test_no_way_tells_less_than_a_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "getaddrinfo", resolving(("203.0.113.77", 1), refusing()))
    connects = socket.socket.connect_ex

    def without_ways(sock: socket.socket, address: Any) -> int:
        return errno.ENETUNREACH if address[0] == "203.0.113.77" else connects(sock, address)

    class Socket(socket.socket):
        connect_ex = without_ways

    monkeypatch.setattr(socket, "socket", Socket)
    with pytest.raises(ConnectionRefusedError):
        connect("both.example", 1, PATIENCE_S)


def test_ports_and_names_that_cannot_be_are_errors_of_the_system() -> None:
    for host, port in (("127.0.0.1", 70_000), ("x" * 300, 1)):
        with pytest.raises(OSError, match=r".+"):
            connect(host, port, 1.0)


@needs_ipv6
def test_every_address_is_listened_at_by_one_socket() -> None:
    with listen("::", 0) as server:
        port = server.getsockname()[1]
        for host in ("::1", "127.0.0.1"):
            with connect(host, port, PATIENCE_S):
                caller, address = server.accept()
                caller.close()
                assert plain_address(address[0]) == host


def test_hosts_as_urls_write_them() -> None:
    assert [bracketed(each) for each in ("fd00::1", "[fd00::1]", "10.0.0.1", "name")] == [
        "[fd00::1]",
        "[fd00::1]",
        "10.0.0.1",
        "name",
    ]
    assert with_host("tcp://[::]:7420", "fd00::1") == "tcp://[fd00::1]:7420"
    assert with_host("wss://0.0.0.0:7422", "10.0.0.1") == "wss://10.0.0.1:7422"
    assert with_host("tcp://home.example:1", "10.0.0.1") == "tcp://home.example:1"
    assert plain_address("::ffff:10.0.0.1") == "10.0.0.1"
    assert plain_address("fd00::1") == "fd00::1"
    assert plain_address("?") == "?"


def test_failures_are_of_the_kind_that_one_address_would_have(silent: tuple[str, int]) -> None:
    """Who asks whether a process has ended looks for a refusal, and takes nothing else for one."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        closed = server.getsockname()
    with pytest.raises(ConnectionRefusedError):
        connect(*closed, PATIENCE_S)
    with pytest.raises(TimeoutError):
        connect(*silent, 0.05)
