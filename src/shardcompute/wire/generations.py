"""Messages of generations that are computed elsewhere (links of role "generations").

The coordinator dials the worker that hosts a chain's driver and hands it whole requests; what comes back is each
request's deltas in order, as the API would have got them from a driver in its own process. A generation is known by
the number that its `Generate` has on this link. Requests and deltas are the core's own values as MessagePack.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Annotated, TypeAlias

import msgspec

from shardcompute.core.errors import LinkError
from shardcompute.core.fields import Name, Number, Text
from shardcompute.core.generation import Delta, GenerationRequest
from shardcompute.core.pictures import MAX_PICTURES

MOST_TIMINGS_BYTES = 256 << 10
MOST_MEASURES = 256
MOST_RECEIPT_BYTES = 4 << 20
RELEASED = "Released"
"""The code of a generation that the host gives back unfinished: whoever asked goes on with it elsewhere."""

_requests = msgspec.msgpack.Decoder(GenerationRequest)
_deltas = msgspec.msgpack.Decoder(Delta)


class Generate(msgspec.Struct, frozen=True, array_like=True, tag=40):
    """Compute this request with the driver of a chain that the receiver hosts. The patches of its pictures are the
    body, one behind the other, in these sizes."""

    number: Number
    chain: Name
    request: bytes
    patch_sizes: Annotated[list[Number], msgspec.Meta(max_length=MAX_PICTURES)] = []


class Begun(msgspec.Struct, frozen=True, array_like=True, tag=41):
    """The request was taken, as this session of the chain."""

    number: Number
    session: Number


class Generated(msgspec.Struct, frozen=True, array_like=True, tag=42):
    """The next piece of an answer; the last one says how it ended."""

    number: Number
    delta: bytes


class GenerationFailed(msgspec.Struct, frozen=True, array_like=True, tag=43):
    """Nothing more comes; `code` is the name of a class in `core.errors`, or `RELEASED`."""

    number: Number
    code: Name
    message: Text
    hint: Text = ""


class CancelGeneration(msgspec.Struct, frozen=True, array_like=True, tag=44):
    """Nobody waits for this any more."""

    number: Number


class StepTimed(msgspec.Struct, frozen=True, array_like=True, tag=45):
    """How a chain's stages spent their time on one step: a list of `wire.messages.StageTiming`."""

    chain: Name
    timings: Annotated[bytes, msgspec.Meta(max_length=MOST_TIMINGS_BYTES)]


class HostLoad(msgspec.Struct, frozen=True, array_like=True, tag=46):
    """How busy a chain's driver is, and what its router knows."""

    chain: Name
    running: Number
    waiting: Number
    used_tokens: Number
    capacity_tokens: Number
    router: Annotated[dict[Name, float], msgspec.Meta(max_length=MOST_MEASURES)]


class ReceiptMade(msgspec.Struct, frozen=True, array_like=True, tag=47):
    """The receipt of an answer that was computed here, as its JSON (`security.receipts`), compressed. Empty: there is
    none."""

    receipt: Name
    content: Annotated[bytes, msgspec.Meta(max_length=MOST_RECEIPT_BYTES)]


GenerationMessage: TypeAlias = (
    Generate | Begun | Generated | GenerationFailed | CancelGeneration | StepTimed | HostLoad | ReceiptMade
)


def patches_in(request: GenerationRequest) -> list[bytes]:
    """What travels beside a request, as the body of its message."""
    return [picture.patches for picture in request.pictures]


def pack_request(request: GenerationRequest) -> bytes:
    """All but `patches_in` it. Raises LinkError where it has parts that cannot travel."""
    if request.pictures:
        request = replace(request, pictures=tuple(replace(each, patches=b"") for each in request.pictures))
    try:
        return msgspec.msgpack.encode(request, enc_hook=_plain)
    except (TypeError, ValueError, OverflowError) as error:
        raise LinkError(f"a request cannot be sent: {error}", hint="numbers must fit 64 bits") from error


def _plain(value: object) -> object:
    """Mappings of any kind travel as plain ones."""
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"no message can hold a {type(value).__name__}")


def unpack_request(message: Generate, body: memoryview) -> GenerationRequest:
    """The request, as unchecked as it came: the driver judges it. Raises LinkError where it is none."""
    try:
        request = _requests.decode(message.request)
        edges = pairwise(accumulate(message.patch_sizes, initial=0))
        pictures = tuple(
            replace(picture, patches=bytes(body[start:stop]))
            for picture, (start, stop) in zip(request.pictures, edges, strict=True)
        )
    except (ValueError, RecursionError) as error:
        raise LinkError(f"a request cannot be read: {error}", hint="run one release on all nodes") from error
    return replace(request, pictures=pictures) if pictures else request


def pack_delta(delta: Delta) -> bytes:
    return msgspec.msgpack.encode(delta)


def unpack_delta(packed: bytes) -> Delta:
    """Raises LinkError where it is none."""
    try:
        return _deltas.decode(packed)
    except (ValueError, RecursionError) as error:
        raise LinkError(
            f"a piece of an answer cannot be read: {error}", hint="run one release on all nodes"
        ) from error
