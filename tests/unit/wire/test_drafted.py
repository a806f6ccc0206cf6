"""Drafts of the first stage on the wire: they arrive as they were sent, and within bounds."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from shardcompute.core.errors import LinkError
from shardcompute.core.steps import Drafted, SessionRows, drafted_in
from shardcompute.node.rpc.frames import drafted_ids, drafted_of, segment_of, work_of
from shardcompute.wire import DraftedIds, SegmentHeader, StepFrame, StepResult, pack_ids
from shardcompute.wire.limits import WireLimits, check_message

LIMITS = WireLimits(max_segments=2, max_rows=8)


def frame(width: int = 0, **segment: Any) -> StepFrame:
    header = msgspec.structs.replace(SegmentHeader(1, 4, 3, 2, pack_ids([5, 6, 7])), **segment)
    return StepFrame(
        chain="c", epoch=1, sequence=1, segments=[header], rows=3, width=width, codec="exact" if width else ""
    )


@pytest.mark.parametrize(
    "work",
    [
        SessionRows(1, 4, (5,), 1, drafts=6),
        SessionRows(1, 4, (5, 8, 9), 3, drafted=2),
        SessionRows(2, 0, (1, 2)),
    ],
)
def test_work_survives_the_way(work: SessionRows) -> None:
    packed = msgspec.msgpack.encode(segment_of(work))
    assert work_of(msgspec.msgpack.decode(packed, type=SegmentHeader)) == work


def test_the_driver_learns_what_was_drafted() -> None:
    work = [SessionRows(1, 4, (5, 8, 9), 3, drafted=2), SessionRows(2, 0, (1, 2), 1)]
    result = StepResult("c", 1, 1, [], drafted=[drafted_ids(each) for each in drafted_in(work)])
    arrived = msgspec.msgpack.decode(msgspec.msgpack.encode(result), type=StepResult)
    assert drafted_of(arrived) == [Drafted(1, 5, (8, 9))]


def test_a_peer_of_an_older_release_drafts_nothing() -> None:
    old = msgspec.msgpack.encode([1, 4, 1, 1, pack_ids([5])])
    assert work_of(msgspec.msgpack.decode(old, type=SegmentHeader)) == SessionRows(1, 4, (5,), 1)


def test_drafts_within_bounds_pass() -> None:
    check_message(frame(drafts=5), 0, LIMITS)
    check_message(frame(width=4, drafted=1), 48, LIMITS)
    check_message(StepResult("c", 1, 1, [], drafted=[DraftedIds(1, 5, pack_ids(range(8)))]), 0, LIMITS)


@pytest.mark.parametrize(
    ("sent", "body_bytes", "says"),
    [
        (frame(drafts=6), 0, "9 rows and drafts is over the limit of 8"),
        (frame(drafts=(1 << 31) - 1), 0, "over the limit of 8"),
        (frame(width=4, drafts=1), 48, "left the first stage"),
        (frame(width=4, drafted=2), 48, "cannot be judged"),
        (StepResult("c", 1, 1, [], drafted=[DraftedIds(1, 5, pack_ids(range(9)))]), 0, "36 bytes of drafts"),
        (StepResult("c", 1, 1, [], drafted=[DraftedIds(1, 5, b"")] * 3), 0, "3 sessions with drafts"),
    ],
)
def test_drafts_out_of_bounds_are_refused(sent: StepFrame | StepResult, body_bytes: int, says: str) -> None:
    with pytest.raises(LinkError, match=says):
        check_message(sent, body_bytes, LIMITS)
