"""Draws that nobody can steer: which answers are audited at which stage.

The auditor commits to a secret by publishing its digest before anything is computed; a stage signs for what it sent
before it can know the secret. The draw is a keyed hash of what was signed: the stage cannot predict it, the auditor
cannot choose it, and once the secret is shown everybody can draw again and see whether an audit was left out.
"""

from __future__ import annotations

import hashlib
import hmac

SECRET_BYTES = 32
_COMMITMENT = b"shardcompute audit secret v1\x00"
_DRAW = b"shardcompute audit draw v1\x00"
_SCALE = 1 << 64


def commit_secret(secret: bytes) -> bytes:
    """What is published of a secret before it is used."""
    return hashlib.sha256(_COMMITMENT + secret).digest()


def draw_number(secret: bytes, signed: bytes) -> float:
    """A number in [0, 1) for what a stage signed; the same for whoever knows both."""
    digest = hmac.new(secret, _DRAW + hashlib.sha256(signed).digest(), hashlib.sha256).digest()
    return int.from_bytes(digest[:8], "big") / _SCALE


def is_drawn(secret: bytes, signed: bytes, rate: float) -> bool:
    """Whether what was signed is audited, where a share of `rate` is to be."""
    return draw_number(secret, signed) < rate
