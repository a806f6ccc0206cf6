from __future__ import annotations

from typing import Any

import msgspec
import pytest

from shardcompute.core.errors import LinkError
from shardcompute.core.fields import shorten
from shardcompute.core.generation import Sampling
from shardcompute.wire.control import CommandReply, FetchFailed
from shardcompute.wire.framing import PREFIX_BYTES, pack_frame, unpack_header
from shardcompute.wire.generations import GenerationFailed, HostLoad
from shardcompute.wire.limits import WireLimits, check_message, check_sizes
from shardcompute.wire.messages import (
    Message,
    Ping,
    Refused,
    RowResult,
    SegmentHeader,
    SessionClose,
    StageTiming,
    StepFailed,
    StepFrame,
    StepResult,
    open_session,
    pack_ids,
)

LIMITS = WireLimits(max_header_bytes=100, max_body_bytes=64, max_segments=2, max_rows=4, max_ids=3)


def make_frame(**changes: Any) -> StepFrame:
    frame = StepFrame(
        chain="c",
        epoch=1,
        sequence=1,
        segments=[
            SegmentHeader(1, 0, 2, 1, pack_ids([5, 6])),
            SegmentHeader(2, 7, 1, 1, pack_ids([8])),
        ],
        rows=3,
        width=4,
        codec="exact",
    )
    return msgspec.structs.replace(frame, **changes)


def test_a_frame_that_adds_up_passes() -> None:
    check_message(make_frame(), 48, LIMITS)
    check_message(make_frame(codec="bf16"), 24, LIMITS)
    check_message(make_frame(width=0, codec=""), 0, LIMITS)


@pytest.mark.parametrize(
    ("frame", "body_bytes", "says"),
    [
        (make_frame(), 47, "body of 47 bytes instead of 48"),
        (make_frame(width=0, codec=""), 4, "instead of 0"),
        (make_frame(rows=2), 32, "segments of 3"),
        (make_frame(rows=5), 80, "over the limit of 4"),
        (make_frame(codec="zip"), 48, "no tensor codec 'zip'"),
        (make_frame(segments=[SegmentHeader(1, 0, 1, 0, pack_ids([1]))] * 3), 48, "3 segments"),
        (make_frame(segments=[SegmentHeader(1, 0, 3, 4, pack_ids([1, 2, 3]))]), 48, "wants the logits of 4"),
        (make_frame(segments=[SegmentHeader(1, 0, 3, 1, pack_ids([1, 2]))]), 48, "8 bytes of token ids"),
        (make_frame(opens=[open_session(i, Sampling(), 1) for i in range(3)]), 48, "3 new sessions"),
        (
            make_frame(opens=[open_session(1, Sampling(logit_bias=dict.fromkeys(range(4), 1.0)), 1)]),
            48,
            "4 biases",
        ),
    ],
)
def test_a_frame_that_does_not_add_up_is_refused(frame: StepFrame, body_bytes: int, says: str) -> None:
    with pytest.raises(LinkError, match=says):
        check_message(frame, body_bytes, LIMITS)


@pytest.mark.parametrize(
    "message",
    [
        StepResult("c", 1, 1, [RowResult(1, 1, 1)] * 5),
        StepResult("c", 1, 1, [], [RowResult(1, 1, 1)] * 5),
        StepResult("c", 1, 1, [RowResult(1, 1, 1, -0.5, [(1, -0.5)] * 4)]),
        SessionClose("c", [1, 2, 3, 4]),
    ],
)
def test_counts_are_limited_in_every_message(message: Message) -> None:
    with pytest.raises(LinkError, match="over the limit"):
        check_message(message, 0, LIMITS)


def test_only_frames_have_bodies() -> None:
    with pytest.raises(LinkError, match="Ping has no body"):
        check_message(Ping(1, 0.0), 1, LIMITS)


@pytest.mark.parametrize("sizes", [(101, 0), (1, 65), (0, 0), (1, 1 << 63)])
def test_sizes_are_limited(sizes: tuple[int, int]) -> None:
    with pytest.raises(LinkError):
        check_sizes(*sizes, LIMITS)
    check_sizes(100, 64, LIMITS)


@pytest.mark.parametrize(
    "message",
    [
        Refused("x" * 2001),
        StepFailed("c", 1, 1, [], "x" * 513, "it failed"),
        StepFailed("c", 1, 1, [], "LinkError", "x" * (4 << 20)),
        StepFailed("x" * 513, 1, 1, [], "LinkError", "it failed"),
        StepResult("c", 1, 1, [], timings=[StageTiming("n")] * 1025),
        StepResult("c", 1, 1, [], timings=[StageTiming("n" * 513)]),
        GenerationFailed(1, "LinkError", "x" * 2001),
        HostLoad("c", 0, 0, 0, 0, {str(number): 0.0 for number in range(257)}),
        CommandReply(1, "x" * 2001),
        FetchFailed(1, "x" * 2001),
    ],
    ids=lambda message: type(message).__name__,
)
def test_texts_and_lists_of_members_are_bounded(message: Message) -> None:
    content = b"".join(pack_frame(message, (), WireLimits()))
    with pytest.raises(LinkError, match="cannot be read"):
        unpack_header(content[PREFIX_BYTES:], 0, WireLimits())


def test_whoever_sends_shortens() -> None:
    assert shorten("plain") == "plain"
    assert shorten("two\nlines\x1b[2J") == "two lines [2J"
    long = shorten("y" * 5_000_000)
    assert (len(long), long[-2:]) == (2000, "y…")
    assert shorten("abcdef", 4) == "abc…"
