"""A session's grammar travels with its opening, within bounds."""

from __future__ import annotations

import random
import zlib

import pytest

from shardcompute.core.errors import LinkError
from shardcompute.core.generation import MAX_GRAMMAR_CHARS, Grammar, Sampling
from shardcompute.wire import WireLimits, open_session
from shardcompute.wire.limits import check_message
from shardcompute.wire.messages import SegmentHeader, SessionOpen, StepFrame, pack_ids


def frame_of(opened: SessionOpen) -> StepFrame:
    segment = SegmentHeader(1, 0, 1, 1, pack_ids([5]))
    return StepFrame("chain", 1, 1, [segment], 1, 0, "", opens=[opened])


@pytest.mark.parametrize("grammar", [None, Grammar("regex", "a|ü"), Grammar("json_schema", "{}" * 9000)])
def test_comes_back_as_it_was(grammar: Grammar | None) -> None:
    opened = open_session(1, Sampling(seed=3, grammar=grammar), 5)
    assert opened.sampling() == Sampling(seed=3, grammar=grammar)
    check_message(frame_of(opened), 0, WireLimits())
    assert len(opened.grammar) < 500


def test_one_that_is_too_long_is_not_carried() -> None:
    text = "".join(chr(random.Random(i).randrange(32, 0xD000)) for i in range(60_000))
    with pytest.raises(LinkError, match="bytes of grammar"):
        check_message(frame_of(open_session(1, Sampling(grammar=Grammar("regex", text)), 5)), 0, WireLimits())


@pytest.mark.parametrize(
    "packed", [b"no zlib", zlib.compress(b"\xff"), zlib.compress(b"x" * (5 * MAX_GRAMMAR_CHARS))]
)
def test_what_is_no_text_or_a_bomb_is_refused(packed: bytes) -> None:
    opened = open_session(1, Sampling(grammar=Grammar("regex", "a")), 5)
    values = {name: getattr(opened, name) for name in opened.__struct_fields__}
    with pytest.raises(LinkError, match="grammar"):
        SessionOpen(**{**values, "grammar": packed}).sampling()
