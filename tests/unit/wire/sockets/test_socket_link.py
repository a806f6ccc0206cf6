"""The one deadline that holds until a peer is introduced, and no longer."""

from __future__ import annotations

import queue
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from shardcompute.core.errors import LinkError
from shardcompute.wire import LinkOptions, Message, Ping, WireLimits, pack_frame
from shardcompute.wire.handshake import Introduction
from shardcompute.wire.socket_link import SocketLink

Ends = tuple[SocketLink, socket.socket]


@pytest.fixture
def ends() -> Iterator[Ends]:
    """A link whose deadline has passed, and the socket at its other end."""
    near, far = socket.socketpair()
    near.setblocking(False)
    with SocketLink(near, "test", LinkOptions(), deadline=time.monotonic() - 1) as link, far:
        yield link, far


def test_it_cuts_a_longer_wait_short(ends: Ends) -> None:
    with pytest.raises(TimeoutError):
        ends[0].receive(3600)


def test_it_holds_inside_a_frame(ends: Ends) -> None:
    ends[1].sendall(b"SCw")
    with pytest.raises(LinkError, match="too slowly"):
        ends[0].receive(3600)


def test_it_ends_with_the_introduction(ends: Ends) -> None:
    link, sock = ends
    link.introduced(Introduction("peer", "worker", 1))
    received: queue.Queue[Message | Exception] = queue.Queue()

    def receive() -> None:
        try:
            received.put(link.receive(20)[0])
        except Exception as error:
            received.put(error)

    thread = threading.Thread(target=receive)
    thread.start()
    with pytest.raises(queue.Empty):
        received.get(timeout=0.05)
    sock.sendall(b"".join(pack_frame(Ping(1, 0.0), (), WireLimits())))
    thread.join(20)
    assert received.get(timeout=10) == Ping(1, 0.0)
