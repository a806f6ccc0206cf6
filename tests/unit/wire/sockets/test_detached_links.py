"""Links that hand their connection over to somebody who goes on without frames."""

from __future__ import annotations

import socket
import time

import pytest

from shardcompute.core.errors import LinkClosedError, LinkError
from shardcompute.wire import CollectiveFrame, LinkOptions, Ping, WireLimits, check_message, pack_frame
from shardcompute.wire.handshake import Introduction
from shardcompute.wire.socket_link import SocketLink


def link_and_end() -> tuple[SocketLink, socket.socket]:
    near, far = socket.socketpair()
    near.setblocking(False)
    link = SocketLink(near, "test", LinkOptions(), deadline=time.monotonic() + 60)
    link.introduced(Introduction("peer", "", 2))
    return link, far


def test_the_connection_comes_with_what_was_already_read() -> None:
    link, far = link_and_end()
    far.sendall(b"".join(pack_frame(Ping(1, 0.0), (), WireLimits())) + b"more")
    assert link.receive(20)[0] == Ping(1, 0.0)

    sock, early = link.detach()

    assert early == b"more"
    with pytest.raises(LinkClosedError, match="handed over"):
        link.send(Ping(2, 0.0))
    sock.setblocking(True)
    sock.sendall(b"back")
    assert far.recv(4) == b"back"
    sock.close()
    far.close()


def test_closing_the_link_ends_the_connection_for_whoever_has_it() -> None:
    link, far = link_and_end()
    sock, _ = link.detach()

    link.close()

    assert far.recv(4) == b""
    sock.setblocking(True)
    assert sock.recv(4) == b""
    sock.close()
    link.close()
    far.close()


def test_a_frame_of_a_collective_has_the_size_that_it_says() -> None:
    check_message(CollectiveFrame(100), 100, WireLimits())
    with pytest.raises(LinkError, match="100 bytes of a collective were announced and 99 came"):
        check_message(CollectiveFrame(100), 99, WireLimits())
