"""Pictures of sessions: what they do to rows, and what is refused before anything changes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import pytest

from shardcompute.backends.executor import PictureNetwork
from shardcompute.backends.host.pictures import SessionPictures
from shardcompute.core.batch import Segment
from shardcompute.core.errors import UnsupportedModelError, UsageError
from shardcompute.core.pictures import PictureSpan

FIRST, SECOND = PictureSpan(2, 6, (1, 4, 6)), PictureSpan(10, 4, (1, 4, 4))


@dataclass
class Sight:
    """As much of a `PictureNetwork` as sessions ask for."""

    is_bidirectional: bool = False
    has_axes: bool = False
    merge: int = 2

    def check(self, span: PictureSpan, patches: bytes | None) -> None:
        if patches == b"wrong":
            raise UsageError("not of this model")


def _pictures(*, is_first: bool = True, scale: float = 1.0, **sight: Any) -> SessionPictures:
    def encode(span: PictureSpan, patches: bytes) -> Any:
        rows = np.arange(span.count, dtype=np.float32)[:, None] + np.float32(patches[0])
        return np.repeat(rows, 3, axis=1)

    network = cast(PictureNetwork, Sight(**sight))
    return SessionPictures(network, encode if is_first else None, max_rows=16, context_length=40, scale=scale)


def test_rows_of_pictures_are_found_in_a_ragged_step() -> None:
    pictures = _pictures()
    pictures.open(7, [FIRST, SECOND], [b"\x0a", b"\x14"])
    segments = [Segment(1, 0, 3), Segment(7, 4, 8)]
    found = [(place, rows[:, 0].tolist()) for place, rows in pictures.rows(segments)]
    assert found == [(slice(3, 7), [12, 13, 14, 15]), (slice(9, 11), [20, 21])]
    assert pictures.are_in(segments)
    assert not pictures.are_in(segments[:1])
    pictures.forget(7)
    assert not list(pictures.rows(segments))


def test_the_same_picture_is_encoded_once() -> None:
    pictures, seen = _pictures(), []
    encode = pictures._encode
    assert encode is not None
    pictures._encode = lambda span, patches: seen.append(patches) or encode(span, patches)  # type: ignore[func-returns-value]
    assert pictures.needs_encoding([FIRST], [b"\x0a"])
    pictures.encode([FIRST, SECOND], [b"\x0a", b""])
    assert not pictures.needs_encoding([FIRST], [b"\x0a"])
    assert pictures.needs_encoding([FIRST], [b"\x0b"])
    assert pictures.needs_encoding([SECOND], [b"\x0a"]), "of another shape"
    assert not pictures.needs_encoding([FIRST], [b""])
    pictures.open(7, [FIRST], [b"\x0a"])
    pictures.open(8, [PictureSpan(0, 6, (1, 4, 6))], [b"\x0a"])
    assert seen == [b"\x0a"]
    assert next(pictures.rows([Segment(8, 0, 6)]))[1][0, 0] == 10
    with pytest.raises(UsageError):
        pictures.encode([FIRST], [b"wrong"])
    assert not _pictures(is_first=False).needs_encoding([FIRST], [b"\x0a"])


def test_encoded_pictures_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardcompute.backends.host.pictures.ENCODED_BYTES", 3 * FIRST.count * 3 * 4)
    pictures = _pictures()
    for shade in range(5):
        pictures.open(shade, [FIRST], [bytes([shade])])
    assert [pictures.needs_encoding([FIRST], [bytes([shade])]) for shade in range(5)] == [True] * 2 + [
        False
    ] * 3
    spans = [PictureSpan(start, 6, (1, 4, 6)) for start in range(0, 36, 6)]
    many = [bytes([10 + i]) for i in range(6)]
    pictures.encode(spans, many)
    assert not pictures.needs_encoding(spans, many), "those of one prompt stay together until it is begun"
    pictures.open(20, spans, many)
    pictures.encode([FIRST], [b"\x63"])
    assert pictures.needs_encoding(spans, many)


def test_rows_are_divided_by_what_multiplies_them_later() -> None:
    pictures = _pictures(scale=4.0)
    pictures.open(7, [FIRST], [b"\x04"])
    assert next(pictures.rows([Segment(7, 0, 8)]))[1][:2, 0].tolist() == [1.0, 1.25]


def test_positions_inside_and_behind_pictures() -> None:
    pictures = _pictures(has_axes=True)
    pictures.open(7, [FIRST, SECOND], [b"a", b"b"])
    whole = pictures.positions([Segment(7, 0, 16)])
    # Two rows of three, then two rows of two: as long as the longer edge each.
    assert whole[0].tolist() == [0, 1, 2, 2, 2, 2, 2, 2, 5, 6, 7, 7, 7, 7, 9, 10]
    assert whole[1].tolist() == [0, 1, 2, 2, 2, 3, 3, 3, 5, 6, 7, 7, 8, 8, 9, 10]
    assert whole[2].tolist() == [0, 1, 2, 3, 4, 2, 3, 4, 5, 6, 7, 8, 7, 8, 9, 10]
    for start in range(16):
        for stop in range(start + 1, 17):
            part = pictures.positions([Segment(1, 3, 2), Segment(7, start, stop - start)])
            assert part[:, :2].tolist() == [[3, 4]] * 3
            np.testing.assert_array_equal(part[:, 2:], whole[:, start:stop])


def test_without_axes_positions_are_those_of_text() -> None:
    pictures = _pictures()
    pictures.open(7, [FIRST], [b"a"])
    assert pictures.positions([Segment(7, 1, 4)]).tolist() == [[1, 2, 3, 4]] * 3


def test_rows_of_a_picture_see_all_of_it() -> None:
    pictures = _pictures(is_bidirectional=True)
    pictures.open(7, [FIRST], [b"a"])
    seen = pictures.ends(Segment(7, 0, 10))
    assert seen is not None
    assert seen.tolist() == [1, 2, 8, 8, 8, 8, 8, 8, 9, 10]
    assert pictures.ends(Segment(7, 8, 2)) is None
    assert pictures.ends(Segment(1, 0, 10)) is None
    assert _pictures().ends(Segment(7, 0, 10)) is None


def test_a_step_may_not_end_inside_a_picture_whose_rows_see_each_other() -> None:
    pictures = _pictures(is_bidirectional=True)
    pictures.open(7, [FIRST], [b"a"])
    with pytest.raises(UsageError, match="inside a picture"):
        pictures.check([Segment(7, 0, 5)])
    for fine in (Segment(7, 0, 2), Segment(7, 0, 8), Segment(7, 5, 3), Segment(1, 0, 5)):
        pictures.check([fine])
    _pictures().check([Segment(7, 0, 5)])


def test_rows_of_a_picture_that_was_not_sent_are_refused() -> None:
    pictures = _pictures()
    pictures.open(7, [FIRST, SECOND], [b"", b"b"])
    with pytest.raises(UsageError, match="was not sent"):
        pictures.check([Segment(7, 7, 4)])
    pictures.check([Segment(7, 8, 8)])
    behind = _pictures(is_first=False)
    behind.open(7, [FIRST, SECOND], None)
    behind.check([Segment(7, 0, 16)])


def test_what_cannot_be_opened_leaves_a_session_as_it_was() -> None:
    pictures = _pictures(is_bidirectional=True)
    pictures.open(7, [FIRST], [b"a"])
    wrong: list[tuple[list[PictureSpan], list[bytes]]] = [
        ([FIRST], []),
        ([FIRST, FIRST], [b"a", b"b"]),
        ([FIRST], [b"wrong"]),
        ([PictureSpan(0, 17, (1, 2, 34))], [b"a"]),
        ([PictureSpan(35, 6, (1, 4, 6))], [b"a"]),
    ]
    for spans, patches in wrong:
        with pytest.raises(UsageError):
            pictures.open(7, spans, patches)
    assert len(list(pictures.rows([Segment(7, 0, 8)]))) == 1


def test_a_model_that_does_not_see_says_what_does() -> None:
    blind = SessionPictures(None, None, max_rows=16, context_length=40)
    with pytest.raises(UnsupportedModelError, match="takes no pictures") as refusal:
        blind.open(1, [FIRST], [b"a"])
    assert "Qwen2-VL" in str(refusal.value.hint)
