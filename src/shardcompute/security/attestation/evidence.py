"""Evidence: a signed report of a machine's hardware and the certificates of who signed it, bound to the node's key.

Hardware signs 64 bytes of the guest's choosing along with its report. Here they are a digest of the node's public key,
so that evidence of one machine is of no use to another, and a node that has it holds its key where it says it does.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Annotated, TypeAlias

import msgspec
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from shardcompute.core.errors import AuthError

REPORT_DATA_BYTES = 64
MOST_EVIDENCE_BYTES = 32 << 10
_MOST_REPORT_BYTES = 16 << 10
_MOST_CERTIFICATES = 6
_MOST_CERTIFICATE_CHARS = 8 << 10
_PURPOSE = b"shardcompute node key\0"

Certificate: TypeAlias = Annotated[str, msgspec.Meta(max_length=_MOST_CERTIFICATE_CHARS)]


class Evidence(msgspec.Struct, frozen=True):
    """`report` as the hardware gave it; `certificates` (PEM) from the key that signed it upwards, where the report does
    not bring them along."""

    kind: Annotated[str, msgspec.Meta(min_length=1, max_length=32)]
    report: Annotated[bytes, msgspec.Meta(min_length=1, max_length=_MOST_REPORT_BYTES)]
    certificates: Annotated[list[Certificate], msgspec.Meta(max_length=_MOST_CERTIFICATES)] = []


@dataclass(frozen=True, slots=True)
class VerifiedReport:
    """What evidence proves: which kind of hardware, and the measurement of what was started in it."""

    kind: str
    measurement: str
    """In hexadecimal."""


def encode_evidence(evidence: Evidence) -> bytes:
    return msgspec.json.encode(evidence)


def decode_evidence(content: bytes) -> Evidence:
    """AuthError where it is none, or far too long."""
    if len(content) > MOST_EVIDENCE_BYTES:
        raise AuthError(
            f"Evidence of {len(content)} bytes is more than any",
            hint=f"at most {MOST_EVIDENCE_BYTES} are read",
        )
    try:
        return msgspec.json.decode(content, type=Evidence)
    except (ValueError, RecursionError) as error:
        raise AuthError(
            f"The evidence cannot be read: {error}", hint="make the file with `shardcompute evidence pack`"
        ) from error


def report_data_of(request_pem: str) -> bytes:
    """The bytes that hardware has to sign for the node whose key asks for a certificate."""
    try:
        request = x509.load_pem_x509_csr(request_pem.encode())
        key = request.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    except ValueError as error:
        raise AuthError("The request for a certificate cannot be read") from error
    return hashlib.sha512(_PURPOSE + key).digest()
