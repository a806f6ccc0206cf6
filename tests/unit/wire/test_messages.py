from __future__ import annotations

import msgspec
import numpy as np
import pytest

from shardcompute.core.batch import Segment
from shardcompute.core.errors import LinkError
from shardcompute.core.generation import Sampling
from shardcompute.wire.messages import (
    Message,
    Ping,
    SegmentHeader,
    SessionOpen,
    StepFrame,
    Welcome,
    open_session,
    pack_ids,
    unpack_ids,
)


def test_sampling_survives_the_journey_to_the_tail() -> None:
    sampling = Sampling(
        temperature=0.7,
        top_k=5,
        top_p=0.9,
        min_p=0.1,
        repetition_penalty=1.1,
        presence_penalty=0.2,
        frequency_penalty=0.3,
        logit_bias={7: -3.5},
        seed=(1 << 64) - 1,
        logprobs=4,
    )
    opened = open_session(3, sampling, prompt_length=12, prompt_logprobs=2)
    received = msgspec.msgpack.decode(msgspec.msgpack.encode(opened), type=SessionOpen)
    assert received.sampling() == sampling
    assert (received.session, received.prompt_length, received.prompt_logprobs) == (3, 12, 2)


def test_ids_are_little_endian_int32() -> None:
    assert pack_ids([1, 49151]) == b"\x01\0\0\0\xff\xbf\0\0"
    assert unpack_ids(pack_ids(np.array([5, 6]))).tolist() == [5, 6]
    assert unpack_ids(b"").tolist() == []


@pytest.mark.parametrize("packed", [b"\x01\0\0", pack_ids([4, -1])])
def test_impossible_ids_are_refused(packed: bytes) -> None:
    with pytest.raises(LinkError):
        unpack_ids(packed)


def test_a_segment_header_names_its_segment() -> None:
    assert SegmentHeader(9, 4, 2, 1, pack_ids([1, 2])).segment() == Segment(9, 4, 2, 1)


def test_an_older_reader_skips_fields_it_does_not_know() -> None:
    newer = msgspec.msgpack.encode([2, 1, "node", {"a later": "field"}])
    assert msgspec.msgpack.decode(newer, type=Message) == Welcome(1, "node")


def test_a_newer_reader_fills_in_fields_that_an_older_one_did_not_send() -> None:
    older = msgspec.msgpack.encode([9, "chain", 1, 2, [], 1, 0, ""])
    frame = msgspec.msgpack.decode(older, type=Message)
    assert isinstance(frame, StepFrame)
    assert (frame.replay, frame.opens, frame.timings) == (False, [], [])


def test_numbers_stay_what_they_are() -> None:
    # Numbers of messages and places of fields are the protocol: changing them needs a new version.
    assert msgspec.msgpack.encode(Ping(7, 0.0)) == b"\x93\x05\x07\xcb" + b"\0" * 8
