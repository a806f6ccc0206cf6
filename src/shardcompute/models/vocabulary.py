"""A tokenizer's vocabulary alone: the bytes of every token, which of them are special and which end an answer.

That is what grammar masks need, and little enough to travel to the machine at the end of a chain.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from shardcompute.core.errors import CorruptModelError

_MAX_PACKED_BYTES = 256 << 20


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Vocabulary:
    """`tokens[id]` are a token's bytes, none for an id without a token. Compared by identity, as a key of caches."""

    tokens: tuple[bytes, ...]
    special_ids: frozenset[int]
    eos_ids: frozenset[int]


class _PackedVocabulary(msgspec.Struct, array_like=True):
    lengths: list[int]
    content: bytes
    special_ids: list[int]
    eos_ids: list[int]


def encode_vocabulary(vocabulary: Vocabulary) -> bytes:
    """The same bytes for the same vocabulary."""
    packed = _PackedVocabulary(
        [len(token) for token in vocabulary.tokens],
        b"".join(vocabulary.tokens),
        sorted(vocabulary.special_ids),
        sorted(vocabulary.eos_ids),
    )
    return zlib.compress(msgspec.msgpack.encode(packed))


def decode_vocabulary(encoded: bytes | memoryview) -> Vocabulary:
    """`CorruptModelError` for anything that `encode_vocabulary` did not write."""
    packed = _unpack(encoded)
    tokens, at = [], 0
    for length in packed.lengths:
        tokens.append(packed.content[at : at + length])
        at += length
    return Vocabulary(tuple(tokens), frozenset(packed.special_ids), frozenset(packed.eos_ids))


def lazy_vocabulary(encoded: bytes) -> Callable[[], Vocabulary]:
    """Checked now, made when it is first asked for, and then kept: a token is an object of its own, and most stages
    never have a grammar. Raises like `decode_vocabulary`."""
    _unpack(encoded)
    return functools.cache(lambda: decode_vocabulary(encoded))


def _unpack(encoded: bytes | memoryview) -> _PackedVocabulary:
    try:
        unpacker = zlib.decompressobj()
        text = unpacker.decompress(encoded, _MAX_PACKED_BYTES)
        if not unpacker.eof:
            raise _malformed("it is cut short or far too long")
        packed = msgspec.msgpack.decode(text, type=_PackedVocabulary)
    except (zlib.error, msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise _malformed(str(error)) from error
    count = len(packed.lengths)
    if min(packed.lengths, default=0) < 0 or sum(packed.lengths) != len(packed.content):
        raise _malformed("its tokens do not add up")
    if any(not 0 <= token < count for token in (*packed.special_ids, *packed.eos_ids)):
        raise _malformed("it marks tokens that do not exist")
    return packed


def _malformed(fault: str) -> CorruptModelError:
    return CorruptModelError(
        f"a model's vocabulary cannot be read: {fault}", hint="run the same release on every node"
    )
