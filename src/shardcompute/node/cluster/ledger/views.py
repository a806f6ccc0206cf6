"""The ledger as people see it: plain values, ready to be written as JSON and read back."""

from __future__ import annotations

from dataclasses import dataclass, field

from shardcompute.trust.ledger import Contribution


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerView:
    """Its last head, and what its entries come to. No `log`: nothing was ever written, or it cannot be read."""

    cluster: str = ""
    log: str = ""
    """The coordinator that keeps it."""
    size: int = 0
    """Entries."""
    root: str = ""
    signed_s: int = 0
    receipts: int = 0
    size_bytes: int = 0
    machines: tuple[Contribution, ...] = ()
    problem: str = ""
    """Why nothing is added at present; "": all is well."""
    doubts: dict[str, str] = field(default_factory=dict)
    """Members that say that it does not go on from what they saw before, and why."""
