"""Relays for tests: one on loopback, members with tickets, and two of them met."""

from __future__ import annotations

import secrets
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from shardcompute.relay.client import RelayDoor, RelayPass
from shardcompute.relay.door_tls import throwaway_server_context
from shardcompute.relay.messages import MEETING_BYTES
from shardcompute.relay.server import RelayServer
from shardcompute.relay.tickets import issue_ticket
from shardcompute.security import ClusterAuthority, Credentials
from support.network.papers import Papers

WAIT_S = 20.0


def key_of(authority: ClusterAuthority) -> bytes:
    return authority.private_key.public_key().public_bytes_raw()


def pass_of(papers: Papers, member: Credentials, *, life_s: float = 60.0, attends: bool = False) -> RelayPass:
    identity = member.identity
    ticket = issue_ticket(
        papers.authority, identity.public_key, now_s=time.time(), life_s=life_s, attends=attends
    )
    return RelayPass(identity, ticket)


def new_meeting() -> bytes:
    return secrets.token_bytes(MEETING_BYTES)


@contextmanager
def open_relay(papers: Papers, **options: Any) -> Iterator[RelayServer]:
    tls = throwaway_server_context()
    with RelayServer("127.0.0.1", 0, key_of(papers.authority), tls=tls, **options) as relay:
        yield relay


def url_of(relay: RelayServer, scheme: str = "tcp") -> str:
    return f"{scheme}://127.0.0.1:{relay.port}"


@dataclass
class MeetingCall:
    """One member's visit, in a thread: a socket or why there is none."""

    sock: socket.socket | None = None
    error: Exception | None = None

    def start(self, url: str, shown: RelayPass, meeting: bytes, peer: str) -> threading.Thread:
        def call() -> None:
            try:
                with RelayDoor(url, WAIT_S) as door:
                    self.sock = door.meet(shown, meeting, peer, WAIT_S)
            except Exception as error:
                self.error = error

        thread = threading.Thread(target=call)
        thread.start()
        return thread


def spliced(
    papers: Papers, urls: tuple[str, str], a: Credentials, b: Credentials
) -> tuple[socket.socket, socket.socket]:
    """The two ends of a link that two members have through a relay."""
    meeting, calls = new_meeting(), (MeetingCall(), MeetingCall())
    threads = [
        call.start(url, pass_of(papers, me), meeting, other.identity.node_id)
        for call, url, me, other in zip(calls, urls, (a, b), (b, a), strict=True)
    ]
    for thread in threads:
        thread.join()
    for call in calls:
        if call.error is not None:
            raise call.error
    first, second = (call.sock for call in calls)
    assert first is not None
    assert second is not None
    return first, second


def read_exactly(sock: socket.socket, count: int) -> bytes:
    sock.settimeout(WAIT_S)
    content = bytearray()
    while len(content) < count:
        piece = sock.recv(min(count - len(content), 1 << 16))
        assert piece, "the other side hung up"
        content += piece
    return bytes(content)
