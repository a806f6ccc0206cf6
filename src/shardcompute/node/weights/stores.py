"""Where fetched bytes are put together: on disk or in memory, and who sent what until it is proven right."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterator
from typing import Protocol

from shardcompute.core.errors import LinkError
from shardcompute.node.weights.pieces import Piece, PieceSource
from shardcompute.weights.formats.tensor_file import Span, TensorEntry
from shardcompute.weights.shard_cache import CachedShard

_DIGEST_BYTES = 32

Keep = Callable[[str, int, memoryview], None]
"""Puts bytes of a tensor on disk if it can."""


class Store(Protocol):
    """A tensor, or a range of it, on its way. Several threads may write, each its own part."""

    @property
    def entry(self) -> TensorEntry: ...

    @property
    def span(self) -> Span: ...

    def missing(self) -> list[Span]:
        """What is not there yet."""

    def write(self, start: int, content: memoryview) -> None:
        """Bytes from byte `start` of the tensor on. `SourceError` if they cannot be kept."""

    def read(self, span: Span) -> memoryview | None: ...

    def sha256(self) -> bytes | None:
        """The hash of all of it; None if it is not readable."""

    def discard(self) -> None:
        """What is there is wrong."""

    def confirm(self, digest: bytes) -> None:
        """What is there is right, all of it."""


class CacheStore:
    """A tensor, or a part of it, on disk."""

    def __init__(self, cache: CachedShard, entry: TensorEntry, span: Span) -> None:
        self.entry = entry
        self.span = span
        self._cache = cache

    def missing(self) -> list[Span]:
        return self._cache.missing(self.entry.name, *self.span)

    def write(self, start: int, content: memoryview) -> None:
        self._cache.write(self.entry.name, start, content)

    def read(self, span: Span) -> memoryview | None:
        return self._cache.read(self.entry.name, span[0], span[1] - span[0])

    def sha256(self) -> bytes | None:
        return self._cache.sha256(self.entry.name, self.span)

    def discard(self) -> None:
        self._cache.drop(self.entry.name, self.span)

    def confirm(self, digest: bytes) -> None:
        self._cache.mark_verified(self.entry.name, digest, self.span)


class BufferStore:
    """A range of a tensor in memory, begun with what is on disk; what comes goes there too if `keep` can."""

    def __init__(self, entry: TensorEntry, span: Span, cache: CachedShard | None, keep: Keep) -> None:
        self.entry = entry
        self.span = span
        self.content = memoryview(bytearray(span[1] - span[0]))
        self._cache = cache
        self._keep = keep

    def missing(self) -> list[Span]:
        if self._cache is None:
            return [self.span] if self.content else []
        while True:
            gaps = self._cache.missing(self.entry.name, *self.span)
            if all(self._load(span) for span in _between(self.span, gaps)):
                return gaps

    def write(self, start: int, content: memoryview) -> None:
        self._put(start, content)
        self._keep(self.entry.name, start, content)

    def read(self, span: Span) -> memoryview | None:
        return self.content[span[0] - self.span[0] : span[1] - self.span[0]]

    def sha256(self) -> bytes | None:
        return hashlib.sha256(self.content).digest()

    def discard(self) -> None:
        if self._cache is not None:
            self._cache.drop(self.entry.name, self.span)

    def confirm(self, digest: bytes) -> None:
        if self._cache is not None and not self._cache.missing(self.entry.name, *self.span):
            self._cache.mark_verified(self.entry.name, digest, self.span)

    def _load(self, span: Span) -> bool:
        """Take a range from disk; False if it turned out to be damaged, and is gone from there."""
        assert self._cache is not None
        found = self._cache.read(self.entry.name, span[0], span[1] - span[0])
        if found is not None:
            self._put(span[0], found)
        return found is not None

    def _put(self, start: int, content: memoryview) -> None:
        self.content[start - self.span[0] : start - self.span[0] + len(content)] = content


class Incoming:
    """A store being filled: how much is still to come, what hash it must have, and which peers sent what."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.expected = b""
        """The origin's word for its hash; empty until it has come."""
        self.is_unpinned = False
        """Whether the origin has said that nobody has told it the hash yet."""
        self.has_claimed = False
        """Whether the origin was told which hash was found here."""
        self._lock = threading.Lock()
        self._left_bytes = 0
        self._has_resumed = False
        self._sent: list[tuple[PieceSource, Span, bytes]] = []
        self._suspected: list[tuple[PieceSource, Span, bytes]] = []

    @property
    def size_bytes(self) -> int:
        return self.store.span[1] - self.store.span[0]

    def holds(self, piece: Piece) -> bool:
        """Whether a piece of its tensor belongs to it."""
        return self.store.span[0] <= piece.start and piece.stop <= self.store.span[1]

    def begin(self) -> list[Span]:
        """What has to come."""
        missing = self.store.missing()
        self._left_bytes = sum(stop - start for start, stop in missing)
        self._has_resumed = self._left_bytes < self.size_bytes
        return missing

    def begin_again(self) -> list[Span]:
        """Nothing of it is believed any more."""
        self._suspected += self._sent
        self._sent = []
        self.store.discard()
        self._left_bytes, self._has_resumed = self.size_bytes, False
        return [self.store.span]

    def take(self, line: PieceSource, span: Span, content: memoryview) -> None:
        self.store.write(span[0], content)
        if not line.is_origin:
            sent = (line, span, hashlib.sha256(content).digest())
            with self._lock:
                self._sent.append(sent)

    def arrived(self, piece: Piece, digest: bytes, *, may_be_unpinned: bool = False) -> bool:
        """Count a piece as come; True if it is the last of them, so that all of it can be judged."""
        is_unpinned = may_be_unpinned and not digest and not piece.claim
        if piece.is_hash and len(digest) != _DIGEST_BYTES and not is_unpinned:
            raise LinkError(f"the hash of {piece.tensor!r} was asked for and did not come")
        with self._lock:
            if piece.is_hash:
                self.expected, self.is_unpinned = digest, is_unpinned
            self._left_bytes -= piece.size_bytes
            return self.is_known and self._left_bytes == 0

    @property
    def is_known(self) -> bool:
        """Whether the origin has said what there is to say about the hash."""
        return bool(self.expected) or self.is_unpinned

    @property
    def peers(self) -> set[PieceSource]:
        """Those who sent some of it and are not believed on their word."""
        return {line for line, _, _ in self._sent}

    @property
    def is_all_from_origins(self) -> bool:
        return not self._sent and not self._has_resumed

    def liars(self) -> set[PieceSource]:
        """Now that the store is right: those who sent something else before."""
        return {line for line, span, digest in self._suspected if self._digest_of(span) != digest}

    def _digest_of(self, span: Span) -> bytes | None:
        content = self.store.read(span)
        return None if content is None else hashlib.sha256(content).digest()


def _between(span: Span, gaps: list[Span]) -> Iterator[Span]:
    """The parts of `span` that are in none of `gaps`, which are in order."""
    start = span[0]
    for first, last in gaps:
        if start < first:
            yield (start, first)
        start = last
    if start < span[1]:
        yield (start, span[1])
