"""Serialisation of books and lists: msgpack, read strictly.

A revocation that gets lost in reading would let somebody in. So a stored form is an array with a version, in
which nothing may be missing, unknown or left to a default; anything else is `SourceError`.
"""

from __future__ import annotations

from typing import Literal, TypeVar

import msgspec

from shardcompute.core.errors import SourceError


class Stored(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True):
    """What every stored form begins with."""

    version: Literal[1]


S = TypeVar("S", bound=Stored)


def write_stored(stored: Stored) -> bytes:
    """Equal values give equal bytes."""
    return msgspec.msgpack.encode(stored, order="deterministic")


def read_stored(content: bytes, kind: type[S], what: str) -> S:
    """The stored form; `what` names it in the error, such as "The record of API keys"."""
    try:
        return msgspec.msgpack.decode(content, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise SourceError(
            f"{what} is damaged or of a newer version: {error}", hint="restore it from a copy"
        ) from error
