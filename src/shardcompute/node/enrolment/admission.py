"""Join protocol: what a machine that joins and the coordinator say to each other, as a length and JSON."""

from __future__ import annotations

import ssl
import struct

import msgspec

from shardcompute.core.errors import LinkError

TIMEOUT_S = 10.0
_LENGTH = struct.Struct("!I")
_MOST_BYTES = 64 << 10


class Companion(msgspec.Struct, frozen=True):
    """Another node of the applicant's machine: one for each device that computes."""

    node_id: str
    request_pem: str


class Application(msgspec.Struct, frozen=True):
    """What an applicant says, once it knows whom it talks to."""

    token_id: str
    secret: bytes
    role: str
    node_id: str
    request_pem: str
    companions: list[Companion] = []


class Admission(msgspec.Struct, frozen=True):
    """What it gets: a certificate, one for each companion, and where to go; or why not."""

    certificate_pem: str = ""
    control_urls: list[str] = []
    companion_pems: list[str] = []
    error: str = ""
    code: str = ""


def send(connection: ssl.SSLSocket, content: bytes) -> None:
    connection.sendall(_LENGTH.pack(len(content)) + content)


def receive(connection: ssl.SSLSocket) -> bytes:
    (size,) = _LENGTH.unpack(_receive_exactly(connection, _LENGTH.size))
    if size > _MOST_BYTES:
        raise LinkError(f"{size} bytes are more than anybody needs to join")
    return _receive_exactly(connection, size)


def _receive_exactly(connection: ssl.SSLSocket, size: int) -> bytes:
    content = bytearray()
    while len(content) < size:
        chunk = connection.recv(size - len(content))
        if not chunk:
            raise LinkError("the other side hung up")
        content += chunk
    return bytes(content)
