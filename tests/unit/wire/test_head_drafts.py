"""Drafts of the last stage on the wire: they arrive as they were sent, and within bounds."""

from __future__ import annotations

import msgspec
import pytest

from shardcompute.core.errors import LinkError
from shardcompute.core.steps import Draft, SessionRows
from shardcompute.node.rpc.frames import head_drafts_of, segment_of, step_result, work_of
from shardcompute.wire import HeadDraftIds, SegmentHeader, StepFrame, StepResult, pack_ids
from shardcompute.wire.limits import WireLimits, check_message

LIMITS = WireLimits(max_segments=2, max_rows=8)


def frame(tokens: int) -> StepFrame:
    header = SegmentHeader(1, 4, 3, 2, pack_ids([5, 6, 7]), head_draft_tokens=tokens)
    return StepFrame(chain="c", epoch=1, sequence=1, segments=[header], rows=3, width=0, codec="")


def result(*drafts: HeadDraftIds) -> StepResult:
    return StepResult("c", 1, 1, [], head_drafts=list(drafts))


@pytest.mark.parametrize(
    "work",
    [
        SessionRows(1, 4, (5,), 1, head_draft_tokens=6),
        SessionRows(1, 4, (5, 8, 9), 3),
        SessionRows(1, 0, (1, 2), 1, (3,)),
        SessionRows(2, 0, (1, 2)),
    ],
)
def test_work_survives_the_way(work: SessionRows) -> None:
    packed = msgspec.msgpack.encode(segment_of(work))
    assert work_of(msgspec.msgpack.decode(packed, type=SegmentHeader)) == work


def test_the_driver_learns_what_was_drafted() -> None:
    drafts = [Draft(1, 5, (8, 9), 2), Draft(2, 1, (3,), 0)]
    packed = msgspec.msgpack.encode(step_result(frame(2), [], drafts, []))
    assert head_drafts_of(msgspec.msgpack.decode(packed, type=StepResult)) == drafts


def test_drafts_within_bounds_pass() -> None:
    check_message(frame(8), 0, LIMITS)
    check_message(result(HeadDraftIds(1, 5, pack_ids(range(8)))), 0, LIMITS)


@pytest.mark.parametrize(
    ("sent", "says"),
    [
        (frame(9), "9 tokens to draft is over the limit of 8"),
        (frame((1 << 31) - 1), "over the limit of 8"),
        (result(HeadDraftIds(1, 5, pack_ids(range(9)))), "36 bytes of drafts"),
        (result(*[HeadDraftIds(1, 5, b"")] * 3), "3 sessions with drafts"),
    ],
)
def test_drafts_out_of_bounds_are_refused(sent: StepFrame | StepResult, says: str) -> None:
    with pytest.raises(LinkError, match=says):
        check_message(sent, 0, LIMITS)
