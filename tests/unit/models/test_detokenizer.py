"""Streams of tokens become text without half characters."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from shardcompute.models.detokenizer import StreamingDetokenizer


class Vocabulary:
    """Tokens with the given bytes; the last one is special."""

    def __init__(self, *tokens: bytes) -> None:
        self.tokens = tokens
        self.special_ids = frozenset({len(tokens) - 1})

    def token_bytes(self, token_id: int) -> bytes:
        return self.tokens[token_id]


def stream(*tokens: bytes, ids: Sequence[int] | None = None, skip_special: bool = True) -> list[str]:
    detokenizer = StreamingDetokenizer(Vocabulary(*tokens, b"<end>"), skip_special=skip_special)
    pushed = [detokenizer.push(i) for i in (range(len(tokens)) if ids is None else ids)]
    return [*pushed, detokenizer.finish()]


def test_a_character_appears_with_its_last_byte() -> None:
    smile = "😀".encode()
    assert stream(b"a", smile[:1], smile[1:3], smile[3:] + b"b") == ["a", "", "", "😀b", ""]


def test_an_unfinished_character_becomes_a_replacement_at_the_end_only() -> None:
    assert stream("é".encode()[:1]) == ["", "\ufffd"]


@pytest.mark.parametrize("invalid", [b"\xff", b"\x80", b"\xc0", b"\xf8"])
def test_bytes_that_can_never_be_a_character_are_replaced_at_once(invalid: bytes) -> None:
    assert stream(invalid + b"a") == ["\ufffda", ""]


def test_a_broken_character_is_replaced_when_the_next_token_shows_it() -> None:
    assert stream("é".encode()[:1], b"a") == ["", "\ufffda", ""]


def test_the_space_that_begins_a_word_is_kept() -> None:
    assert stream(b" Hello", b" there") == [" Hello", " there", ""]


def test_special_tokens_are_left_out_unless_asked_for() -> None:
    assert stream(b"a", ids=[0, 1, 0]) == ["a", "", "a", ""]
    assert stream(b"a", ids=[0, 1, 0], skip_special=False) == ["a", "<end>", "a", ""]


def test_a_special_token_does_not_cut_a_character() -> None:
    first, last = "é".encode()[:1], "é".encode()[1:]
    assert stream(first, last, ids=[0, 2, 1]) == ["", "", "é", ""]


def test_a_finished_stream_starts_afresh() -> None:
    detokenizer = StreamingDetokenizer(Vocabulary("é".encode()[:1], b"a", b"<end>"))
    assert detokenizer.push(0) + detokenizer.finish() == "\ufffd"
    assert detokenizer.push(1) + detokenizer.finish() == "a"
