"""Ledger file: what was acknowledged outlives a crash at any byte; damage is named, and nothing is added to it."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from shardcompute.core.errors import SourceError
from shardcompute.trust.ledger import LedgerError, is_consistent, is_included
from shardcompute.trust.ledger.tree import hash_leaf
from support.ledgers import BATCHES, LedgerLab, audit, member, opened, receipts


@pytest.fixture
def lab(tmp_path: Path) -> LedgerLab:
    return LedgerLab(tmp_path)


def lengths(lab: LedgerLab) -> list[int]:
    """Of the file after each batch, which is when each was acknowledged."""
    file, found = lab.open(), []
    for batch in BATCHES:
        file.append(batch)
        found.append(lab.path.stat().st_size)
    file.close()
    return found


def test_a_crash_at_every_byte_loses_nothing_that_was_acknowledged(lab: LedgerLab) -> None:
    ends = lengths(lab)
    whole = lab.path.read_bytes()
    sizes = [0]
    for batch in BATCHES:
        sizes.append(sizes[-1] + len(batch))
    for cut in (*range(ends[-3], ends[-2], 9), *range(ends[-2], len(whole) + 1)):
        lab.path.write_bytes(whole[:cut])
        acknowledged = sum(1 for end in ends if end <= cut)
        file = lab.open()
        assert file.head is not None
        assert file.head.size == sizes[acknowledged], cut
        assert lab.path.stat().st_size == ends[acknowledged - 1], "what nobody was told of is cut off"
        file.close()


def test_what_a_crash_left_is_gone_on_from(lab: LedgerLab) -> None:
    ends = lengths(lab)
    whole = lab.path.read_bytes()
    lab.path.write_bytes(whole[: ends[-2] + 30])
    file = lab.open()
    file.append([member("c")])
    file.close()
    again = lab.replay()
    assert [each.number for each in again.entries] == list(range(again.head.size))
    assert again.accounts.standings["c"] == "joined"


def test_zeros_where_a_machine_lost_its_power_are_cut_off(lab: LedgerLab) -> None:
    ends = lengths(lab)
    whole = lab.path.read_bytes()
    torn = bytearray(whole)
    torn[ends[-2] + 5 : ends[-2] + 40] = bytes(35)
    lab.path.write_bytes(torn)
    file = lab.open()
    assert file.length_bytes == ends[-2]
    file.close()


def test_an_empty_file_and_half_a_header_are_begun_anew(lab: LedgerLab) -> None:
    whole = lab.write()
    for cut in (0, 1, whole.index(b"\n"), whole.index(b"\n") + 1):
        lab.path.write_bytes(whole[:cut])
        file = lab.open()
        assert file.head is None
        file.append([opened()])
        file.close()
        assert lab.replay().head.size == 1


def test_an_altered_record_is_named_and_the_file_is_left_alone(lab: LedgerLab) -> None:
    whole = lab.write()
    altered = whole.replace(b'"tokens":40', b'"tokens":41', 1)
    lab.path.write_bytes(altered)
    with pytest.raises(SourceError, match=r"head over 6.root: entries 4 to 5"):
        lab.open()
    assert lab.path.read_bytes() == altered


def test_a_missing_record_is_named(lab: LedgerLab) -> None:
    lines = lab.write().splitlines(keepends=True)
    gone = next(at for at, line in enumerate(lines) if b'"number":2,' in line)
    lab.path.write_bytes(b"".join(lines[:gone] + lines[gone + 1 :]))
    with pytest.raises(SourceError, match=r"entry 2.number: 3: entries before it are missing"):
        lab.open()


def test_a_ledger_of_another_authority_is_not_gone_on_with(lab: LedgerLab, tmp_path: Path) -> None:
    other = LedgerLab(tmp_path / "other")
    other.write()
    lab.path.write_bytes(other.path.read_bytes())
    with pytest.raises(SourceError, match="is that of"):
        lab.open()


def test_what_cannot_follow_is_not_written(lab: LedgerLab) -> None:
    file = lab.open()
    file.append([opened(), receipts(a=10)])
    before, head = lab.path.read_bytes(), file.head
    with pytest.raises(LedgerError, match="more is taken back than was credited"):
        file.append([member("a"), audit("a", "failed", taken=11)])
    assert lab.path.read_bytes() == before
    assert file.head == head
    assert file.append([audit("a", "failed", taken=10)]).size == 3
    [found] = file.contributions()
    assert (found.tokens, found.uncredited_tokens) == (0, 10)
    file.close()


def test_a_full_disk_costs_nothing_that_was_acknowledged(
    lab: LedgerLab, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = lab.open()
    file.append([opened()])
    head = file.head

    def fail(handle: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail)
        with pytest.raises(SourceError, match="cannot be written"):
            file.append([member("a")])
    assert file.head == head
    file.append([member("b")])
    file.close()
    whole = lab.replay()
    assert whole.accounts.standings == {"b": "joined"}


def test_time_never_goes_back(lab: LedgerLab) -> None:
    file = lab.open()
    file.append([opened()])
    lab.clock.now_s -= 1000
    file.append([member("a")])
    file.close()
    first, second = lab.replay().entries
    assert first.at_s == second.at_s


def test_proofs_lead_from_any_head_to_the_last_and_from_any_entry(lab: LedgerLab) -> None:
    file = lab.open()
    heads = [file.append(batch) for batch in BATCHES]
    for known in heads:
        head, proof = file.prove_since(known.size)
        assert head == heads[-1]
        assert is_consistent(
            known.size, bytes.fromhex(known.root), head.size, bytes.fromhex(head.root), proof
        )
    for number in range(heads[-1].size):
        head, line, path = file.prove_entry(number)
        assert is_included(hash_leaf(line), number, head.size, path, bytes.fromhex(head.root))
    assert file.prove_since(heads[-1].size + 1) == (heads[-1], [])
    with pytest.raises(LedgerError):
        file.prove_entry(heads[-1].size)
    file.close()
