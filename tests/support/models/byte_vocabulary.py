"""A vocabulary of all bytes, a few longer tokens and an end: any text can be said in many ways."""

from __future__ import annotations

from shardcompute.models.vocabulary import Vocabulary

_WORDS = (b'{"', b'":', b'", "', b"name", b"\xc3\xa9", b"true", b"</s>")
EOS = 256 + len(_WORDS) - 1
BYTES = Vocabulary((*(bytes([value]) for value in range(256)), *_WORDS), frozenset({EOS}), frozenset({EOS}))


def text_of(tokens: list[int]) -> bytes:
    return b"".join(BYTES.tokens[token] for token in tokens if token != EOS)
