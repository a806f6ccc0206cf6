"""Vocabularies on their way: nothing is lost, and nothing else is believed."""

from __future__ import annotations

import zlib

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardcompute.core.errors import CorruptModelError
from shardcompute.models.vocabulary import Vocabulary, decode_vocabulary, encode_vocabulary, lazy_vocabulary


@given(st.lists(st.binary(max_size=5), min_size=1, max_size=20), st.data())
def test_comes_back_as_it_was(tokens: list[bytes], data: st.DataObject) -> None:
    ids = st.frozensets(st.integers(0, len(tokens) - 1))
    words = Vocabulary(tuple(tokens), data.draw(ids), data.draw(ids))
    back = decode_vocabulary(encode_vocabulary(words))
    assert (back.tokens, back.special_ids, back.eos_ids) == (words.tokens, words.special_ids, words.eos_ids)
    assert encode_vocabulary(back) == encode_vocabulary(words)


@pytest.mark.parametrize(
    "content",
    [
        [[1, 2], b"abcd", [], []],
        [[-1, 4], b"abc", [], []],
        [[1], b"a", [1], []],
        [[1], b"a", [], [-1]],
        [[1], b"a", []],
        "text",
    ],
)
def test_refuses_what_does_not_add_up(content: object) -> None:
    with pytest.raises(CorruptModelError):
        decode_vocabulary(zlib.compress(msgspec.msgpack.encode(content)))
    with pytest.raises(CorruptModelError):
        lazy_vocabulary(zlib.compress(msgspec.msgpack.encode(content)))


def test_is_made_once_when_it_is_asked_for() -> None:
    words = Vocabulary((b"a", b"b"), frozenset({1}), frozenset({1}))
    vocabulary = lazy_vocabulary(encode_vocabulary(words))
    assert vocabulary().tokens == words.tokens
    assert vocabulary() is vocabulary()


@given(st.binary(max_size=40))
def test_refuses_garbage(content: bytes) -> None:
    with pytest.raises(CorruptModelError):
        decode_vocabulary(content)
