"""CPace, a password-authenticated key exchange: two sides that know one short code agree on a key.

Whoever listens learns nothing of the code, and whoever takes part without knowing it can try one guess and no more.
This is CPACE-X25519-SHA512 of draft-irtf-cfrg-cpace, with an initiator and a responder. Multiplication on the curve is
`cryptography`'s X25519; what is ours is the map from a hash to a point (Elligator 2) and the layout of what is hashed,
both held by the draft's vectors. The map does not run in constant time: a code is good for one exchange, so that
there is no second time to be measured.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from dataclasses import dataclass, field
from typing import Literal

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey

from shardcompute.core.errors import AuthError

SESSION_BYTES = 16
SHARE_BYTES = 32
PROOF_BYTES = 64
Side = Literal["initiator", "responder"]
_DOMAIN = b"CPace255"
_KEY_DOMAIN = b"CPace255_ISK"
_HASH_BLOCK_BYTES = 128
_P = 2**255 - 19
_A = 486_662


@dataclass(frozen=True, slots=True)
class OwnShare:
    """One side's secret of one exchange, and what it sends of it."""

    public: bytes
    scalar: bytes = field(repr=False)


def begin_exchange(code: bytes, channel: bytes, session: bytes, scalar: bytes | None = None) -> OwnShare:
    """A share for this code. Both sides must mean the same `channel` and `session`, or they agree on nothing."""
    secret = secrets.token_bytes(32) if scalar is None else scalar
    return OwnShare(_multiply(secret, generator(code, channel, session)), secret)


def agree(own: OwnShare, session: bytes, initiator: bytes, responder: bytes) -> bytes:
    """The key of an exchange in which these shares were sent, one of which is our own."""
    other = responder if own.public == initiator else initiator
    secret = _multiply(own.scalar, other)
    transcript = lv_cat(initiator, b"") + lv_cat(responder, b"")
    return intermediate_key(session, secret, transcript)


def proof_of(key: bytes, side: Side) -> bytes:
    """What shows the other side that we have the same key; each has its own, so that none can be sent back."""
    return hmac.digest(key, b"shardcompute pairing: " + side.encode(), "sha512")


def intermediate_key(session: bytes, secret: bytes, transcript: bytes) -> bytes:
    return hashlib.sha512(lv_cat(_KEY_DOMAIN, session, secret) + transcript).digest()


def generator(code: bytes, channel: bytes, session: bytes) -> bytes:
    """The point that stands for the code in this exchange."""
    digest = hashlib.sha512(generator_string(code, channel, session)).digest()
    return _elligator2(digest[:32])


def generator_string(code: bytes, channel: bytes, session: bytes) -> bytes:
    """The code alone fills the first block of the hash, whatever its length."""
    padding = max(0, _HASH_BLOCK_BYTES - 1 - len(_prepend_length(code)) - len(_prepend_length(_DOMAIN)))
    return lv_cat(_DOMAIN, code, bytes(padding), channel, session)


def lv_cat(*parts: bytes) -> bytes:
    """Parts, each behind its length: no two lists of them look the same."""
    return b"".join(_prepend_length(part) for part in parts)


def _prepend_length(part: bytes) -> bytes:
    length, size = bytearray(), len(part)
    while size >= 128:
        length.append(size & 127 | 128)
        size >>= 7
    length.append(size)
    return bytes(length) + part


def _elligator2(digest: bytes) -> bytes:
    number = int.from_bytes(digest, "little") % 2**255 % _P
    v = -_A * pow(1 + 2 * number * number, -1, _P) % _P
    is_square = pow(v**3 + _A * v * v + v, (_P - 1) // 2, _P) in (0, 1)
    return (v if is_square else (-v - _A) % _P).to_bytes(32, "little")


def _multiply(scalar: bytes, point: bytes) -> bytes:
    """AuthError for points that no honest side sends: with them the key would be known to everybody."""
    try:
        return X25519PrivateKey.from_private_bytes(scalar).exchange(X25519PublicKey.from_public_bytes(point))
    except ValueError as error:
        raise AuthError("The other side does not pair as it should", hint="make a new code") from error
