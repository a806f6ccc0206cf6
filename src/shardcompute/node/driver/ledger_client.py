"""Ledger client of a driver in a process of its own: draws what API keys may use from the coordinator, and tells it
what was used.

Usage goes in numbered reports, one at a time, each told until it is taken: none is lost while both live, none counts
twice. While the coordinator is away keys with limits go on with what was drawn, for a minute at most.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError

from shardcompute.core.closing import Closing
from shardcompute.core.errors import CapacityError
from shardcompute.node.telemetry.quota import LEASE_S, QuotaDraw, QuotaGrant
from shardcompute.node.telemetry.usage import UsageView
from shardcompute.security.api_keys import KeyLimits
from shardcompute.wire import Message
from shardcompute.wire.control import (
    MOST_USAGE_ROWS,
    DrawQuota,
    QuotaGranted,
    ReportUsage,
    UsageRow,
    UsageTaken,
)

log = logging.getLogger(__name__)
_ANSWER_S = 5.0
_EVERY_S = 2.0
_RENEW_TURNS = 10
"""Positions of keys that are being used are told again after so many turns: 20 s of a minute's lease."""


class LedgerClient(Closing):
    """`send` says whether a message went out; `boot` tells this process from others of the same node."""

    lease_s: float | None = LEASE_S

    def __init__(
        self,
        send: Callable[[Message], bool],
        boot: int,
        take_usage: Callable[[], Sequence[UsageView]],
        *,
        every_s: float = _EVERY_S,
        answer_s: float = _ANSWER_S,
    ) -> None:
        self._send = send
        self._boot = boot
        self._take_usage = take_usage
        self._every_s = every_s
        self._answer_s = answer_s
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._asked: dict[int, Future[QuotaGranted]] = {}
        self._positions: dict[str, QuotaDraw] = {}
        """By key, the newest of each that is being used or is to be told."""
        self._untold: set[str] = set()
        self._rows: list[UsageRow] = []
        self._report: ReportUsage | None = None
        self._sequence = 0
        self._wake = threading.Event()
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="ledger", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Tell what is left, once; the coordinator may have gone before."""
        self._is_closed = True
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join()
        self.turn()

    def draw(self, draw: QuotaDraw, limits: KeyLimits) -> QuotaGrant:
        number, answer = next(self._numbers), Future[QuotaGranted]()
        with self._lock:
            self._asked[number] = answer
        try:
            if not self._send(self._message(number, draw)):
                raise self._unheard()
            granted = answer.result(self._answer_s)
        except FutureTimeoutError:
            raise self._unheard() from None
        finally:
            with self._lock:
                del self._asked[number]
        if granted.error:
            raise CapacityError(granted.error, hint="send the request again later")
        return QuotaGrant(
            granted.day, granted.tokens, granted.requests, granted.spent, granted.held, granted.wait_s
        )

    def settle(self, position: QuotaDraw) -> None:
        with self._lock:
            self._positions[position.key] = position
            self._untold.add(position.key)

    def take(self, message: Message) -> None:
        """What the coordinator answered."""
        with self._lock:
            if isinstance(message, QuotaGranted) and message.number in self._asked:
                self._asked[message.number].set_result(message)
            elif isinstance(message, UsageTaken) and message.sequence == self._sequence:
                self._report = None

    def turn(self, *, is_renewing: bool = False) -> None:
        """Tell what there is to tell."""
        with self._lock:
            told = list(self._positions) if is_renewing else sorted(self._untold)
            self._untold.clear()
            positions = [self._positions[key] for key in told]
            # What nobody uses is told once: after a minute the ledger has it back.
            self._positions = {key: each for key, each in self._positions.items() if each.held}
            report = self._next_report()
        for position in positions:
            self._send(self._message(0, position))
        if report is not None:
            self._send(report)

    def _next_report(self) -> ReportUsage | None:
        """The one that was not taken yet, or a new one."""
        if self._report is None:
            self._rows += [
                UsageRow(
                    int(view.start_s),
                    view.key,
                    view.model,
                    view.requests,
                    view.prompt_tokens,
                    view.generated_tokens,
                )
                for view in self._take_usage()
            ]
            if self._rows:
                rows, self._rows = self._rows[:MOST_USAGE_ROWS], self._rows[MOST_USAGE_ROWS:]
                self._sequence += 1
                self._report = ReportUsage(self._boot, self._sequence, rows)
        return self._report

    def _run(self) -> None:
        for turn in itertools.count(1):
            self._wake.wait(self._every_s)
            if self._is_closed:
                return
            try:
                self.turn(is_renewing=turn % _RENEW_TURNS == 0)
            except Exception:
                # Without this one failure would end the accounts for good.
                log.exception("the coordinator could not be told what was used")

    def _message(self, number: int, draw: QuotaDraw) -> DrawQuota:
        return DrawQuota(
            number=number,
            boot=self._boot,
            key=draw.key,
            day=draw.day,
            version=draw.version,
            spent=draw.spent,
            held=draw.held,
            tokens=draw.tokens,
            requests=draw.requests,
            valid_s=draw.valid_s,
        )

    def _unheard(self) -> CapacityError:
        return CapacityError(
            "What this API key may still use cannot be found out: the coordinator is away.",
            hint="send the request again later; keys without limits work",
        )
