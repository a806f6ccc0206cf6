"""Merkle tree of a ledger: proofs of any tree hold, and hold for nothing else."""

from __future__ import annotations

import hashlib

from hypothesis import given
from hypothesis import strategies as st

from shardcompute.trust.ledger import MerkleTree, hash_leaf, is_consistent, is_included
from shardcompute.trust.ledger.tree import EMPTY_ROOT

leaves = st.lists(st.binary(max_size=4), min_size=1, max_size=70)


def plain_root(contents: list[bytes]) -> bytes:
    """As RFC 6962 defines it, without any cleverness."""
    if not contents:
        return hashlib.sha256(b"").digest()
    if len(contents) == 1:
        return hashlib.sha256(b"\x00" + contents[0]).digest()
    cut = 1
    while cut * 2 < len(contents):
        cut *= 2
    inner = plain_root(contents[:cut]) + plain_root(contents[cut:])
    return hashlib.sha256(b"\x01" + inner).digest()


def tree_of(contents: list[bytes]) -> MerkleTree:
    return MerkleTree(hash_leaf(each) for each in contents)


def flipped(value: bytes, bit: int) -> bytes:
    at = bit % (8 * len(value))
    return value[: at // 8] + bytes([value[at // 8] ^ (1 << at % 8)]) + value[at // 8 + 1 :]


def test_roots_are_those_of_rfc_6962() -> None:
    """Of the test vectors that implementations of it share."""
    contents = [
        bytes.fromhex(each)
        for each in (
            "",
            "00",
            "10",
            "2021",
            "3031",
            "40414243",
            "5051525354555657",
            bytes(range(96, 112)).hex(),
        )
    ]
    tree = tree_of(contents)
    assert tree.root(0).hex() == "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
    assert tree.root(1).hex() == "6e340b9cffb37a989ca544e6bb780a2c78901d3fb33738768511a30617afa01d"
    assert tree.root(8).hex() == "5dc9da79a70659a9ad559cb701ded9a2ab9d823aad2f4960cfe370eff4604328"


@given(leaves)
def test_a_tree_has_the_root_of_the_definition_at_every_size(contents: list[bytes]) -> None:
    tree = tree_of(contents)
    for size in range(len(contents) + 1):
        assert tree.root(size) == plain_root(contents[:size])


@given(leaves, st.data())
def test_what_is_taken_back_leaves_no_trace(contents: list[bytes], data: st.DataObject) -> None:
    tree = tree_of(contents)
    kept = data.draw(st.integers(0, len(contents)))
    tree.truncate(kept)
    for each in contents[:3]:
        tree.append(hash_leaf(each))
    assert tree.root() == plain_root([*contents[:kept], *contents[:3]])


@given(leaves, st.data())
def test_inclusion_is_proved_for_every_leaf_and_for_no_other(
    contents: list[bytes], data: st.DataObject
) -> None:
    tree = tree_of(contents)
    size = data.draw(st.integers(1, len(contents)))
    index = data.draw(st.integers(0, size - 1))
    path, root, leaf = tree.prove_inclusion(index, size), tree.root(size), hash_leaf(contents[index])
    assert is_included(leaf, index, size, path, root)
    bit = data.draw(st.integers(0, 255))
    assert not is_included(flipped(leaf, bit), index, size, path, root)
    assert not is_included(leaf, index, size, path, flipped(root, bit))
    assert not is_included(leaf, index, size, [*path, root], root)
    assert not is_included(leaf, size, size, path, root)
    assert not is_included(leaf, -1, size, path, root)
    for at in range(len(path)):
        assert not is_included(leaf, index, size, [*path[:at], flipped(path[at], bit), *path[at + 1 :]], root)
        assert not is_included(leaf, index, size, path[:at] + path[at + 1 :], root)
    other = data.draw(st.integers(0, size - 1))
    if hash_leaf(contents[other]) != leaf:
        assert not is_included(leaf, other, size, tree.prove_inclusion(other, size), root)


@given(leaves, st.data())
def test_consistency_is_proved_for_every_pair_of_sizes_and_for_no_other_past(
    contents: list[bytes], data: st.DataObject
) -> None:
    tree = tree_of(contents)
    second = data.draw(st.integers(0, len(contents)))
    first = data.draw(st.integers(0, second))
    path = tree.prove_consistency(first, second)
    roots = tree.root(first), tree.root(second)
    assert is_consistent(first, roots[0], second, roots[1], path)
    bit = data.draw(st.integers(0, 255))
    assert not is_consistent(first, flipped(roots[0], bit), second, roots[1], path)
    if first:
        assert not is_consistent(first, roots[0], second, flipped(roots[1], bit), path)
    assert not is_consistent(first, roots[0], second, roots[1], [*path, EMPTY_ROOT])
    for at in range(len(path)):
        bent = [*path[:at], flipped(path[at], bit), *path[at + 1 :]]
        assert not is_consistent(first, roots[0], second, roots[1], bent)
        assert not is_consistent(first, roots[0], second, roots[1], path[:at] + path[at + 1 :])


@given(leaves, st.data())
def test_a_tree_with_another_past_is_consistent_with_none(contents: list[bytes], data: st.DataObject) -> None:
    first = data.draw(st.integers(1, len(contents)))
    changed = data.draw(st.integers(0, first - 1))
    forged = [*contents, b"more"]
    forged[changed] = contents[changed] + b"!"
    known, other = tree_of(contents).root(first), tree_of(forged)
    assert not is_consistent(first, known, other.size, other.root(), other.prove_consistency(first))
