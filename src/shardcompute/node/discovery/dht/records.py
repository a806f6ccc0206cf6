"""Records of a distributed hash table: where a cluster is, signed by its authority, with a sequence and an end.

The key of a record follows from the authority's public key, so that nobody else can make one for it; of two good ones
the higher sequence counts, so that an old one cannot be played again over a newer one; and none outlives its end, which
is a day away at most. Whoever stores a record reads addresses in it: clusters that use this are not hidden.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence

import msgspec
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from shardcompute.core.errors import UsageError

MOST_RECORD_BYTES = 600
"""Beside it, an answer has room for eight contacts."""
MOST_LIFE_S = 86_400.0
MOST_URLS = 8
_MOST_URL_CHARACTERS = 100
_SKEW_S = 300.0
_LINKS = ("tcp://",)
_DOORS = ("tcp://", "ws://", "wss://")
_CONTEXT = b"shardcompute dht record v1\x00"
"""The authority's key also signs certificates: neither begins with these bytes."""


class Whereabout(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Where a cluster is: URLs of its coordinators, relays, and some nodes that hold weights."""

    coordinators: tuple[str, ...] = ()
    relays: tuple[str, ...] = ()
    holders: tuple[str, ...] = ()


class SignedRecord(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """As it travels. Good only after `check`."""

    public_key: bytes
    sequence: int
    expires_at_s: int
    content: bytes
    signature: bytes

    @property
    def key(self) -> bytes:
        return record_key(self.public_key)

    def check(self, now_s: float) -> bool:
        """Whether its cluster made it, and it is neither over nor from a far future."""
        is_bounded = (
            len(self.public_key) == 32
            and len(self.signature) == 64
            and len(self.content) <= MOST_RECORD_BYTES
            and 0 <= self.sequence < 2**63
            and now_s < self.expires_at_s <= now_s + MOST_LIFE_S + _SKEW_S
        )
        if not is_bounded:
            return False
        try:
            Ed25519PublicKey.from_public_bytes(self.public_key).verify(self.signature, _signed_part(self))
        except (InvalidSignature, ValueError):
            return False
        return True

    def read(self) -> Whereabout:
        """What it says; empty where that is none of ours. Its URLs are only where to ask."""
        try:
            said = msgspec.msgpack.decode(self.content, type=Whereabout)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return Whereabout()
        return Whereabout(
            _urls(said.coordinators, _LINKS), _urls(said.relays, _DOORS), _urls(said.holders, _LINKS)
        )


def record_key(public_key: bytes) -> bytes:
    """The id under which records of the cluster with this authority are kept."""
    return hashlib.sha256(b"shardcompute dht" + public_key).digest()[:20]


def sign_record(
    key: Ed25519PrivateKey,
    whereabout: Whereabout,
    *,
    sequence: int,
    life_s: float = MOST_LIFE_S / 4,
    clock: Callable[[], float] = time.time,
) -> SignedRecord:
    """UsageError where it would be too large."""
    content = msgspec.msgpack.encode(whereabout)
    if len(content) > MOST_RECORD_BYTES:
        raise UsageError("a cluster's record would be too large", hint="name fewer or shorter addresses")
    public = key.public_key().public_bytes_raw()
    unsigned = SignedRecord(public, sequence, int(clock() + life_s), content, b"")
    return msgspec.structs.replace(unsigned, signature=key.sign(_signed_part(unsigned)))


def fitted(whereabout: Whereabout) -> Whereabout:
    """As much of it as a record holds: members need coordinators first, then relays."""
    parts = [
        list(part[:MOST_URLS]) for part in (whereabout.coordinators, whereabout.relays, whereabout.holders)
    ]
    while len(msgspec.msgpack.encode(fit := Whereabout(*map(tuple, parts)))) > MOST_RECORD_BYTES:
        next(part for part in reversed(parts) if part).pop()
    return fit


def newer(known: SignedRecord | None, other: SignedRecord | None) -> SignedRecord | None:
    """Of two good records the later; on equal sequences the one that is known stays."""
    if known is None or other is None:
        return known or other
    return other if other.sequence > known.sequence else known


def _signed_part(record: SignedRecord) -> bytes:
    return _CONTEXT + msgspec.msgpack.encode((record.sequence, record.expires_at_s, record.content))


def _urls(given: Sequence[str], schemes: tuple[str, ...]) -> tuple[str, ...]:
    fine = [url for url in given if len(url) <= _MOST_URL_CHARACTERS and url.isascii() and url.isprintable()]
    return tuple(dict.fromkeys(url for url in fine if url.startswith(schemes)))[:MOST_URLS]
