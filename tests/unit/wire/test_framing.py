from __future__ import annotations

import struct
import tracemalloc

import pytest

from shardcompute.core.errors import LinkError
from shardcompute.wire.control import Register
from shardcompute.wire.framing import PREFIX_BYTES, FrameReader, pack_frame, unpack_header, unpack_prefix
from shardcompute.wire.limits import WireLimits
from shardcompute.wire.messages import Goodbye, Message, Ping, SegmentHeader, StepFrame, pack_ids

LIMITS = WireLimits()


def feed(reader: FrameReader, content: bytes) -> list[tuple[Message, bytes]]:
    frames: list[tuple[Message, bytes]] = []
    while True:
        while (frame := reader.next_frame()) is not None:
            frames.append((frame[0], bytes(frame[1])))
        if not content:
            return frames
        space = reader.space()
        count = min(len(space), len(content))
        space[:count] = content[:count]
        reader.advance(count)
        content = content[count:]


def frame_of(rows: int, width: int) -> StepFrame:
    return StepFrame("c", 1, 1, [SegmentHeader(1, 0, rows, 1, pack_ids(range(rows)))], rows, width, "exact")


def test_the_prefix_has_the_written_layout() -> None:
    (frame,) = pack_frame(Ping(7, 0.0), (), LIMITS)
    assert bytes(frame[:PREFIX_BYTES]) == b"SCw\x01" + struct.pack("<IQ", len(frame) - PREFIX_BYTES, 0)


def test_a_body_is_neither_copied_nor_joined() -> None:
    body = bytearray(4 * 6)
    parts = pack_frame(frame_of(2, 3), [memoryview(body)[:8], b"", memoryview(body)[8:].cast("i")], LIMITS)
    assert [len(part) for part in parts[1:]] == [8, 16]
    body[0] = 9
    assert parts[1][0] == 9


def test_several_frames_in_one_read() -> None:
    body = bytes(range(24))
    content = b"".join(
        b"".join(pack_frame(message, parts, LIMITS))
        for message, parts in [(Ping(1, 0.0), ()), (frame_of(2, 3), [body]), (Goodbye("so long"), ())]
    )
    assert feed(FrameReader(LIMITS), content) == [
        (Ping(1, 0.0), b""),
        (frame_of(2, 3), body),
        (Goodbye("so long"), b""),
    ]


def test_a_large_body_is_read_straight_into_its_memory() -> None:
    message, body = frame_of(1, 1 << 16), bytes(1 << 18)
    head = bytes(pack_frame(message, [body], LIMITS)[0])
    reader = FrameReader(LIMITS)
    assert feed(reader, head) == []
    assert reader.is_inside_frame
    assert reader.announced_bytes == len(head) + len(body)
    assert len(reader.space()) == len(body)
    assert feed(reader, body) == [(message, body)]
    assert not reader.is_inside_frame
    assert reader.frame_bytes == len(head) + len(body)


def test_a_header_larger_than_the_staging_buffer() -> None:
    message = Register(b"x" * 200_000)
    content = b"".join(pack_frame(message, (), LIMITS))
    assert feed(FrameReader(LIMITS), content * 2) == [(message, b"")] * 2


def test_a_body_is_the_receivers_own() -> None:
    content = b"".join(pack_frame(frame_of(1, 1), [b"abcd"], LIMITS))
    reader = FrameReader(LIMITS)
    reader.space()[: len(content)] = content
    reader.advance(len(content))
    first = reader.next_frame()
    assert first is not None
    feed(reader, b"".join(pack_frame(frame_of(1, 1), [b"wxyz"], LIMITS)))
    assert bytes(first[1]) == b"abcd"
    first[1][0] = 0


@pytest.mark.parametrize(
    ("prefix", "says"),
    [
        (b"GET / HTTP/1.1\r\n", "no frame"),
        (struct.pack("<3sBIQ", b"SCw", 2, 1, 0), "layout 2"),
        (struct.pack("<3sBIQ", b"SCw", 1, 1 << 31, 0), "header of"),
        (struct.pack("<3sBIQ", b"SCw", 1, 1, 1 << 62), "body of"),
        (struct.pack("<3sBIQ", b"SCw", 1, 0, 0), "without a header"),
        (b"SCw\x01", "16 bytes"),
    ],
)
def test_a_wrong_prefix_is_refused(prefix: bytes, says: str) -> None:
    with pytest.raises(LinkError, match=says):
        unpack_prefix(prefix, LIMITS)


def test_a_body_is_not_allocated_before_its_header_agrees() -> None:
    header = bytes(pack_frame(Ping(1, 0.0), (), LIMITS)[0])[PREFIX_BYTES:]
    lie = struct.pack("<3sBIQ", b"SCw", 1, len(header), 200 << 20) + header
    tracemalloc.start()
    try:
        with pytest.raises(LinkError, match="no body"):
            feed(FrameReader(LIMITS), lie)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "header",
    [
        b"\xc1",
        b"\x91" * 100_000,
        b"\x94\x02\x01\xa1n" + b"\x91" * 100_000,
        b"\x93\x05\x07\xa1a",
        b"\x92\x63\x00",
        b"\x92\x03\xa1\xff",
        b"\x93\x05\xff\xca\0\0\0\0",
    ],
    ids=[
        "no MessagePack",
        "deep",
        "deep where skipped",
        "wrong type",
        "unknown number",
        "no text",
        "negative",
    ],
)
def test_a_header_that_cannot_be_read_is_refused(header: bytes) -> None:
    with pytest.raises(LinkError, match="cannot be read"):
        unpack_header(header, 0, LIMITS)


@pytest.mark.parametrize("message", [Goodbye("\ud800"), Ping(1 << 70, 0.0)])
def test_a_message_that_cannot_be_written_is_refused(message: Message) -> None:
    with pytest.raises(LinkError, match="cannot be sent"):
        pack_frame(message, (), LIMITS)


def test_what_the_peer_would_refuse_is_not_sent() -> None:
    with pytest.raises(LinkError, match="instead of 24"):
        pack_frame(frame_of(2, 3), [bytes(23)], LIMITS)
    with pytest.raises(LinkError, match="header of"):
        pack_frame(Goodbye("x" * (LIMITS.max_header_bytes + 1)), (), LIMITS)
