"""Merkle tree of an append-only log, hashed as RFC 6962 hashes it, with its inclusion and consistency proofs.

A leaf is hashed behind a zero byte and an inner node behind a one, so that neither can be taken for the other. A tree
of n leaves has the largest power of two below n of them on its left. Proofs are checked without the tree.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

HASH_BYTES = 32
MOST_PROOF = 128
"""Hashes in any proof: two for each doubling of a tree of 2**64 leaves."""
EMPTY_ROOT = hashlib.sha256(b"").digest()


def hash_leaf(content: bytes) -> bytes:
    return hashlib.sha256(b"\x00" + content).digest()


def hash_node(left: bytes, right: bytes) -> bytes:
    return hashlib.sha256(b"\x01" + left + right).digest()


class MerkleTree:
    """Grows by leaves and forgets none. Keeps the hash of every whole subtree: 64 bytes a leaf."""

    def __init__(self, leaves: Iterable[bytes] = ()) -> None:
        """`leaves` are hashes, as `hash_leaf` makes them."""
        self._levels: list[list[bytes]] = [[]]
        for leaf in leaves:
            self.append(leaf)

    @property
    def size(self) -> int:
        return len(self._levels[0])

    def append(self, leaf: bytes) -> None:
        self._levels[0].append(leaf)
        level, count = 0, self.size
        while count % 2 == 0:
            if level + 1 == len(self._levels):
                self._levels.append([])
            left, right = self._levels[level][-2:]
            self._levels[level + 1].append(hash_node(left, right))
            level, count = level + 1, count // 2

    def truncate(self, size: int) -> None:
        """Take back leaves behind the first `size`, of which nobody has heard."""
        self._checked(size)
        for level, hashes in enumerate(self._levels):
            del hashes[size >> level :]

    def root(self, size: int | None = None) -> bytes:
        """Of the first `size` leaves; None: of all."""
        stop = self._checked(self.size if size is None else size)
        return self._hash(0, stop) if stop else EMPTY_ROOT

    def prove_inclusion(self, index: int, size: int | None = None) -> list[bytes]:
        """That leaf `index` is among the first `size`: hashes beside its way to the root, from below."""
        stop = self._checked(self.size if size is None else size)
        if not 0 <= index < stop:
            raise IndexError(f"leaf {index} of {stop}")
        path: list[bytes] = []
        start = 0
        while stop - start > 1:
            middle = start + _left_of(stop - start)
            if index < middle:
                path.append(self._hash(middle, stop))
                stop = middle
            else:
                path.append(self._hash(start, middle))
                start = middle
        return path[::-1]

    def prove_consistency(self, first: int, second: int | None = None) -> list[bytes]:
        """That the first `second` leaves begin with the first `first`."""
        stop = self._checked(self.size if second is None else second)
        if not 0 <= first <= stop:
            raise IndexError(f"{first} leaves of {stop}")
        if first in (0, stop):
            return []
        path: list[bytes] = []
        start, is_known = 0, True
        while first != stop - start:
            width = _left_of(stop - start)
            if first <= width:
                path.append(self._hash(start + width, stop))
                stop = start + width
            else:
                path.append(self._hash(start, start + width))
                start, first, is_known = start + width, first - width, False
        if not is_known:
            path.append(self._hash(start, stop))
        return path[::-1]

    def _checked(self, size: int) -> int:
        if not 0 <= size <= self.size:
            raise IndexError(f"a tree of {self.size} leaves has none of {size}")
        return size

    def _hash(self, start: int, stop: int) -> bytes:
        """Of leaves `[start, stop)`, which are a subtree of some tree."""
        width = stop - start
        if width & (width - 1) == 0:
            level = width.bit_length() - 1
            return self._levels[level][start >> level]
        middle = start + _left_of(width)
        return hash_node(self._hash(start, middle), self._hash(middle, stop))


def _left_of(width: int) -> int:
    """The largest power of two below `width`, which is more than one."""
    return 1 << ((width - 1).bit_length() - 1)


def is_included(leaf: bytes, index: int, size: int, path: Sequence[bytes], root: bytes) -> bool:
    """Whether a proof shows that the leaf of this hash is number `index` of a tree of `size` with this root."""
    if not 0 <= index < size or len(path) > MOST_PROOF:
        return False
    place, last, found = index, size - 1, leaf
    for beside in path:
        if last == 0:
            return False
        if place % 2 or place == last:
            found = hash_node(beside, found)
            while place % 2 == 0 and place:
                place, last = place >> 1, last >> 1
        else:
            found = hash_node(found, beside)
        place, last = place >> 1, last >> 1
    return last == 0 and found == root


def is_consistent(
    first: int, first_root: bytes, second: int, second_root: bytes, path: Sequence[bytes]
) -> bool:
    """Whether a proof shows that a tree of `second` leaves begins with the one of `first`."""
    if not 0 <= first <= second or len(path) > MOST_PROOF:
        return False
    if first == second:
        return not path and first_root == second_root
    if first == 0:
        return not path and first_root == EMPTY_ROOT
    hashes = list(path)
    if first & (first - 1) == 0:
        hashes.insert(0, first_root)
    if not hashes:
        return False
    place, last = first - 1, second - 1
    while place % 2:
        place, last = place >> 1, last >> 1
    old = new = hashes[0]
    for beside in hashes[1:]:
        if last == 0:
            return False
        if place % 2 or place == last:
            old, new = hash_node(beside, old), hash_node(beside, new)
            while place % 2 == 0 and place:
                place, last = place >> 1, last >> 1
        else:
            new = hash_node(new, beside)
        place, last = place >> 1, last >> 1
    return last == 0 and old == first_root and new == second_root
