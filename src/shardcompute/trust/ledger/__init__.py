"""Ledger: an append-only log of who was there, who had which layers, who signed for what, and what audits found.

    replay = LedgerReplay(check)           # the coordinator goes on with its file, line by line
    whole = replay_ledger(lines, check)    # anybody checks a copy: raises LedgerError that names the first misfit
    doubt = judge_head(known, shown, proof, is_signed=True)   # a member: does this go on from what I saw?

Pure values and functions: signatures are checked by what is passed in; no clock, no files, no links.
"""

from __future__ import annotations

from shardcompute.trust.ledger.accounts import Accounts, Contribution
from shardcompute.trust.ledger.following import Doubt, SeenLedger, judge_head
from shardcompute.trust.ledger.records import Entry, LedgerError, LedgerHeader, TokenWork, TreeHead
from shardcompute.trust.ledger.replay import LedgerReplay, SignedEntries, replay_ledger
from shardcompute.trust.ledger.tree import MerkleTree, hash_leaf, is_consistent, is_included

__all__ = [
    "Accounts",
    "Contribution",
    "Doubt",
    "Entry",
    "LedgerError",
    "LedgerHeader",
    "LedgerReplay",
    "MerkleTree",
    "SeenLedger",
    "SignedEntries",
    "TokenWork",
    "TreeHead",
    "hash_leaf",
    "is_consistent",
    "is_included",
    "judge_head",
    "replay_ledger",
]
