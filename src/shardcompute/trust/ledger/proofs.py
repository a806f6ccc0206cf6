"""Proofs for who has no copy of a ledger: that a receipt is in it, by two ways through two trees.

The receipt's file is a leaf of the tree whose root is in an entry; the entry's line is a leaf of the tree whose root is
in a signed head.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from shardcompute.trust.ledger.records import (
    MOST_LINE_BYTES,
    Count,
    HexHash,
    LedgerError,
    LedgerHeader,
    ReceiptsTaken,
    TreeHead,
    head_bytes,
    read_line,
)
from shardcompute.trust.ledger.replay import CheckSignature
from shardcompute.trust.ledger.tree import MOST_PROOF, hash_leaf, is_included

PROOF_FORMAT: Literal["shardcompute ledger proof v1"] = "shardcompute ledger proof v1"
HashPath = Annotated[tuple[HexHash, ...], Meta(max_length=MOST_PROOF)]


class ReceiptProof(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """That a receipt is number `index` of those that an entry tells of, and the entry under a head."""

    format: Literal["shardcompute ledger proof v1"] = PROOF_FORMAT
    header: LedgerHeader
    head: TreeHead
    entry: Annotated[str, Meta(max_length=MOST_LINE_BYTES)]
    """Its line."""
    entry_path: HashPath
    index: Count
    path: HashPath


_proofs = msgspec.json.Decoder(ReceiptProof)


def write_proof(proof: ReceiptProof) -> bytes:
    return msgspec.json.format(msgspec.json.encode(proof), indent=1) + b"\n"


def read_proof(content: bytes) -> ReceiptProof:
    """LedgerError for what is none."""
    try:
        return _proofs.decode(content)
    except (ValueError, RecursionError) as error:
        raise LedgerError("proof", f"this is no proof: {error}") from error


def check_proof(proof: ReceiptProof, receipt: bytes, check: CheckSignature) -> ReceiptsTaken:
    """The entry that tells of a receipt, by its file. LedgerError at the first thing that does not fit."""
    head, line = proof.head, proof.entry.encode()
    if (head.cluster, head.log) != (proof.header.cluster, proof.header.log):
        raise LedgerError("head.log", f"it is of another ledger, {head.log} in {head.cluster}")
    if not check(proof.header.authority, bytes.fromhex(head.signature), head_bytes(head)):
        raise LedgerError("head.signature", "the ledger's authority has not signed this")
    entry = read_line(line, "entry")
    if not isinstance(entry, ReceiptsTaken):
        raise LedgerError("entry", "it tells of no receipts")
    root = bytes.fromhex(head.root)
    if not is_included(hash_leaf(line), entry.number, head.size, _hashes(proof.entry_path), root):
        raise LedgerError("entry_path", f"the entry is not number {entry.number} under this head")
    found = bytes.fromhex(entry.root)
    if not is_included(hash_leaf(receipt), proof.index, entry.count, _hashes(proof.path), found):
        raise LedgerError("path", "the receipt is not among those that the entry tells of")
    return entry


def _hashes(path: HashPath) -> list[bytes]:
    return [bytes.fromhex(each) for each in path]
