"""Certificates for tests: a cluster's authority, nodes with papers of it, and links dialled by hand."""

from __future__ import annotations

import contextlib
import socket
import ssl
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from shardcompute.security import ClusterAuthority, Credentials, NodeIdentity, Role
from shardcompute.wire import (
    VERSION_MAX,
    VERSION_MIN,
    Hello,
    LinkOptions,
    Message,
    TcpTransport,
    WireLimits,
    pack_frame,
)
from shardcompute.wire.socket_link import SocketLink
from shardcompute.wire.tcp import split_address

BOTH = (Role.WORKER, Role.DRIVER)


@dataclass(frozen=True)
class Papers:
    """An authority that gives papers to whoever asks."""

    folder: Path
    authority: ClusterAuthority

    @classmethod
    def found(cls, folder: Path, name: str = "home") -> Papers:
        return cls(folder, ClusterAuthority.create(folder / "authority", name, now_s=time.time()))

    def node(self, name: str, *roles: Role) -> Credentials:
        identity = NodeIdentity.open(self.folder / name)
        certificate = self.authority.issue(
            identity.certificate_request(),
            node_id=identity.node_id,
            roles=roles or BOTH,
            now_s=time.time(),
        )
        return Credentials(identity, certificate, self.authority.certificate_pem)


def hello_of(credentials: Credentials, role: str) -> Hello:
    return Hello(VERSION_MIN, VERSION_MAX, credentials.identity.node_id, role, credentials.own.cluster)


def dial_as(credentials: Credentials, url: str, role: str, hello: Hello | None = None) -> SocketLink:
    """A link dialled with these papers, and with whatever greeting; LinkError if it is refused."""
    options = LinkOptions(tls=credentials.client_context(), handshake_timeout_s=20.0)
    return TcpTransport().dial(url, hello or hello_of(credentials, role), options)


def connect(url: str, timeout_s: float = 20.0, *, source: str = "") -> socket.socket:
    """A bare connection to where a node listens, perhaps from another address of this machine."""
    return socket.create_connection(split_address(url), timeout_s, (source, 0) if source else None)


def connect_tls(url: str, context: ssl.SSLContext) -> ssl.SSLSocket:
    """A connection under TLS; a server that refuses our certificate says so at the first read only."""
    return context.wrap_socket(connect(url), server_hostname="127.0.0.1")


def frame_bytes(message: Message, *body: bytes) -> bytes:
    return b"".join(pack_frame(message, body, WireLimits()))


def drip(sock: socket.socket, byte: bytes) -> bytes:
    """Send this now and then until the other side has had enough; what it said in the end."""
    sock.settimeout(0.02)
    content = b""
    for _ in range(1000):
        try:
            while chunk := sock.recv(65536):
                content += chunk
            return content
        except TimeoutError:
            with contextlib.suppress(OSError):
                sock.sendall(byte)
        except OSError:
            return content
    pytest.fail("a byte now and then is enough to be waited for")


def read_end(sock: socket.socket) -> bytes:
    """What comes until the other side ends the connection, politely or not; TimeoutError if it does not."""
    content = b""
    try:
        while chunk := sock.recv(65536):
            content += chunk
    except TimeoutError:
        raise
    except OSError:
        pass
    return content
