"""Ledgers as files: every byte and every field of one counts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardcompute.trust.ledger import LedgerError, MerkleTree, hash_leaf
from support.ledgers import BATCHES, LedgerLab, closed


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> LedgerLab:
    made = LedgerLab(tmp_path_factory.mktemp("ledger"))
    made.write((*BATCHES, (closed(),)))
    return made


@pytest.fixture(scope="module")
def content(lab: LedgerLab) -> bytes:
    return lab.path.read_bytes()


def is_refused(lab: LedgerLab, content: bytes) -> bool:
    try:
        lab.replay(content)
    except LedgerError as error:
        return bool(error.place and error.reason)
    return False


def test_a_ledger_replays(lab: LedgerLab, content: bytes) -> None:
    whole = lab.replay(content)
    assert len(whole.entries) == sum(map(len, BATCHES)) + 1
    assert whole.head.root == whole.tree.root().hex()


def test_anybody_can_replay_an_entry_with_json_and_sha256(lab: LedgerLab, content: bytes) -> None:
    """A leaf is a line: nothing of ours is needed to hash it."""
    lines = content.splitlines()
    entries = [line for line in lines if json.loads(line)["kind"] not in ("header", "head")]
    assert MerkleTree(map(hash_leaf, entries)).root().hex() == json.loads(lines[-1])["root"]


@given(st.data())
def test_every_change_of_a_byte_is_refused(lab: LedgerLab, content: bytes, data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(content) - 1))
    value = data.draw(st.integers(0, 255).filter(lambda each: each != content[at]))
    assert is_refused(lab, content[:at] + bytes([value]) + content[at + 1 :])


@given(st.data())
def test_every_byte_that_is_taken_out_or_put_in_is_refused(
    lab: LedgerLab, content: bytes, data: st.DataObject
) -> None:
    at = data.draw(st.integers(0, len(content) - 1))
    assert is_refused(lab, content[:at] + content[at + 1 :])
    assert is_refused(lab, content[:at] + bytes([data.draw(st.integers(0, 255))]) + content[at:])


def fields_of(value: Any, way: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    if isinstance(value, dict | list) and way:
        yield way
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in items:
        if not isinstance(each, dict | list):
            yield (*way, key)
        yield from fields_of(each, (*way, key))


def altered(value: Any) -> Any:
    if isinstance(value, bool) or value is None:
        return not value
    if isinstance(value, int):
        return value + 1
    if isinstance(value, str):
        return value[:-1] + ("0" if value[-1:] != "0" else "1")
    return type(value)() if value else ["more"] if isinstance(value, list) else {"more": 1}


def test_every_change_of_a_field_is_refused(lab: LedgerLab, content: bytes) -> None:
    """Also where the rest of the line is written as it should be."""
    lines = content.splitlines(keepends=True)
    tried = 0
    for number, line in enumerate(lines):
        for way in fields_of(json.loads(line)):
            record = json.loads(line)
            holder = record
            for key in way[:-1]:
                holder = holder[key]
            holder[way[-1]] = altered(holder[way[-1]])
            text = json.dumps(record, separators=(",", ":"), ensure_ascii=False, sort_keys=True)
            changed = b"".join([*lines[:number], text.encode() + b"\n", *lines[number + 1 :]])
            assert is_refused(lab, changed), (number, way)
            tried += 1
    assert tried > 100


def test_every_line_that_is_missing_doubled_or_moved_is_refused(lab: LedgerLab, content: bytes) -> None:
    lines = content.splitlines(keepends=True)
    # A head more or less changes nothing that is said, unless it is the last.
    entries = [at for at, line in enumerate(lines) if json.loads(line)["kind"] != "head"]
    for at in [*entries, len(lines) - 1]:
        assert is_refused(lab, b"".join(lines[:at] + lines[at + 1 :])), at
    for at in entries:
        assert is_refused(lab, b"".join(lines[: at + 1] + lines[at:])), at
        if at + 1 < len(lines):
            swapped = [*lines[:at], lines[at + 1], lines[at], *lines[at + 2 :]]
            assert is_refused(lab, b"".join(swapped)), at


def test_a_file_signed_by_somebody_else_is_refused(lab: LedgerLab, tmp_path: Path) -> None:
    """Even where everything in it fits."""
    other = LedgerLab(tmp_path)
    content = other.write()
    assert is_refused(lab, content)
    header, _, rest = content.partition(b"\n")
    own = lab.path.read_bytes().partition(b"\n")[0]
    assert is_refused(lab, own + b"\n" + rest)
    assert header != own
