"""A relay on loopback: who is let in, what passes, and what it costs. Strangers and members are real connections."""

from __future__ import annotations

import contextlib
import gc
import re
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from shardcompute.core.errors import AuthError, LinkError, UsageError
from shardcompute.relay.client import RelayDoor
from shardcompute.relay.messages import PREAMBLE
from shardcompute.relay.server import RelayLimits, RelayServer
from shardcompute.relay.tickets import (
    cluster_key_text,
    issue_ticket,
    parse_cluster_key,
    read_ticket,
)
from shardcompute.security import Credentials
from support.network.lab_links import wait_until
from support.network.papers import Papers, read_end
from support.network.relays import (
    WAIT_S,
    MeetingCall,
    key_of,
    new_meeting,
    open_relay,
    pass_of,
    read_exactly,
    spliced,
    url_of,
)


@pytest.fixture
def papers(tmp_path: Path) -> Papers:
    return Papers.found(tmp_path)


@pytest.fixture
def a(papers: Papers) -> Credentials:
    return papers.node("a")


@pytest.fixture
def b(papers: Papers) -> Credentials:
    return papers.node("b")


@pytest.fixture
def relay(papers: Papers) -> Iterator[RelayServer]:
    with open_relay(papers) as opened:
        yield opened


def node(credentials: Credentials) -> str:
    return credentials.identity.node_id


def echo_both_ways(one: socket.socket, other: socket.socket, content: bytes) -> None:
    with one, other:
        for source, target in ((one, other), (other, one)):
            sender = threading.Thread(target=source.sendall, args=(content,))
            sender.start()
            assert read_exactly(target, len(content)) == content
            sender.join()


@pytest.mark.parametrize("scheme", ["tcp", "ws", "wss"])
def test_two_members_are_spliced_whichever_door_one_of_them_takes(
    papers: Papers, relay: RelayServer, a: Credentials, b: Credentials, scheme: str
) -> None:
    one, other = spliced(papers, (url_of(relay, scheme), url_of(relay)), a, b)
    echo_both_ways(one, other, bytes(range(256)) * 2048)
    wait_until(lambda: relay.view().connections == 0, lambda: f"nobody is left: {relay.view()}", WAIT_S)
    assert relay.view().spliced_bytes == 2 * 256 * 2048


def test_a_relay_says_where_it_sees_a_caller(relay: RelayServer) -> None:
    with RelayDoor(url_of(relay), WAIT_S) as door:
        assert door.seen == door.local


def declined(url: str, *call: object) -> str:
    visit = MeetingCall()
    visit.start(url, *call).join()  # type: ignore[arg-type]
    assert isinstance(visit.error, LinkError)
    return visit.error.message


def test_a_ticket_that_has_expired_is_declined_by_that_name(
    papers: Papers, relay: RelayServer, a: Credentials, b: Credentials
) -> None:
    shown = pass_of(papers, a, life_s=-5.0)
    assert re.search(r"expired \d+ s ago", declined(url_of(relay), shown, new_meeting(), node(b)))


def test_a_forged_ticket_and_one_of_another_cluster_are_declined(
    papers: Papers, relay: RelayServer, a: Credentials, b: Credentials, tmp_path: Path
) -> None:
    strangers = Papers.found(tmp_path / "elsewhere")
    theirs = pass_of(strangers, a)
    assert "not of this relay's cluster" in declined(url_of(relay), theirs, new_meeting(), node(b))
    shown = pass_of(papers, a)
    for place in (3, 10, 40, len(shown.ticket) - 1):
        ticket = bytearray(shown.ticket)
        ticket[place] ^= 1
        told = declined(url_of(relay), replace(shown, ticket=bytes(ticket)), new_meeting(), node(b))
        assert "ticket" in told
    assert "cannot be read" in declined(
        url_of(relay), replace(shown, ticket=b"\x93\x01\x02\x03"), new_meeting(), node(b)
    )


def test_a_ticket_is_of_no_use_to_another_node(
    papers: Papers, relay: RelayServer, a: Credentials, b: Credentials
) -> None:
    stolen = replace(pass_of(papers, a), identity=papers.node("thief").identity)
    told = declined(url_of(relay), stolen, new_meeting(), node(b))
    assert f"of {node(a)} was shown by somebody else" in told


def test_what_a_member_said_cannot_be_said_again(
    papers: Papers, relay: RelayServer, a: Credentials, b: Credentials, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[bytes] = []
    send = RelayDoor._send
    monkeypatch.setattr(RelayDoor, "_send", lambda door, data: (said.append(data), send(door, data))[1])
    one, other = spliced(papers, (url_of(relay), url_of(relay)), a, b)
    one.close(), other.close()
    requests = [each for each in said if each != PREAMBLE]
    assert len(requests) == 2
    for request in requests:
        with socket.create_connection(("127.0.0.1", relay.port), WAIT_S) as sock:
            sock.sendall(PREAMBLE + request)
            assert b"shown by somebody else" in read_end(sock)


def test_a_meeting_is_between_the_two_whom_it_names(papers: Papers, a: Credentials, b: Credentials) -> None:
    """A third member that knows a meeting's number gets neither of them."""
    third = papers.node("third")
    with open_relay(papers, limits=RelayLimits(meet_s=1.0)) as relay:
        meeting, calls = new_meeting(), [MeetingCall(), MeetingCall()]
        threads = [
            calls[0].start(url_of(relay), pass_of(papers, a), meeting, node(b)),
            calls[1].start(url_of(relay), pass_of(papers, third), meeting, node(a)),
        ]
        for thread in threads:
            thread.join()
    assert all("did not come to the relay" in str(call.error) for call in calls)


def test_a_member_has_so_many_links_and_no_more(papers: Papers, a: Credentials, b: Credentials) -> None:
    with open_relay(papers, limits=RelayLimits(links_per_member=2)) as relay:
        urls = (url_of(relay), url_of(relay))
        held = [spliced(papers, urls, a, b) for _ in range(2)]
        assert "may have no more" in declined(url_of(relay), pass_of(papers, a), new_meeting(), node(b))
        for each in held[0]:
            each.close()
        wait_until(lambda: relay.view().connections == 2, lambda: str(relay.view()), WAIT_S)
        echo_both_ways(*spliced(papers, urls, a, b), b"again")
        for each in held[1]:
            each.close()


def test_a_relay_has_so_many_links_in_all(papers: Papers, a: Credentials, b: Credentials) -> None:
    with open_relay(papers, limits=RelayLimits(links=1)) as relay:
        one, other = spliced(papers, (url_of(relay), url_of(relay)), a, b)
        third = papers.node("third")
        told = declined(url_of(relay), pass_of(papers, third), new_meeting(), node(b))
        assert "takes no more" in told
        one.close(), other.close()


def test_a_member_passes_so_many_bytes_a_second(papers: Papers, a: Credentials, b: Credentials) -> None:
    rate = 256 * 1024.0
    with open_relay(papers, limits=RelayLimits(bytes_per_s=rate)) as relay:
        one, other = spliced(papers, (url_of(relay), url_of(relay)), a, b)
        with one, other:
            content = bytes(int(rate * 1.5))
            began_s = time.monotonic()
            sender = threading.Thread(target=one.sendall, args=(content,))
            sender.start()
            read_exactly(other, len(content))
            took_s = time.monotonic() - began_s
            sender.join()
    # One second's worth goes at once, the rest at its pace; both members pay.
    assert took_s > 0.45


def test_whoever_is_slow_to_read_slows_the_other_down(
    papers: Papers, relay: RelayServer, a: Credentials, b: Credentials
) -> None:
    one, other = spliced(papers, (url_of(relay), url_of(relay)), a, b)
    with one, other:
        one.settimeout(0.5)
        sent = 0
        with contextlib.suppress(TimeoutError):
            while sent < 256 << 20:
                sent += one.send(bytes(1 << 16))
        # What the system's own buffers hold, and a little in the relay.
        assert sent < 64 << 20


def test_strangers_at_the_door_make_room_for_members(papers: Papers, a: Credentials, b: Credentials) -> None:
    with open_relay(papers, limits=RelayLimits(waiting=4)) as relay, contextlib.ExitStack() as held:
        silent = [
            held.enter_context(socket.create_connection(("127.0.0.1", relay.port), WAIT_S)) for _ in range(8)
        ]
        for sock in silent[:4]:
            assert read_end(sock) == b""
        echo_both_ways(*spliced(papers, (url_of(relay), url_of(relay)), a, b), b"through")


def test_who_says_nothing_is_hung_up_on(papers: Papers) -> None:
    with (
        open_relay(papers, limits=RelayLimits(door_s=0.3)) as relay,
        socket.create_connection(("127.0.0.1", relay.port), WAIT_S) as sock,
    ):
        assert read_end(sock) == b""


@pytest.mark.parametrize("turns", range(5))
def test_callers_of_a_relays_last_moment_are_hung_up_on(papers: Papers, turns: int) -> None:
    """They come so many turns of its loop before it ends: accepted, half opened, or not greeted yet."""
    with open_relay(papers) as relay, contextlib.ExitStack() as crowd:
        RelayDoor(url_of(relay), WAIT_S).close()  # it serves
        loop, have_come = relay._loop, threading.Event()

        def end_after(count: int) -> None:
            relay._ending.set() if count == 0 else loop.call_soon(end_after, count - 1)

        loop.call_soon_threadsafe(have_come.wait, WAIT_S)
        loop.call_soon_threadsafe(end_after, turns)
        callers = [
            crowd.enter_context(socket.create_connection(("127.0.0.1", relay.port), WAIT_S)) for _ in range(4)
        ]
        have_come.set()
        relay.close()
        gc.collect()  # of a connection that was left open it warns
        assert [read_end(caller) for caller in callers] == [b""] * 4


def test_a_relay_ends_although_a_member_does_not_read(papers: Papers, a: Credentials, b: Credentials) -> None:
    with open_relay(papers) as relay:
        one, other = spliced(papers, (url_of(relay), url_of(relay)), a, b)
        with one, other:
            one.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                while True:
                    one.send(bytes(1 << 16))
            relay.close()
            gc.collect()


@pytest.mark.parametrize("first", [b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b"SSH-2.0-x\r\n", b"\x16\x03\x01zz"])
def test_other_languages_are_answered_politely_or_not_at_all(relay: RelayServer, first: bytes) -> None:
    with socket.create_connection(("127.0.0.1", relay.port), WAIT_S) as sock:
        sock.sendall(first)
        sock.shutdown(socket.SHUT_WR)
        told = read_end(sock)
        assert told.startswith(b"HTTP/1.1 426 ") if first.startswith(b"GET") else b"SCr" not in told


def test_an_entry_leads_to_a_server_beside_the_relay_and_no_other(papers: Papers) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        place = ("127.0.0.1", server.getsockname()[1])
        with open_relay(papers, entries={"links": place}) as relay:
            for scheme in ("tcp", "wss"):
                with RelayDoor(url_of(relay, scheme), WAIT_S) as door:
                    outside = door.enter("links", WAIT_S)
                echo_both_ways(outside, server.accept()[0], b"hello" * 1000)
            with RelayDoor(url_of(relay), WAIT_S) as door, pytest.raises(LinkError, match="no server called"):
                door.enter("secrets", WAIT_S)


def test_a_relay_that_is_gone_is_named(papers: Papers) -> None:
    with open_relay(papers) as relay:
        url = url_of(relay)
    with pytest.raises(LinkError, match=re.escape(url)):
        RelayDoor(url, WAIT_S)


@pytest.mark.parametrize("url", ["tcp://host", "http://host:1", "relay", "tcp://:7422", "tcp://h:99999"])
def test_what_is_no_address_of_a_relay_is_said(url: str) -> None:
    with pytest.raises(UsageError, match="no relay's address"):
        RelayDoor(url, WAIT_S)


class ForwardProxy:
    """An HTTP proxy that knows CONNECT alone, and wants a password where one is set."""

    def __init__(self, password: bytes = b"") -> None:
        self._password = password
        self._server = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._server.getsockname()[1]}"
        self.asked: list[bytes] = []
        self._threads = [threading.Thread(target=self._serve)]
        self._threads[0].start()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                sock, _ = self._server.accept()
                thread = threading.Thread(target=self._connect, args=(sock,))
                self._threads.append(thread)
                thread.start()

    def _connect(self, sock: socket.socket) -> None:
        head = b""
        while b"\r\n\r\n" not in head:
            head += sock.recv(4096)
        self.asked.append(head)
        if self._password not in head:
            sock.sendall(b"HTTP/1.1 407 Who are you?\r\n\r\n")
            sock.close()
            return
        host, _, port = head.split(b" ")[1].decode().rpartition(":")
        far = socket.create_connection((host, int(port)))
        sock.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
        there = threading.Thread(target=_copy, args=(sock, far))
        there.start()
        _copy(far, sock)
        there.join()
        sock.close(), far.close()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()
        for thread in self._threads:
            thread.join()


def _copy(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 16):
            target.sendall(data)
    for each in (source, target):
        with contextlib.suppress(OSError):
            each.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize(("scheme", "variable"), [("ws", "http_proxy"), ("wss", "HTTPS_PROXY")])
def test_a_web_door_is_reached_through_the_proxy_that_the_environment_names(
    papers: Papers,
    relay: RelayServer,
    a: Credentials,
    b: Credentials,
    scheme: str,
    variable: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    with contextlib.closing(ForwardProxy(b"Basic bWU6d29yZA==")) as proxy:
        monkeypatch.setenv(variable, f"http://me:word@{proxy.address}")
        one, other = spliced(papers, (url_of(relay, scheme), url_of(relay)), a, b)
        echo_both_ways(one, other, b"through a proxy" * 100)
        assert [each.split(b"\r\n")[0] for each in proxy.asked] == [
            b"CONNECT 127.0.0.1:%d HTTP/1.1" % relay.port
        ]
        monkeypatch.setenv(variable, f"http://{proxy.address}")
        with pytest.raises(LinkError, match=r"does not connect to .* 407"):
            RelayDoor(url_of(relay, scheme), WAIT_S)


def test_the_key_of_a_cluster_is_copied_whole(papers: Papers) -> None:
    text = cluster_key_text(papers.authority)
    assert parse_cluster_key(f" {text}\n") == key_of(papers.authority)
    for wrong in (text[:-2], text[5:], "", "sck1.", "sck1.!!!!", text.replace("sck1", "sc1")):
        with pytest.raises(UsageError, match="no cluster's key"):
            parse_cluster_key(wrong)


def test_a_ticket_names_its_node_until_it_expires(papers: Papers, a: Credentials) -> None:
    ticket = issue_ticket(papers.authority, a.identity.public_key, now_s=1000.0, life_s=60.0)
    assert read_ticket(ticket, key_of(papers.authority), now_s=1059.0).node_id == node(a)
    with pytest.raises(AuthError, match="expired"):
        read_ticket(ticket, key_of(papers.authority), now_s=1060.0)
