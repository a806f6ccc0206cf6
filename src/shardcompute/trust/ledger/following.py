"""Following a ledger: what a member remembers of it, and whether what it is shown now goes on from there.

A head that is signed and does not go on from one that was signed before is proof against whoever signed both: the
member keeps the one it had.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from shardcompute.trust.ledger.records import TreeHead
from shardcompute.trust.ledger.tree import MOST_PROOF, MerkleTree, is_consistent

MOST_LOGS = 16
Break = Literal["forged", "rollback", "fork", "gap"]
"""`forged`: not signed by the cluster's authority. `rollback`: fewer entries than before. `fork`: other entries than
before. `gap`: more entries, without a proof that those before are among them."""


class SeenLedger(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What a member keeps: the last good head of each coordinator, and what did not fit since."""

    heads: Annotated[dict[str, TreeHead], Meta(max_length=MOST_LOGS)] = {}
    broken: Annotated[dict[str, TreeHead], Meta(max_length=MOST_LOGS)] = {}
    """The first head of a coordinator that did not go on from the one before it."""


@dataclass(frozen=True, slots=True)
class Doubt:
    """Why a head is not believed, in a sentence."""

    kind: Break
    reason: str


def judge_copy(known: TreeHead, copy: TreeHead, tree: MerkleTree) -> Doubt | None:
    """Whether a whole copy of a ledger goes on from a head that somebody saw; None: it does."""
    if known.size > copy.size:
        return Doubt("rollback", f"it has {copy.size} entries, and there were {known.size} before")
    if tree.root(known.size).hex() != known.root:
        return Doubt("fork", f"its first {known.size} entries are others than were seen before")
    return None


def judge_head(
    known: TreeHead | None, shown: TreeHead, proof: Sequence[bytes], *, is_signed: bool
) -> Doubt | None:
    """None: it is the head that is known, or one that goes on from there."""
    if not is_signed:
        return Doubt("forged", "the head of the ledger is not signed by the cluster's authority")
    if known is None or known.size == 0:
        return None
    if shown.size < known.size:
        return Doubt("rollback", f"the ledger has {shown.size} entries and had {known.size} before")
    if shown.size == known.size:
        if shown.root == known.root:
            return None
        return Doubt("fork", f"the ledger has {shown.size} entries as before, and they are others")
    if not proof or len(proof) > MOST_PROOF:
        return Doubt(
            "gap",
            f"the ledger has {shown.size} entries, and nothing shows that the {known.size} that it had are among them",
        )
    roots = bytes.fromhex(known.root), bytes.fromhex(shown.root)
    if not is_consistent(known.size, roots[0], shown.size, roots[1], proof):
        return Doubt(
            "fork", f"the ledger's {known.size} entries from before are not the first of its {shown.size}"
        )
    return None
