"""Join tokens: everything that a new machine needs to find, recognise and enter a cluster, in one string.

    sc1.<base64url of msgpack [version, id, secret, addresses, fingerprint, cluster] and 4 bytes of checksum>

The checksum catches slips of the hand, not attackers: those fail on the secret. Each token has exactly one
spelling, apart from white space, which terminals add when they wrap a line. Parsing raises `UsageError` alone.
"""

from __future__ import annotations

import base64
import hashlib
import re
from dataclasses import dataclass, field
from typing import Annotated

import msgspec

from shardcompute.core.errors import UsageError
from shardcompute.security.names import check_cluster_name

TOKEN_ID_BYTES = 6
SECRET_BYTES = 20
PUBLIC_ID = "00" * TOKEN_ID_BYTES
PUBLIC_SECRET = bytes(SECRET_BYTES)
"""In the token of an open pool, which anybody may have: it names the cluster and lets nobody in by itself."""
_PREFIX = "sc1."
_VERSION = 1
_CHECKSUM_BYTES = 4
_MAX_CHARACTERS = 4096
_MAX_ADDRESSES = 8
_ANY_VERSION = re.compile(r"sc(\d{1,9})\.")
_BASE64 = re.compile(r"[A-Za-z0-9_-]+")
_TOKEN_ID = re.compile(rf"[0-9a-f]{{{2 * TOKEN_ID_BYTES}}}")
_FINGERPRINT = re.compile(r"[0-9a-f]{64}")
_ADDRESS = re.compile(r"(?:\[[0-9A-Fa-f:.]{2,45}\]|[A-Za-z0-9_.-]{1,253}):([1-9]\d{0,4})")
_COPY_HINT = "copy the whole line again, from sc1. to the end"


@dataclass(frozen=True, slots=True)
class JoinToken:
    """A token in parts. Neither its repr nor its str shows the secret; `encode` does."""

    token_id: str
    secret: bytes = field(repr=False)
    addresses: tuple[str, ...]
    fingerprint: str
    cluster: str

    def __post_init__(self) -> None:
        hint = "ask the coordinator for a new token"
        check_cluster_name(self.cluster)
        if not _TOKEN_ID.fullmatch(self.token_id) or len(self.secret) != SECRET_BYTES:
            raise UsageError("The id or the secret of the join token has the wrong length", hint=hint)
        if not _FINGERPRINT.fullmatch(self.fingerprint):
            raise UsageError("The join token names no authority", hint=hint)
        if not 1 <= len(self.addresses) <= _MAX_ADDRESSES:
            raise UsageError(
                f"A join token holds 1 to {_MAX_ADDRESSES} addresses, not {len(self.addresses)}", hint=hint
            )
        for address in self.addresses:
            _check_address(address)

    @property
    def is_public(self) -> bool:
        """Of an open pool: whoever joins with it is on probation."""
        return self.token_id == PUBLIC_ID

    def encode(self) -> str:
        """The string for pasting. Unless it is public it is a secret: whoever has it can join."""
        payload = msgspec.msgpack.encode(
            _PackedToken(
                version=_VERSION,
                token_id=bytes.fromhex(self.token_id),
                secret=self.secret,
                addresses=self.addresses,
                fingerprint=bytes.fromhex(self.fingerprint),
                cluster=self.cluster,
            )
        )
        content = payload + _checksum(payload)
        return _PREFIX + base64.urlsafe_b64encode(content).decode().rstrip("=")


class _PackedToken(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True):
    version: int
    token_id: Annotated[bytes, msgspec.Meta(min_length=TOKEN_ID_BYTES, max_length=TOKEN_ID_BYTES)]
    secret: Annotated[bytes, msgspec.Meta(min_length=SECRET_BYTES, max_length=SECRET_BYTES)]
    addresses: tuple[str, ...]
    fingerprint: Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
    cluster: str


def parse_token(text: str) -> JoinToken:
    """The token that was pasted; `UsageError` says what is wrong with it, without repeating it."""
    if len(text) > _MAX_CHARACTERS:
        raise UsageError("This is far too long for a join token", hint=_COPY_HINT)
    pasted = "".join(text.split())
    payload = _payload(pasted)
    try:
        packed = msgspec.msgpack.decode(payload, type=_PackedToken)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise UsageError("The join token has unknown content", hint=_COPY_HINT) from error
    if packed.version != _VERSION:
        raise UsageError("The join token has unknown content", hint=_COPY_HINT)
    token = JoinToken(
        token_id=packed.token_id.hex(),
        secret=packed.secret,
        addresses=packed.addresses,
        fingerprint=packed.fingerprint.hex(),
        cluster=packed.cluster,
    )
    # Unused bits of base64 and longer forms of msgpack would give one token many spellings.
    if token.encode() != pasted:
        raise UsageError("The join token has been altered", hint=_COPY_HINT)
    return token


def _payload(pasted: str) -> bytes:
    """The bytes that the checksum vouches for."""
    if not pasted:
        raise UsageError("The join token is empty", hint=_COPY_HINT)
    if pasted.startswith("sk-"):
        raise UsageError(
            "This is an API key, not a join token", hint="join tokens start with sc1.; ask the coordinator"
        )
    version = _ANY_VERSION.match(pasted)
    if version is None:
        raise UsageError("This is not a join token: it does not start with sc1.", hint=_COPY_HINT)
    if version[0] != _PREFIX:
        raise UsageError(
            f"The join token has version {version[1]}, this program reads version 1",
            hint="run the same version of ShardCompute on all nodes",
        )
    body = pasted[len(_PREFIX) :]
    if not _BASE64.fullmatch(body) or len(body) % 4 == 1:
        raise UsageError("The join token holds characters that no token has, or lacks some", hint=_COPY_HINT)
    content = base64.urlsafe_b64decode(body + "=" * (-len(body) % 4))
    payload, checksum = content[:-_CHECKSUM_BYTES], content[-_CHECKSUM_BYTES:]
    if checksum != _checksum(payload):
        raise UsageError("The join token was not copied correctly: its checksum is wrong", hint=_COPY_HINT)
    return payload


def _check_address(address: str) -> None:
    match = _ADDRESS.fullmatch(address)
    if match is None or int(match[1]) > 65_535:
        raise UsageError(
            f"{address[:80]!r} is not an address of a coordinator",
            hint="write host:port, such as 192.168.1.5:7070 or [fd00::5]:7070",
        )


def _checksum(payload: bytes) -> bytes:
    return hashlib.sha256(b"shardcompute join token" + payload).digest()[:_CHECKSUM_BYTES]
