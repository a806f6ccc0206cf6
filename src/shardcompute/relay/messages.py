"""What is said at a relay's door, before it splices: small MessagePack messages, each behind its length.

Whoever connects says `PREAMBLE`; the relay answers with a `Challenge`, which also tells under which address it sees the
caller (what lies behind a router cannot know that otherwise). Then comes one request: `Meet` a peer, with a ticket,
`Enter` a server of the relay's own machine or of a coordinator that waits here, or `AwaitVisitor` as such a one.
`Spliced` means that every byte from here on is the peer's.
"""

from __future__ import annotations

import struct
from typing import Annotated, TypeAlias

import msgspec

from shardcompute.core.errors import LinkError
from shardcompute.core.fields import Name, Text

PREAMBLE = b"SCr1"
CHALLENGE_BYTES = 16
MEETING_BYTES = 16
MOST_MESSAGE_BYTES = 2048
LENGTH = struct.Struct("<H")
Short: TypeAlias = Annotated[bytes, msgspec.Meta(max_length=1024)]


class Challenge(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """`nonce` is to be signed. `host` and `port`: where the relay sees the caller."""

    nonce: Short
    host: Name
    port: Annotated[int, msgspec.Meta(ge=0, le=65535)]


class Meet(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """Splice me with `peer`, who names the same `meeting` and me. `request` is a packed `Meeting`."""

    ticket: Short
    request: Short
    proof: Short


class Meeting(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What a member signs for."""

    meeting: Annotated[bytes, msgspec.Meta(min_length=MEETING_BYTES, max_length=MEETING_BYTES)]
    peer: Name


class Enter(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """Splice me with a server beside this relay, or with the coordinator that waits here: "links" or "join", which ask
    for certificates and tokens themselves."""

    entry: Name


class AwaitVisitor(msgspec.Struct, frozen=True, array_like=True, tag=6):
    """Splice me with the next who wants to enter here. `proof` is of the words `attendance_of(entry)`."""

    ticket: Short
    entry: Name
    proof: Short


class Spliced(msgspec.Struct, frozen=True, array_like=True, tag=4):
    pass


class Declined(msgspec.Struct, frozen=True, array_like=True, tag=5):
    """Why the relay does not do it, and what to do about it."""

    reason: Text
    hint: Text = ""


DoorMessage: TypeAlias = Challenge | Meet | Enter | AwaitVisitor | Spliced | Declined

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[DoorMessage] = msgspec.msgpack.Decoder(DoorMessage)
_meetings: msgspec.msgpack.Decoder[Meeting] = msgspec.msgpack.Decoder(Meeting)


def pack(message: DoorMessage) -> bytes:
    content = _encoder.encode(message)
    return LENGTH.pack(len(content)) + content


def check_length(prefix: bytes) -> int:
    """How long the message is that follows; `LinkError` where no relay or member sends one so long."""
    (length,) = LENGTH.unpack(prefix)
    if not 0 < length <= MOST_MESSAGE_BYTES:
        raise LinkError(
            f"a message of {length} bytes came at a relay's door",
            hint="check that the address is a relay's and run the same release on every node",
        )
    return int(length)


def unpack(content: bytes) -> DoorMessage:
    """A message; `LinkError` for anything that is none."""
    try:
        return _decoder.decode(content)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise _unreadable(error) from error


def pack_meeting(meeting: Meeting) -> bytes:
    return _encoder.encode(meeting)


def attendance_of(entry: str) -> bytes:
    """What a coordinator signs for that waits at a relay; no packed `Meeting` begins like this."""
    return b"attend " + entry.encode()


def unpack_meeting(content: bytes) -> Meeting:
    try:
        return _meetings.decode(content)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise _unreadable(error) from error


def _unreadable(error: Exception) -> LinkError:
    return LinkError(
        f"a message at a relay's door cannot be read: {error}", hint="run the same release on every node"
    )
