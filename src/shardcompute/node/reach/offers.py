"""What two nodes tell each other, over their control links, so that they can meet: addresses and relays."""

from __future__ import annotations

from typing import Annotated, TypeAlias, TypeVar

import msgspec

from shardcompute.core.errors import LinkError
from shardcompute.core.fields import Name
from shardcompute.relay.messages import MEETING_BYTES
from shardcompute.wire.control import MOST_OFFER_BYTES

MOST_ADDRESSES = 12
MOST_RELAYS = 8
Url: TypeAlias = Annotated[str, msgspec.Meta(max_length=300)]
Urls: TypeAlias = Annotated[tuple[Url, ...], msgspec.Meta(max_length=MOST_ADDRESSES)]
Seconds: TypeAlias = Annotated[float, msgspec.Meta(ge=0.0, le=3600.0)]


class RelayDistance(msgspec.Struct, frozen=True, array_like=True):
    """A relay, and how long its greeting took."""

    url: Url
    took_s: Seconds


Relays: TypeAlias = Annotated[tuple[RelayDistance, ...], msgspec.Meta(max_length=MOST_RELAYS)]


class MeetOffer(msgspec.Struct, frozen=True, array_like=True):
    """Whoever wants a link says where it can be dialled (`direct`), from which address it will dial at the same time
    (`seen`; "": it cannot), and which relays it reaches."""

    meeting: Annotated[bytes, msgspec.Meta(min_length=MEETING_BYTES, max_length=MEETING_BYTES)]
    role: Name
    direct: Urls = ()
    seen: Url = ""
    relays: Relays = ()


class MeetAnswer(msgspec.Struct, frozen=True, array_like=True):
    """The other side, in the same words. It has begun already."""

    direct: Urls = ()
    seen: Url = ""
    relays: Relays = ()


Said = TypeVar("Said", MeetOffer, MeetAnswer)


def encode_said(said: MeetOffer | MeetAnswer) -> bytes:
    return msgspec.msgpack.encode(said)


def decode_said(content: bytes, kind: type[Said]) -> Said:
    """`LinkError` for what is none, or says too much."""
    try:
        if len(content) > MOST_OFFER_BYTES:
            raise ValueError("it is too long")
        return msgspec.msgpack.decode(content, type=kind)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise LinkError(
            f"what a peer says of where it can be met cannot be read: {error}",
            hint="run the same release on every node",
        ) from error
