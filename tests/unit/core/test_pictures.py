"""Pictures of a prompt: where steps may end, and spans that cannot be."""

from __future__ import annotations

import pytest

from shardcompute.core.errors import UsageError
from shardcompute.core.pictures import (
    MAX_GRID,
    MAX_PICTURES,
    PictureSpan,
    check_spans,
    digest_of,
    is_cut,
    step_stop,
)

SPANS = (PictureSpan(4, 6, (1, 4, 6)), PictureSpan(12, 3, (1, 2, 6)))


@pytest.mark.parametrize(
    ("start", "stop", "expected"),
    [
        (0, 4, 4),
        (0, 7, 4),
        (4, 7, 10),
        (0, 10, 10),
        (0, 11, 11),
        (10, 13, 12),
        (12, 13, 15),
        (6, 8, 10),
        (15, 20, 20),
    ],
)
def test_a_step_ends_before_a_picture_or_behind_it(start: int, stop: int, expected: int) -> None:
    assert step_stop(SPANS, start, stop) == expected
    assert not is_cut(SPANS, step_stop(SPANS, start, stop))


def test_without_pictures_steps_end_anywhere() -> None:
    assert [step_stop((), 0, stop) for stop in (1, 5)] == [1, 5]


def test_steps_of_any_size_go_through_a_prompt() -> None:
    for size in range(1, 20):
        start = 0
        while start < 20:
            stop = step_stop(SPANS, start, min(20, start + size))
            assert stop > start
            start = stop


@pytest.mark.parametrize(
    ("spans", "length", "reason"),
    [
        ([PictureSpan(-1, 2, (1, 1, 2))], 9, "outside"),
        ([PictureSpan(8, 2, (1, 1, 2))], 9, "outside"),
        ([PictureSpan(0, 0, (1, 1, 1))], 9, "outside"),
        ([PictureSpan(0, 3, (1, 1, 3)), PictureSpan(2, 2, (1, 1, 2))], 9, "overlaps"),
        ([PictureSpan(0, 1, (1, 0, 1))], 9, "too large"),
        ([PictureSpan(0, 1, (1, MAX_GRID + 1, 1))], 9, "too large"),
        ([PictureSpan(0, 1, (1, MAX_GRID, MAX_GRID))], 9, "too large"),
        ([PictureSpan(i, 1, (1, 1, 1)) for i in range(MAX_PICTURES + 1)], 999, "at most"),
    ],
)
def test_spans_that_cannot_be_are_refused(spans: list[PictureSpan], length: int, reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        check_spans(spans, length)


def test_a_digest_tells_pictures_apart() -> None:
    same = digest_of((1, 2, 2), b"abcd"), digest_of((1, 2, 2), b"abcd")
    assert len(set(same)) == 1
    assert len({same[0], digest_of((1, 1, 4), b"abcd"), digest_of((1, 2, 2), b"abce")}) == 3
