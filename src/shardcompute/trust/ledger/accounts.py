"""Accounts: what the entries of a ledger come to, machine by machine.

Credited is work that a stage signed for in a receipt that fits, unless an audit contradicted it. Everything else that
is known of is kept beside that and never added to it: work in receipts that do not fit, what audits took back, steps
and bytes that machines report.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from shardcompute.trust.ledger.records import (
    NO_WORK,
    AuditTaken,
    Entry,
    LayoutSet,
    LedgerError,
    LogClosed,
    LogOpened,
    MemberChanged,
    MeterRead,
    ReceiptsTaken,
    Standing,
    TokenWork,
)

_HOUR_S = 3600.0
_MILLION = 1e6


@dataclass(frozen=True, slots=True, kw_only=True)
class Contribution:
    """One machine, by a ledger."""

    node: str
    name: str = ""
    standing: Standing | None = None
    """None: the coordinator has stopped or has not heard of it since it started."""
    uptime_s: int = 0
    tokens: int = 0
    """Rows of answers that it was credited, and these times its layers."""
    token_layers: int = 0
    uncredited_tokens: int = 0
    """In receipts that do not fit, and what audits took back."""
    uncredited_token_layers: int = 0
    audits_passed: int = 0
    audits_against: int = 0
    steps: int = 0
    stored_bytes: int = 0
    seeded_bytes: int = 0
    relayed_bytes: int = 0

    def cost_per_million_tokens(self, hourly_cost: float) -> float | None:
        """Of tokens that were credited, for a machine that costs so much an hour; None: there are none."""
        if not self.tokens:
            return None
        return hourly_cost * self.uptime_s / _HOUR_S / self.tokens * _MILLION


@dataclass(slots=True)
class _MachineAccount:
    name: str = ""
    standing: Standing | None = None
    since_s: int = 0
    uptime_s: int = 0
    credited: TokenWork = NO_WORK
    uncredited: TokenWork = NO_WORK
    passed: int = 0
    against: int = 0
    meters: dict[str, int] = field(default_factory=dict)

    def stand(self, standing: Standing | None, at_s: int) -> None:
        if self.standing == "joined":
            self.uptime_s += max(0, at_s - self.since_s)
        self.standing, self.since_s = standing, at_s


class Accounts:
    """Entries in their order; raises LedgerError at one that cannot follow those before it."""

    def __init__(self) -> None:
        self._accounts: dict[str, _MachineAccount] = {}
        self._layouts: dict[str, LayoutSet] = {}
        self._epochs: dict[str, int] = {}
        self._is_open = False
        self.receipts = 0
        self.last_s = 0
        """Of the last entry."""

    @property
    def layouts(self) -> Mapping[str, LayoutSet]:
        """Of chains that are not over."""
        return self._layouts

    @property
    def standings(self) -> Mapping[str, Standing | None]:
        return {node: account.standing for node, account in self._accounts.items()}

    def take(self, entry: Entry, place: str) -> None:
        if entry.at_s < self.last_s:
            raise LedgerError(f"{place}.at_s", "it is older than the entry before it")
        if not self._is_open and not isinstance(entry, LogOpened):
            raise LedgerError(place, "the ledger was not opened before it")
        match entry:
            case LogOpened():
                # Whoever was there when the coordinator ended was so until the last that it wrote.
                self._leave_all(self.last_s)
                self._layouts.clear()
                self._epochs.clear()
                self._is_open = True
            case LogClosed():
                self._leave_all(entry.at_s)
                self._is_open = False
            case MemberChanged():
                account = self._of(entry.node)
                account.name = entry.name
                account.stand(entry.standing, entry.at_s)
            case LayoutSet():
                self._lay(entry, place)
            case ReceiptsTaken():
                self._credit(entry)
            case AuditTaken():
                self._audit(entry, place)
            case MeterRead():
                self._read(entry)
        self.last_s = entry.at_s

    def contributions(self, now_s: int | None = None) -> tuple[Contribution, ...]:
        """Of every machine that was ever named, by node; uptime until `now_s`, or until the last entry."""
        until_s = self.last_s if now_s is None else max(now_s, self.last_s)
        found = []
        for node, each in sorted(self._accounts.items()):
            running_s = until_s - each.since_s if each.standing == "joined" else 0
            found.append(
                Contribution(
                    node=node,
                    name=each.name,
                    standing=each.standing,
                    uptime_s=each.uptime_s + running_s,
                    tokens=each.credited.tokens,
                    token_layers=each.credited.token_layers,
                    uncredited_tokens=each.uncredited.tokens,
                    uncredited_token_layers=each.uncredited.token_layers,
                    audits_passed=each.passed,
                    audits_against=each.against,
                    **each.meters,
                )
            )
        return tuple(found)

    def _of(self, node: str) -> _MachineAccount:
        return self._accounts.setdefault(node, _MachineAccount())

    def _leave_all(self, at_s: int) -> None:
        for account in self._accounts.values():
            account.stand(None, at_s)

    def _lay(self, entry: LayoutSet, place: str) -> None:
        if entry.epoch < self._epochs.get(entry.chain, 0):
            raise LedgerError(f"{place}.epoch", "epochs of a chain only grow")
        after = 0
        for at, stage in enumerate(entry.stages):
            if stage.start != after or stage.stop <= stage.start:
                raise LedgerError(f"{place}.stages[{at}]", f"layer {after} comes next")
            after = stage.stop
        if entry.stages:
            self._epochs[entry.chain], self._layouts[entry.chain] = entry.epoch, entry
        else:
            # Another of this name may follow.
            self._epochs.pop(entry.chain, None)
            self._layouts.pop(entry.chain, None)

    def _credit(self, entry: ReceiptsTaken) -> None:
        self.receipts += entry.count
        for node, work in entry.credited.items():
            self._of(node).credited += work
        for node, work in entry.uncredited.items():
            self._of(node).uncredited += work

    def _audit(self, entry: AuditTaken, place: str) -> None:
        for node, finding in entry.findings.items():
            account = self._of(node)
            if finding == "passed":
                account.passed += 1
            else:
                account.against += 1
        for node, work in entry.withdrawn.items():
            account = self._of(node)
            try:
                account.credited -= work
            except ValueError:
                raise LedgerError(
                    f"{place}.withdrawn.{node}", "more is taken back than was credited"
                ) from None
            account.uncredited += work

    def _read(self, entry: MeterRead) -> None:
        for account in self._accounts.values():
            account.meters["stored_bytes"] = 0
        for node, size_bytes in entry.stored_bytes.items():
            self._of(node).meters["stored_bytes"] = size_bytes
        for name in ("steps", "seeded_bytes", "relayed_bytes"):
            for node, count in getattr(entry, name).items():
                meters = self._of(node).meters
                meters[name] = meters.get(name, 0) + count
