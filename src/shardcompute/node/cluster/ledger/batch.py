"""Receipt batch: what receipts since the last entry about them come to, and what of it can still be proved later."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from shardcompute.trust.ledger import MerkleTree, TokenWork
from shardcompute.trust.ledger.records import NO_WORK, ReceiptsTaken

_MOST_KNOWN = 4096
"""Receipts of which it is known what they credited: as many as servers keep."""


@dataclass(slots=True)
class ReceiptBatch:
    """Receipts in the order in which they came."""

    tree: MerkleTree = field(default_factory=MerkleTree)
    credited: defaultdict[str, TokenWork] = field(default_factory=lambda: defaultdict(TokenWork))
    uncredited: defaultdict[str, TokenWork] = field(default_factory=lambda: defaultdict(TokenWork))
    number: int | None = None
    """Of the entry that tells of it, once there is one."""

    def add(self, leaf: bytes, credited: Mapping[str, TokenWork], uncredited: Mapping[str, TokenWork]) -> int:
        """Its place among them."""
        self.tree.append(leaf)
        for node, work in credited.items():
            self.credited[node] += work
        for node, work in uncredited.items():
            self.uncredited[node] += work
        return self.tree.size - 1

    def withdraw(self, node: str, work: TokenWork) -> None:
        self.credited[node] -= work
        self.uncredited[node] += work

    def entry(self) -> ReceiptsTaken:
        return ReceiptsTaken(
            number=0,
            at_s=0,
            count=self.tree.size,
            root=self.tree.root().hex(),
            credited={node: work for node, work in self.credited.items() if work != NO_WORK},
            uncredited={node: work for node, work in self.uncredited.items() if work != NO_WORK},
        )


@dataclass(slots=True)
class KnownReceipt:
    """A receipt that was counted: in which batch, where in it, and what it credited."""

    batch: ReceiptBatch
    index: int
    work: dict[str, TokenWork]


class KnownReceipts:
    """The latest that were counted, and whose work in which is contradicted before it is. Bounded: the oldest go."""

    def __init__(self) -> None:
        self._known: OrderedDict[str, KnownReceipt] = OrderedDict()
        self._early: OrderedDict[str, set[str]] = OrderedDict()

    def find(self, receipt: str) -> KnownReceipt | None:
        return self._known.get(receipt)

    def put(self, receipt: str, known: KnownReceipt) -> None:
        self._known[receipt] = known
        while len(self._known) > _MOST_KNOWN:
            self._known.popitem(last=False)

    def early(self, receipt: str) -> Collection[str]:
        """Whose work in a receipt was contradicted before it came."""
        return self._early.pop(receipt, set())

    def contradict(self, receipt: str, nodes: Collection[str]) -> dict[str, TokenWork]:
        """What is to be taken back of what is on record. Of a batch that is not there yet, it is taken at once."""
        known, withdrawn = self._known.get(receipt), {}
        if known is None:
            self._early.setdefault(receipt, set()).update(nodes)
            while len(self._early) > _MOST_KNOWN:
                self._early.popitem(last=False)
            return {}
        for node in nodes:
            work = known.work.pop(node, NO_WORK)
            if work == NO_WORK:
                continue
            if known.batch.number is None:
                known.batch.withdraw(node, work)
            else:
                withdrawn[node] = work
        return withdrawn
