"""Pictures between drivers and stages: patches to the first, spans to all, and nothing that does not add up."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest

from shardcompute.core.errors import LinkError, UsageError
from shardcompute.core.generation import GenerationRequest, Sampling
from shardcompute.core.pictures import MAX_PICTURES
from shardcompute.core.steps import Frame, Opening, SessionRows
from shardcompute.node.rpc.frames import (
    openings_of,
    patches_of,
    rows_to_compute,
    step_frame,
    without_patches,
)
from shardcompute.node.worker.activation_log import ActivationLog, Chunk
from shardcompute.wire import PictureHeader, StepFrame
from shardcompute.wire.framing import PREFIX_BYTES, pack_frame, unpack_header
from shardcompute.wire.generations import Generate, pack_request, patches_in, unpack_request
from shardcompute.wire.limits import WireLimits, check_message
from support.pictures import picture

SHOWN = (picture(1, 1), picture(6, 2))
LIMITS = WireLimits()


def opening(*pictures: Any, **options: Any) -> Opening:
    return Opening(
        7,
        Sampling(),
        20,
        spans=tuple(each.span for each in pictures),
        patches=tuple(each.patches for each in pictures),
        **options,
    )


def frame_of(*openings: Opening) -> tuple[StepFrame, memoryview]:
    frame = Frame(1, (SessionRows(7, 0, (1, 2)),), openings)
    return step_frame("c", 1, frame), memoryview(b"".join(patches_of(frame.openings)))


def test_the_first_stage_gets_what_the_driver_sent() -> None:
    sent = [opening(*SHOWN), replace(opening(), session=8), replace(opening(SHOWN[0]), session=9)]
    frame, body = frame_of(*sent)
    check_message(frame, len(body), LIMITS)
    packed = b"".join(map(bytes, pack_frame(frame, [body], LIMITS)))
    assert len(packed) > len(body) == 3 * len(SHOWN[0].patches)
    assert openings_of(frame, body) == sent
    assert rows_to_compute(frame) == 2 + 3 * 4


def test_pictures_that_need_no_patches_have_none() -> None:
    shared = replace(opening(*SHOWN), patches=(b"", SHOWN[1].patches))
    frame, body = frame_of(shared)
    check_message(frame, len(body), LIMITS)
    assert openings_of(frame, body) == [shared]
    assert rows_to_compute(frame) == 2 + 4


def test_later_stages_get_spans_alone() -> None:
    frame, _ = frame_of(opening(*SHOWN))
    activations = memoryview(bytes(2 * 4 * 4))
    passed = msgspec.structs.replace(
        frame, opens=[without_patches(each) for each in frame.opens], width=4, codec="exact"
    )
    check_message(passed, len(activations), LIMITS)
    assert openings_of(passed, activations) == [replace(opening(*SHOWN), patches=())]
    assert rows_to_compute(passed) == 2
    with pytest.raises(LinkError, match="bytes of pictures"):
        check_message(msgspec.structs.replace(frame, width=4, codec="exact"), len(activations), LIMITS)


@pytest.mark.parametrize("missing", [1, -1])
def test_a_body_that_is_not_the_pictures_is_refused(missing: int) -> None:
    frame, body = frame_of(opening(*SHOWN))
    with pytest.raises(LinkError, match="instead of"):
        check_message(frame, len(body) - missing, LIMITS)


def test_a_frame_of_too_many_bytes_is_refused() -> None:
    frame, body = frame_of(opening(*SHOWN))
    with pytest.raises(LinkError, match="bytes of pictures"):
        check_message(frame, len(body), replace(LIMITS, max_picture_bytes=len(body) - 1))


def test_too_many_pictures_cannot_be_read() -> None:
    frame, _ = frame_of(opening())
    many = [PictureHeader(i, 1, 1, 1, 1) for i in range(MAX_PICTURES + 1)]
    opened = msgspec.structs.replace(frame.opens[0], pictures=many)
    packed = pack_frame(msgspec.structs.replace(frame, opens=[opened]), [], LIMITS)
    with pytest.raises(LinkError):
        unpack_header(memoryview(b"".join(map(bytes, packed)))[PREFIX_BYTES:], 0, LIMITS)


@pytest.mark.parametrize("start", [17, 19, 40])
def test_pictures_outside_of_the_prompt_are_refused(start: int) -> None:
    frame, body = frame_of(opening(picture(start)))
    with pytest.raises(UsageError, match="outside of its prompt"):
        openings_of(frame, body)


def test_what_a_stage_has_passed_on_is_kept_without_patches_and_replayed_whole() -> None:
    log = ActivationLog(1 << 20)
    rows = np.zeros((20, 6), dtype=np.uint8)
    log.append([SessionRows(7, 0, tuple(range(20)))], [opening(*SHOWN)], Chunk("int8", 4, rows))
    told = list(log.replay(4))
    first = told[0][1]
    assert first is not None
    assert first.patches == ()
    assert first.spans == tuple(each.span for each in SHOWN)
    assert [work.start for work, _, _ in told] == [0, 1, 5, 6, 10, 14, 18]
    assert [len(work.ids) for work, _, _ in told] == [1, 4, 1, 4, 4, 4, 2]


def test_a_request_with_pictures_travels_to_a_hosted_driver() -> None:
    request = GenerationRequest(tuple(range(20)), 5, pictures=SHOWN)
    patches = patches_in(request)
    message = Generate(1, "c", pack_request(request), list(map(len, patches)))
    body = memoryview(b"".join(patches))
    check_message(message, len(body), LIMITS)
    assert unpack_request(message, body) == request
    assert len(message.request) < 1000
    with pytest.raises(LinkError, match="announced"):
        check_message(message, len(body) - 1, LIMITS)
    with pytest.raises(LinkError, match="bytes of pictures"):
        check_message(message, len(body), replace(LIMITS, max_picture_bytes=10))
    with pytest.raises(LinkError, match="cannot be read"):
        unpack_request(msgspec.structs.replace(message, patch_sizes=[len(body)]), body)
