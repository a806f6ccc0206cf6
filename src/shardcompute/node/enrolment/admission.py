"""Join protocol: what a machine that joins and the coordinator say to each other, as a length and JSON."""

from __future__ import annotations

import ssl
import struct
from typing import Annotated

import msgspec

from shardcompute.core.errors import LinkError
from shardcompute.security.attestation.evidence import MOST_EVIDENCE_BYTES

TIMEOUT_S = 10.0
_LENGTH = struct.Struct("!I")
_MOST_BYTES = 64 << 10


class Companion(msgspec.Struct, frozen=True):
    """Another node of the applicant's machine: one for each device that computes."""

    node_id: str
    request_pem: str


class Application(msgspec.Struct, frozen=True, tag="join"):
    """What an applicant says, once it knows whom it talks to."""

    token_id: str
    secret: bytes
    role: str
    node_id: str
    request_pem: str
    companions: list[Companion] = []
    evidence: Annotated[bytes, msgspec.Meta(max_length=MOST_EVIDENCE_BYTES)] = b""
    """Of its hardware (`security.attestation.evidence`), where the cluster asks for some."""


class Admission(msgspec.Struct, frozen=True):
    """What it gets: a certificate, one for each companion, and where to go; or why not."""

    certificate_pem: str = ""
    control_urls: list[str] = []
    companion_pems: list[str] = []
    error: str = ""
    code: str = ""


class PairingStart(msgspec.Struct, frozen=True, tag="pair"):
    """What a machine says that has no token: it wants one for a code (see `pairing`)."""

    session: bytes
    share: bytes
    machine: str = ""


class PairingAnswer(msgspec.Struct, frozen=True):
    """The coordinator's share of the exchange, or why there is none."""

    share: bytes = b""
    error: str = ""
    code: str = ""


class PairingProof(msgspec.Struct, frozen=True):
    """That the machine knows the code."""

    proof: bytes


class PairingGrant(msgspec.Struct, frozen=True):
    """That the coordinator knows it, too, and a join token for this machine; or why not."""

    proof: bytes = b""
    token: str = ""
    error: str = ""
    code: str = ""


FirstWords = Application | PairingStart
"""What may come first over a connection."""


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
