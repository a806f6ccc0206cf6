"""Frames on a stream of bytes: a fixed prefix, a MessagePack header, a raw body.

    offset  0  3 bytes   magic "SCw"
            3  u8        version of this layout
            4  u32       length of the header, little-endian as all numbers
            8  u64       length of the body
           16            header, then body

No I/O happens here. `pack_frame` gives the parts to send; `FrameReader` says where received bytes should go
and turns them into messages. A length is believed only after it was checked against `WireLimits`, and a body
is allocated only after its header was read and agrees with its length. Whatever bytes come, nothing but
`LinkError` is raised.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import TypeAlias

import msgspec

from shardcompute.core.errors import LinkError
from shardcompute.wire.limits import WireLimits, check_message, check_sizes
from shardcompute.wire.messages import Message

MAGIC = b"SCw"
LAYOUT_VERSION = 1
_PREFIX = struct.Struct("<3sBIQ")
PREFIX_BYTES = _PREFIX.size
_STAGING_BYTES = 1 << 16

Part: TypeAlias = bytes | bytearray | memoryview
Body: TypeAlias = Sequence[Part]

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


def pack_frame(message: Message, body: Body, limits: WireLimits) -> list[Part]:
    """The parts of a frame: prefix and header as one, then the body's own buffers, not copied.

    Raises `LinkError` for what the other side would have to refuse.
    """
    header = _encode(message)
    parts: list[Part] = [memoryview(part).cast("B") for part in body if memoryview(part).nbytes]
    body_bytes = sum(len(part) for part in parts)
    check_sizes(len(header), body_bytes, limits)
    check_message(message, body_bytes, limits)
    return [_PREFIX.pack(MAGIC, LAYOUT_VERSION, len(header), body_bytes) + header, *parts]


def unpack_prefix(prefix: Part, limits: WireLimits) -> tuple[int, int]:
    """The lengths of header and body, or `LinkError` where this is no acceptable frame of ours."""
    if len(prefix) != PREFIX_BYTES:
        raise LinkError(f"a frame's prefix has {PREFIX_BYTES} bytes, not {len(prefix)}")
    magic, version, header_bytes, body_bytes = _PREFIX.unpack(prefix)
    if magic != MAGIC:
        raise LinkError(
            f"the peer sends something that is no frame (it starts with {bytes(prefix[:4])!r})",
            hint="check that the address is a ShardCompute node's and that both sides use TLS or neither",
        )
    if version != LAYOUT_VERSION:
        raise LinkError(
            f"the peer sends frames of layout {version}, this release reads {LAYOUT_VERSION}",
            hint="run the same release on every node",
        )
    check_sizes(header_bytes, body_bytes, limits)
    return header_bytes, body_bytes


def unpack_header(header: Part, body_bytes: int, limits: WireLimits) -> Message:
    """The message, whose counts agree with each other and with the length of the body."""
    try:
        message = _decoder.decode(header)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise LinkError(
            f"the peer sent a message that cannot be read: {error}", hint="run the same release on every node"
        ) from error
    check_message(message, body_bytes, limits)
    return message


class FrameReader:
    """Turns a stream into frames. Put bytes into `space()`, tell `advance()`, ask `next_frame()` until None.

    Small frames arrive in a staging buffer, with one read for several of them; what is missing of a larger
    body is read straight into its own memory. A body belongs to whoever receives it and is never reused.
    After an error the stream is out of step and the reader of no more use.
    """

    def __init__(self, limits: WireLimits) -> None:
        self.limits = limits
        self.frame_bytes = 0
        """The size of the frame that `next_frame` gave last."""
        self._staging = bytearray(_STAGING_BYTES)
        self._start = 0
        self._stop = 0
        self._lengths: tuple[int, int] | None = None
        self._message: Message | None = None
        self._body = bytearray()
        self._filled = 0

    @property
    def is_inside_frame(self) -> bool:
        """True between the first byte of a frame and its last."""
        return self._stop > self._start or self._lengths is not None

    @property
    def announced_bytes(self) -> int:
        """The size of the frame at hand, as far as it has said."""
        return PREFIX_BYTES + sum(self._lengths or ())

    def release(self) -> bytes:
        """What has come of the stream after the last frame, for whoever reads on in another way."""
        if self._lengths is not None:
            raise LinkError("a stream cannot be left in the middle of a frame")
        left = bytes(self._staging[self._start : self._stop])
        self._start = self._stop = 0
        return left

    def space(self) -> memoryview:
        """Where the next bytes of the stream belong; never empty once `next_frame` returned None."""
        if self._message is not None:
            return memoryview(self._body)[self._filled :]
        if self._start == self._stop:
            self._start = self._stop = 0
        wanted = PREFIX_BYTES if self._lengths is None else self._lengths[0]
        if len(self._staging) - self._start < wanted:
            held = self._staging[self._start : self._stop]
            self._staging = bytearray(max(_STAGING_BYTES, wanted))
            self._staging[: len(held)] = held
            self._start, self._stop = 0, len(held)
        return memoryview(self._staging)[self._stop :]

    def advance(self, count: int) -> None:
        """`count` bytes were written to the beginning of `space()`."""
        if self._message is not None:
            self._filled += count
        else:
            self._stop += count

    def next_frame(self) -> tuple[Message, memoryview] | None:
        """The next whole frame, or None if more bytes are needed."""
        if self._message is None and not self._begin_body():
            return None
        if self._message is None or self._filled < len(self._body):
            return None
        message, body = self._message, memoryview(self._body)
        self.frame_bytes = self.announced_bytes
        self._message, self._lengths, self._body, self._filled = None, None, bytearray(), 0
        return message, body

    def _begin_body(self) -> bool:
        """Read prefix and header if they are there, make room for the body, move in what has come of it."""
        if self._lengths is None:
            if self._stop - self._start < PREFIX_BYTES:
                return False
            self._lengths = unpack_prefix(self._take(PREFIX_BYTES), self.limits)
        header_bytes, body_bytes = self._lengths
        if self._stop - self._start < header_bytes:
            return False
        self._message = unpack_header(self._take(header_bytes), body_bytes, self.limits)
        self._body = bytearray(body_bytes)
        self._filled = min(body_bytes, self._stop - self._start)
        self._body[: self._filled] = self._take(self._filled)
        return True

    def _take(self, count: int) -> memoryview:
        self._start += count
        return memoryview(self._staging)[self._start - count : self._start]


def _encode(message: Message) -> bytes:
    try:
        return _encoder.encode(message)
    except (msgspec.MsgspecError, ValueError, TypeError, OverflowError) as error:
        raise LinkError(
            f"{type(message).__name__} cannot be sent: {error}", hint="numbers must fit 64 bits"
        ) from error
