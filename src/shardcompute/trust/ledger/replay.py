"""Replay of a ledger, line by line: by the coordinator that goes on with it, and by anybody who was handed a copy.

A file is a header, then entries and, over all entries before it, a signed head wherever some were acknowledged. What
does not fit is named at the first line that shows it: an entry itself where it cannot be read or does not follow,
otherwise the first head that was not signed for the entries above it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from shardcompute.trust.ledger.accounts import Accounts
from shardcompute.trust.ledger.records import (
    Entry,
    LedgerError,
    LedgerHeader,
    TreeHead,
    head_bytes,
    read_line,
)
from shardcompute.trust.ledger.tree import MerkleTree, hash_leaf

CheckSignature = Callable[[str, bytes, bytes], bool]
"""Whether the key of a certificate (PEM) signed this: certificate, signature, message."""


@dataclass(frozen=True, slots=True)
class SignedEntries:
    """What a whole ledger says, once all of it fits."""

    header: LedgerHeader
    head: TreeHead
    entries: tuple[Entry, ...]
    accounts: Accounts
    tree: MerkleTree


class LedgerReplay:
    """Lines in their order. `check` says whether a head was signed by the ledger's authority."""

    def __init__(self, check: CheckSignature, on_entry: Callable[[Entry], None] = lambda entry: None) -> None:
        self._check = check
        self._on_entry = on_entry
        self.tree = MerkleTree()
        self.accounts = Accounts()
        self.header: LedgerHeader | None = None
        self.head: TreeHead | None = None
        """The last that fitted."""

    @property
    def is_settled(self) -> bool:
        """Whether all entries so far are under a head."""
        return self.head is not None and self.head.size == self.tree.size

    def take(self, line: bytes) -> None:
        """The next line, without its end; LedgerError where it does not fit."""
        if self.header is None:
            self._take_header(read_line(line, "header"))
            return
        place = f"entry {self.tree.size}"
        record = read_line(line, place)
        if isinstance(record, LedgerHeader):
            raise LedgerError(place, "a second header")
        if isinstance(record, TreeHead):
            self._take_head(record, self.header)
            return
        if record.number != self.tree.size:
            raise LedgerError(f"{place}.number", f"{record.number}: entries before it are missing")
        self.accounts.take(record, place)
        self.tree.append(hash_leaf(line))
        self._on_entry(record)

    def _take_header(self, record: object) -> None:
        if not isinstance(record, LedgerHeader):
            raise LedgerError("header", "the first line is none")
        self.header = record

    def _take_head(self, head: TreeHead, header: LedgerHeader) -> None:
        place = f"head over {self.tree.size}"
        if (head.cluster, head.log) != (header.cluster, header.log):
            raise LedgerError(f"{place}.log", f"it is of another ledger, {head.log} in {head.cluster}")
        if head.size != self.tree.size:
            raise LedgerError(f"{place}.size", f"it was signed for {head.size} entries")
        former = self.head
        if former is not None and head.signed_s < former.signed_s:
            raise LedgerError(f"{place}.signed_s", "it is older than the head before it")
        if head.root != self.tree.root().hex():
            first = 0 if former is None else former.size
            changed = f"entry {first}" if head.size - first == 1 else f"entries {first} to {head.size - 1}"
            raise LedgerError(f"{place}.root", f"{changed} are not those that it was signed for")
        if not self._check(header.authority, bytes.fromhex(head.signature), head_bytes(head)):
            raise LedgerError(f"{place}.signature", "the ledger's authority has not signed this")
        self.head = head


def replay_ledger(
    lines: Iterable[bytes],
    check: CheckSignature,
    check_header: Callable[[LedgerHeader], None] = lambda header: None,
) -> SignedEntries:
    """All lines of a file, each with its end. LedgerError at the first that does not fit; `check_header` raises it
    where the ledger is of somebody who is not trusted."""
    entries: list[Entry] = []
    replay = LedgerReplay(check, entries.append)
    for line in lines:
        if not line.endswith(b"\n"):
            raise LedgerError(f"entry {replay.tree.size}", "the file ends amid a line")
        is_first = replay.header is None
        replay.take(line[:-1])
        if is_first and replay.header is not None:
            check_header(replay.header)
    if replay.header is None:
        raise LedgerError("header", "the file is empty")
    if replay.head is None or not replay.is_settled:
        raise LedgerError(f"entry {replay.tree.size}", "the file ends without a head over all of its entries")
    return SignedEntries(replay.header, replay.head, tuple(entries), replay.accounts, replay.tree)
