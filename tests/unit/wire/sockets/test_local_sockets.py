"""Links on one machine: who is there is proven as over TCP, strangers get no further, and where there can be no such
link there is TLS."""

from __future__ import annotations

import os
import socket
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from shardcompute.core.errors import LinkError
from shardcompute.wire import Hello, Link, LinkOptions, Ping, Pong, TcpTransport, pack_frame
from shardcompute.wire import local_sockets as module
from shardcompute.wire.control import TensorBytes
from shardcompute.wire.limits import HANDSHAKE_LIMITS
from shardcompute.wire.local_sockets import LocalSockets, default_local_sockets, peer_user
from shardcompute.wire.streams import wait_until_ready
from shardcompute.wire.tcp import TcpListener, split_address

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="there are no such sockets")
ME = Hello(1, 1, "me", "worker", "home")
LOOPBACK = "tcp://127.0.0.1:0"
NOBODY = 65534
Listen = Callable[[], TcpListener]


@pytest.fixture
def folder() -> Iterator[Path]:
    # A test's own folder may have too long a name.
    with tempfile.TemporaryDirectory(prefix="sc-") as short:
        yield Path(short, "links")


@pytest.fixture
def transport(folder: Path) -> TcpTransport:
    return TcpTransport(LocalSockets(folder))


def _listening(transport: TcpTransport, credentials: Any) -> TcpListener:
    return transport.listen(LOOPBACK, ME, LinkOptions(tls=credentials.server))


def _dial(transport: TcpTransport, listener: TcpListener, context: Any, node: str = "me") -> Link:
    options = LinkOptions(tls=context, server_name="node", node=node, handshake_timeout_s=20)
    return transport.dial(listener.address, ME, options)


def _answers(link: Link, other: Link) -> bool:
    link.send(Ping(1, 0.0))
    return other.receive(20)[0] == Ping(1, 0.0)


@contextmanager
def _met(transport: TcpTransport, credentials: Any, node: str = "me") -> Iterator[tuple[Link, Link]]:
    with (
        _listening(transport, credentials) as listener,
        _dial(transport, listener, credentials.client, node) as near,
        listener.accept(20) as far,
    ):
        yield near, far


def test_both_ends_show_their_certificates_and_go_on_in_the_clear(
    transport: TcpTransport, credentials: Any, folder: Path
) -> None:
    with _met(transport, credentials) as (near, far):
        assert near.certificate == far.certificate == credentials.der
        assert near.stats.is_local
        assert far.stats.is_local
        assert near.stats.tls_version is None
        near.send(Ping(1, 0.0))
        wait_until_ready(far._sock, select_write=False, deadline=None)  # type: ignore[attr-defined]
        assert b"SCw" in far._sock.recv(4096, socket.MSG_PEEK)  # type: ignore[attr-defined]
        assert far.receive(20)[0] == Ping(1, 0.0)
        far.send(Pong(2, 0.0))
        assert near.receive(20)[0] == Pong(2, 0.0)
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert list(folder.iterdir()) == []


def test_large_frames_pass_both_ways_at_once(transport: TcpTransport, credentials: Any) -> None:
    body = os.urandom(20_000_000)
    with _met(transport, credentials) as (near, far):
        message = TensorBytes(1, len(body))
        senders = [threading.Thread(target=link.send, args=(message, [body])) for link in (near, far)]
        for sender in senders:
            sender.start()
        # One end after the other: what the second sends waits meanwhile.
        assert far.receive(60)[1] == body
        assert near.receive(60)[1] == body
        for sender in senders:
            sender.join()


def test_the_certificate_is_what_is_judged(transport: TcpTransport, credentials: Any) -> None:
    judged: list[tuple[str, bytes | None]] = []

    def refuse(hello: Hello, certificate: bytes | None) -> str:
        judged.append((hello.node, certificate))
        return "not you"

    with transport.listen(LOOPBACK, ME, LinkOptions(tls=credentials.server), refuse) as listener:
        with pytest.raises(LinkError, match="not you"):
            _dial(transport, listener, credentials.client)
        with pytest.raises(TimeoutError):
            listener.accept(0)
    assert judged == [("me", credentials.der)]


def test_a_stranger_of_this_machine_is_not_let_in(
    transport: TcpTransport, credentials: Any, strangers: Any, folder: Path
) -> None:
    with _listening(transport, credentials) as listener:
        for context in (strangers.client, credentials.anonymous_client):
            with pytest.raises(LinkError):
                _dial(transport, listener, context)
        [path] = folder.iterdir()
        # One that leaves the handshake out, and one that says nothing and goes.
        for said in (b"".join(map(bytes, pack_frame(ME, b"", HANDSHAKE_LIMITS))), b""):
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as raw:
                raw.settimeout(20)
                raw.connect(str(path))
                raw.sendall(said)
                raw.shutdown(socket.SHUT_WR)
                with suppress(ConnectionError):
                    # An alert of TLS may come first; never a welcome.
                    assert b"SCw" not in b"".join(iter(lambda: raw.recv(4096), b""))
        with pytest.raises(TimeoutError):
            listener.accept(0)
        with _dial(transport, listener, credentials.client) as near, listener.accept(20) as far:
            assert near.stats.is_local
            assert _answers(near, far)


def test_an_impostor_in_the_right_place_hears_nothing(
    transport: TcpTransport, credentials: Any, strangers: Any, folder: Path
) -> None:
    """Another process of this user listens where the node should, with a certificate of another authority."""
    with _listening(transport, credentials) as listener:
        [path] = folder.iterdir()
        impostor = TcpTransport(LocalSockets(folder))
        with impostor.listen(LOOPBACK, ME, LinkOptions(tls=strangers.server)) as other:
            [taken] = set(folder.iterdir()) - {path}
            taken.replace(path)
            with pytest.raises(LinkError, match="TLS"):
                _dial(transport, listener, credentials.client)
            with pytest.raises(TimeoutError):
                other.accept(0)


def test_a_listener_of_another_user_is_not_dialled(
    transport: TcpTransport, credentials: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "peer_user", lambda sock: os.getuid() + 1)
    with _met(transport, credentials) as (near, far):
        assert (near.stats.is_local, near.stats.tls_version) == (False, "TLSv1.3")
        assert _answers(near, far)


def test_a_dialler_of_another_user_is_not_heard(
    transport: TcpTransport, credentials: Any, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before a byte of it is read."""
    with _listening(transport, credentials) as listener:
        [path] = folder.iterdir()
        monkeypatch.setattr(module, "peer_user", lambda sock: os.getuid() + 1)
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as raw:
            raw.settimeout(20)
            raw.connect(str(path))
            assert raw.recv(1) == b""
        monkeypatch.undo()
        with _dial(transport, listener, credentials.client) as near, listener.accept(20):
            assert near.stats.is_local


@pytest.mark.skipif(sys.platform == "win32" or os.getuid() != 0, reason="needs root to act as somebody else")
@pytest.mark.parametrize("is_open", [False, True])
def test_another_user_gets_nowhere(
    transport: TcpTransport, credentials: Any, folder: Path, is_open: bool
) -> None:
    """By the folder; and by what the system says of it, were the folder left open."""
    with _listening(transport, credentials) as listener:
        [path] = folder.iterdir()
        if is_open:
            for each, mode in ((folder.parent, 0o755), (folder, 0o755), (path, 0o777)):
                each.chmod(mode)
        script = (
            "import os, socket, sys\n"
            f"os.setgid({NOBODY}); os.setuid({NOBODY})\n"
            "sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)\n"
            "sock.settimeout(20)\n"
            "try:\n    sock.connect(sys.argv[1])\n"
            "except PermissionError:\n    print('kept out')\n"
            "else:\n    print('heard nothing' if sock.recv(1) == b'' else 'heard')\n"
        )
        done = subprocess.run(
            [sys.executable, "-c", script, str(path)], capture_output=True, text=True, timeout=60, check=True
        )
        assert done.stdout.strip() == ("heard nothing" if is_open else "kept out")
        with pytest.raises(TimeoutError):
            listener.accept(0)


def test_the_system_says_whose_process_is_at_the_other_end() -> None:
    one, other = socket.socketpair()
    with one, other:
        assert peer_user(one) == os.getuid()


@pytest.mark.parametrize("mode", [0o777, 0o750, 0o701])
def test_a_folder_that_others_can_use_is_not_used(
    transport: TcpTransport, credentials: Any, folder: Path, mode: int
) -> None:
    folder.mkdir()
    folder.chmod(mode)
    with _met(transport, credentials) as (near, _):
        assert near.stats.tls_version == "TLSv1.3"
    assert list(folder.iterdir()) == []


def test_a_folder_that_is_a_link_is_not_used(
    transport: TcpTransport, credentials: Any, folder: Path, tmp_path: Path
) -> None:
    tmp_path.chmod(0o700)
    folder.symlink_to(tmp_path)
    with _met(transport, credentials) as (near, _):
        assert near.stats.tls_version == "TLSv1.3"


def test_a_path_too_long_for_a_socket(credentials: Any, tmp_path: Path) -> None:
    with _met(TcpTransport(LocalSockets(tmp_path / ("x" * 100))), credentials) as (near, far):
        assert near.stats.tls_version == "TLSv1.3"
        assert _answers(near, far)


def test_another_node_or_network_is_dialled_over_tcp(
    transport: TcpTransport, credentials: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with _met(transport, credentials, node="../me") as (near, _):
        assert near.stats.tls_version == "TLSv1.3"
    with _listening(transport, credentials) as listener:
        monkeypatch.setattr(module, "_network", lambda: 1)
        with _dial(transport, listener, credentials.client) as near:
            assert near.stats.tls_version == "TLSv1.3"


def test_without_certificates_there_are_no_local_links(transport: TcpTransport, folder: Path) -> None:
    with (
        transport.listen(LOOPBACK, ME) as listener,
        transport.dial(listener.address, ME, LinkOptions(node="me")) as near,
    ):
        assert not near.stats.is_local
    assert not folder.exists()


def test_what_a_killed_process_left_is_passed_by_and_swept(
    transport: TcpTransport, credentials: Any, folder: Path
) -> None:
    folder.mkdir(mode=0o700)
    with TcpTransport().listen(LOOPBACK, ME, LinkOptions(tls=credentials.server)) as listener:
        left = LocalSockets(folder)._path("me", split_address(listener.address)[1])
        with closing(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)) as dead:
            dead.bind(str(left))
        with _dial(transport, listener, credentials.client) as near:
            assert near.stats.tls_version == "TLSv1.3"
    with _listening(transport, credentials):
        assert left not in set(folder.iterdir())


def test_systems_without_such_sockets(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("Windows", "FreeBSD"):
        monkeypatch.setattr("platform.system", lambda name=name: name)
        assert default_local_sockets() is None
