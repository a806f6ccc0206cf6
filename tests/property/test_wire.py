"""The wire: what goes in comes out, and whatever else comes in raises nothing but `LinkError`."""

from __future__ import annotations

import contextlib
from itertools import pairwise
from typing import Any

import msgspec
from hypothesis import example, given, settings
from hypothesis import strategies as st

from shardcompute.core.errors import LinkError
from shardcompute.wire import messages as wire
from shardcompute.wire.codecs import CODECS, find_codec
from shardcompute.wire.framing import PREFIX_BYTES, FrameReader, pack_frame, unpack_header
from shardcompute.wire.limits import WireLimits
from shardcompute.wire.messages import Message, pack_ids, unpack_ids

LIMITS = WireLimits(max_header_bytes=1 << 16, max_body_bytes=1 << 16)
NUMBER = st.integers(0, (1 << 63) - 1)
POSITION = st.integers(0, (1 << 31) - 1)
FLOAT = st.floats(allow_nan=False)
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
IDS = st.lists(POSITION, min_size=1, max_size=5)


def some(strategy: st.SearchStrategy[Any]) -> st.SearchStrategy[list[Any]]:
    return st.lists(strategy, max_size=4)


OPENS = st.builds(
    wire.SessionOpen,
    NUMBER,
    POSITION,
    st.none() | POSITION,
    FLOAT,
    st.integers(-5, 500),
    *[FLOAT] * 5,
    st.dictionaries(POSITION, FLOAT, max_size=3),
    st.integers(-(1 << 63), (1 << 64) - 1),
    st.none() | POSITION,
)
TIMINGS = st.builds(wire.StageTiming, TEXT, FLOAT, FLOAT, FLOAT, NUMBER)
ROWS = st.builds(
    wire.RowResult, NUMBER, POSITION, POSITION, st.none() | FLOAT, some(st.tuples(POSITION, FLOAT))
)
OTHERS = st.one_of(
    st.builds(wire.Hello, NUMBER, NUMBER, TEXT, TEXT, TEXT),
    st.builds(wire.Welcome, NUMBER, TEXT),
    st.builds(wire.Refused, TEXT),
    st.builds(wire.Goodbye, TEXT),
    st.builds(wire.Ping, NUMBER, FLOAT),
    st.builds(wire.Pong, NUMBER, FLOAT),
    st.builds(wire.Credit, st.integers(1, 1000)),
    st.builds(wire.Fence, TEXT, NUMBER),
    st.builds(wire.SessionClose, TEXT, some(NUMBER)),
    st.builds(wire.StepResult, TEXT, NUMBER, NUMBER, some(ROWS), some(ROWS), some(TIMINGS)),
    st.builds(wire.StepFailed, TEXT, NUMBER, NUMBER, some(NUMBER), TEXT, TEXT),
    st.builds(wire.KvOffer, TEXT, NUMBER, POSITION, POSITION, TEXT),
    st.builds(wire.KvEnded, some(NUMBER)),
    st.builds(wire.KvSealed, st.dictionaries(NUMBER, st.integers(1, 1000), max_size=3)),
)


@st.composite
def segments(draw: st.DrawFn) -> wire.SegmentHeader:
    ids = draw(IDS)
    logit_rows = draw(st.integers(0, len(ids)))
    return wire.SegmentHeader(draw(NUMBER), draw(POSITION), len(ids), logit_rows, pack_ids(ids))


@st.composite
def frames(draw: st.DrawFn) -> tuple[Message, bytes]:
    parts = draw(st.lists(segments(), min_size=1, max_size=4))
    rows = sum(segment.count for segment in parts)
    width = draw(st.integers(0, 5))
    codec = draw(st.sampled_from(sorted(CODECS))) if width else ""
    body_bytes = find_codec(codec).body_bytes(rows, width) if width else 0
    frame = wire.StepFrame(
        draw(TEXT),
        draw(NUMBER),
        draw(NUMBER),
        parts,
        rows,
        width,
        codec,
        draw(st.booleans()),
        draw(some(OPENS)),
        draw(some(TIMINGS)),
    )
    return frame, draw(st.binary(min_size=body_bytes, max_size=body_bytes))


ANYTHING = st.one_of(frames(), st.tuples(OTHERS, st.just(b"")))


def read_all(content: bytes, cuts: list[int]) -> list[tuple[Message, bytes]]:
    """The frames of a stream that arrives in pieces, cut at these places."""
    reader, received = FrameReader(LIMITS), []
    places = sorted({0, len(content), *(cut % (len(content) + 1) for cut in cuts)})
    for start, stop in pairwise(places):
        while start < stop:
            space = reader.space()
            count = min(len(space), stop - start)
            assert count > 0
            space[:count] = content[start : start + count]
            reader.advance(count)
            start += count
            while (frame := reader.next_frame()) is not None:
                received.append((frame[0], bytes(frame[1])))
    return received


def pack(message: Message, body: bytes) -> bytes:
    return b"".join(pack_frame(message, [body], LIMITS))


@settings(max_examples=150, deadline=None)
@given(st.lists(ANYTHING, min_size=1, max_size=4), st.lists(st.integers(0, 5000), max_size=8))
def test_frames_come_out_as_they_went_in_however_the_stream_is_cut(
    sent: list[tuple[Message, bytes]], cuts: list[int]
) -> None:
    content = b"".join(pack(message, body) for message, body in sent)
    assert read_all(content, cuts) == sent


@settings(max_examples=100, deadline=None)
@given(ANYTHING, st.integers(0, 1 << 20))
def test_a_frame_cut_short_is_never_a_frame(sent: tuple[Message, bytes], cut: int) -> None:
    content = pack(*sent)
    assert read_all(content[: cut % len(content)], []) == []


@settings(max_examples=300, deadline=None)
@given(ANYTHING, st.lists(st.tuples(st.integers(0, 1 << 20), st.integers(0, 255)), min_size=1, max_size=4))
def test_damaged_frames_raise_nothing_else(
    sent: tuple[Message, bytes], damage: list[tuple[int, int]]
) -> None:
    content = bytearray(pack(*sent))
    for place, value in damage:
        content[place % len(content)] = value
    with contextlib.suppress(LinkError):
        read_all(bytes(content), [])


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=200), st.booleans())
@example(b"\x91" * 60_000, True)
@example(b"\x9b\x09\xa1c\x00\x00\xdd\xff\xff\xff\xff", True)
def test_any_bytes_raise_nothing_else(content: bytes, is_header: bool) -> None:
    if is_header:
        content = b"SCw\x01" + len(content).to_bytes(4, "little") + bytes(8) + content
    with contextlib.suppress(LinkError):
        read_all(content, [])


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 64) - 1) | st.floats() | TEXT | st.binary(),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.integers(0, 9) | TEXT, inner, max_size=3),
    max_leaves=20,
)


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 14), st.lists(VALUES, max_size=11), st.integers(0, 1 << 62))
def test_any_values_in_a_message_raise_nothing_else(tag: int, fields: list[Any], body_bytes: int) -> None:
    header = msgspec.msgpack.encode([tag, *fields])
    with contextlib.suppress(LinkError):
        unpack_header(header, body_bytes, LIMITS)


@given(st.binary(max_size=PREFIX_BYTES * 2))
def test_any_bytes_as_ids(packed: bytes) -> None:
    try:
        ids = unpack_ids(packed)
    except LinkError:
        return
    assert pack_ids(ids) == packed
    assert (ids >= 0).all()
