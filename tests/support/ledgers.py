"""Ledgers for tests: an authority, a clock that is set by hand, and a file with some of every kind of entry in it."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path

from shardcompute.node.cluster.ledger.file import LEDGER_FILE, LedgerFile
from shardcompute.security import ClusterAuthority
from shardcompute.security.authority import is_signed_by_authority
from shardcompute.trust.ledger import (
    Entry,
    LedgerError,
    LedgerHeader,
    SignedEntries,
    TokenWork,
    replay_ledger,
)
from shardcompute.trust.ledger.records import (
    AuditTaken,
    LaidStage,
    LayoutSet,
    LogClosed,
    LogOpened,
    MemberChanged,
    MeterRead,
    ReceiptsTaken,
    Standing,
)
from shardcompute.trust.ledger.tree import hash_leaf

COORDINATOR = "node-coordinator"


class SetClock:
    """Seconds since 1970, as a test sets them."""

    def __init__(self, now_s: float = 1_000_000.0) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s


def opened() -> LogOpened:
    return LogOpened(number=0, at_s=0, release="1.0", draw="ab" * 32)


def closed() -> LogClosed:
    return LogClosed(number=0, at_s=0)


def member(node: str, standing: Standing = "joined") -> MemberChanged:
    return MemberChanged(number=0, at_s=0, node=node, name=f"{node}-näme", standing=standing, role="worker")


def layout(epoch: int, *nodes: str) -> LayoutSet:
    stages = tuple(LaidStage((node,), 2 * at, 2 * at + 2) for at, node in enumerate(nodes))
    return LayoutSet(number=0, at_s=0, chain="chain-1", model="tiny", epoch=epoch, stages=stages)


def receipts(**credited: int) -> ReceiptsTaken:
    work = {node: TokenWork(tokens, 2 * tokens) for node, tokens in credited.items()}
    return ReceiptsTaken(number=0, at_s=0, count=1, root=hash_leaf(b"a receipt").hex(), credited=work)


def audit(node: str, outcome: str, taken: int = 0) -> AuditTaken:
    return AuditTaken(
        number=0,
        at_s=0,
        receipt="receipt-1",
        node=node,
        start=0,
        stop=2,
        auditors=("c",),
        outcome=outcome,
        findings={node: outcome},
        withdrawn={node: TokenWork(taken, 2 * taken)} if taken else {},
    )


def meter(**steps: int) -> MeterRead:
    return MeterRead(number=0, at_s=0, steps=steps, stored_bytes=dict.fromkeys(steps, 1 << 20))


BATCHES: Sequence[Sequence[Entry]] = (
    (opened(),),
    (member("a"), member("b"), layout(1, "a", "b")),
    (receipts(a=40, b=40), meter(a=41, b=41)),
    (audit("a", "passed"), audit("b", "failed", 40), member("b", "quarantined")),
    (layout(2, "a"),),
)
"""One of every kind but the end, as they come in a cluster in which b cheats."""


class LedgerLab:
    """A coordinator's folder with its authority in it."""

    def __init__(self, folder: Path, name: str = "home") -> None:
        self.authority = ClusterAuthority.create(folder / "authority", name, now_s=1_000_000.0)
        self.path = folder / LEDGER_FILE
        self.clock = SetClock()
        self.header = LedgerHeader(cluster=name, log=COORDINATOR, authority=self.authority.certificate_pem)

    def open(self) -> LedgerFile:
        return LedgerFile(self.path, self.header, self.authority.sign, is_signed_by_authority, self.clock)

    def write(self, batches: Sequence[Sequence[Entry]] = BATCHES, step_s: float = 60.0) -> bytes:
        """The file that comes of these, a minute apart."""
        file = self.open()
        for batch in batches:
            file.append(batch)
            self.clock.now_s += step_s
        file.close()
        return self.path.read_bytes()

    def replay(self, content: bytes | None = None) -> SignedEntries:
        """What a file says; LedgerError where it does not fit."""
        found = self.path.read_bytes() if content is None else content
        return replay_ledger(io.BytesIO(found), is_signed_by_authority, self._check_header)

    def _check_header(self, header: LedgerHeader) -> None:
        if header.authority != self.authority.certificate_pem:
            raise LedgerError("header.authority", "another one")
