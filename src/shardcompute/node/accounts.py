"""Accounts of a cluster: one ledger for the keys of all its servers, and what drivers elsewhere report of their use."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import replace

from shardcompute.core.errors import ShardComputeError
from shardcompute.core.fields import shorten
from shardcompute.node.telemetry.quota import QuotaDraw, QuotaLedger
from shardcompute.node.telemetry.usage import HOUR_S, UsageView
from shardcompute.security.api_keys import NO_LIMITS, KeyBook
from shardcompute.wire.control import DrawQuota, QuotaGranted, ReportUsage, UsageRow

CountUsage = Callable[[str, int, Iterable[UsageView]], None]
"""Count what a reporter's report of this number tells, once."""
_MOST_HOURS = 24 * 7
_MOST_VALID_S = 60.0


class ClusterAccounts:
    """`node.coordinator.control_server.MemberAccounts` over a ledger. Methods may be called from any thread."""

    def __init__(
        self,
        ledger: QuotaLedger,
        keys: Callable[[], KeyBook],
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._ledger = ledger
        self._keys = keys
        self._wall_clock = wall_clock
        self._count: CountUsage | None = None

    def listen(self, count: CountUsage) -> None:
        """From now on reports are taken."""
        self._count = count

    def draw(self, node: str, message: DrawQuota) -> QuotaGranted:
        """What the key may have by the coordinator's own book, whatever the driver believes."""
        limits = next(
            (each.limits for each in self._keys().summaries(message.key) if each.key_id == message.key),
            NO_LIMITS,
        )
        draw = QuotaDraw(
            message.key,
            message.day,
            message.version,
            message.spent,
            message.held,
            message.tokens,
            message.requests,
            min(max(0.0, message.valid_s), _MOST_VALID_S),
        )
        if limits == NO_LIMITS:
            draw = replace(draw, tokens=0, requests=0)
        try:
            granted = self._ledger.draw_for(f"{node}:{message.boot}", draw, limits)
        except ShardComputeError as error:
            return QuotaGranted(message.number, error=shorten(error.message))
        return QuotaGranted(
            message.number,
            granted.day,
            granted.tokens,
            granted.requests,
            granted.spent,
            granted.held,
            granted.wait_s,
        )

    def count(self, node: str, message: ReportUsage) -> bool:
        if self._count is None:
            return False
        now_s = self._wall_clock()
        self._count(f"{node}:{message.boot}", message.sequence, [_view(each, now_s) for each in message.rows])
        return True


def _view(row: UsageRow, now_s: float) -> UsageView:
    """Of an hour that there was: clocks of other machines may be wrong."""
    hour_s = now_s - now_s % HOUR_S
    start_s = float(row.start_s - row.start_s % HOUR_S)
    if not hour_s - _MOST_HOURS * HOUR_S <= start_s <= hour_s:
        start_s = hour_s
    return UsageView(
        start_s=start_s,
        span_s=HOUR_S,
        key=row.key,
        model=row.model,
        requests=row.requests,
        prompt_tokens=row.prompt_tokens,
        generated_tokens=row.generated_tokens,
    )
