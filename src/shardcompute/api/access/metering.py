"""Metering of API keys: requests of the last minute, tokens of the day (UTC), and the 429 that ends either.

What is about to be generated is held back from the day's tokens until it is known, so that requests at the same time
cannot spend them twice. Used by one event loop; each server counts for itself.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from shardcompute.api.errors import RequestError
from shardcompute.core.units import count_of
from shardcompute.security.api_keys import KeySummary

MINUTE_S = 60.0
DAY_S = 86_400.0
_MOST_KEYS = 10_000
SpentTokens = Callable[[str, float], int]
"""Tokens that a key (by its id) has spent since a moment, as far as is on record. May take a while."""


@dataclass(slots=True)
class _Account:
    """What one key has used."""

    requests_s: deque[float] = field(default_factory=deque)
    day_s: float = -1.0
    spent: int = 0
    held: int = 0


@dataclass(slots=True)
class TokenHold:
    """Tokens that one generation may spend. `settle` it once."""

    account: _Account
    day_s: float
    prompt: int
    answer: int

    def settle(self, used: int) -> None:
        # What began yesterday is yesterday's.
        if self.account.day_s == self.day_s:
            self.account.held -= self.prompt + self.answer
            self.account.spent += used


class KeyMeter:
    """Knows keys that have limits; others are not counted."""

    def __init__(
        self,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
        spent: SpentTokens | None = None,
    ) -> None:
        self._clock = clock
        self._wall_clock = wall_clock
        self._spent = spent
        self._accounts: dict[str, _Account] = {}

    async def admit(self, caller: KeySummary, *, is_counted: bool = True) -> None:
        """429 if this is a request too many, or the day's tokens are spent. Not every request is counted."""
        account = self._account(caller)
        await self._open_day(caller, account)
        if not is_counted:
            return
        self._check_day(caller, account, needed=1)
        rate, now_s = caller.limits.requests_per_minute, self._clock()
        if rate is None:
            return
        recent = account.requests_s
        while recent and recent[0] <= now_s - MINUTE_S:
            recent.popleft()
        if len(recent) >= rate:
            raise _refusal(
                f"The API key {caller.key_id} may send {count_of(rate, 'request')} a minute.",
                "wait a moment, or ask for another limit",
                "rate_limit_exceeded",
                recent[0] + MINUTE_S - now_s,
            )
        recent.append(now_s)

    def hold(self, caller: KeySummary, prompt: int, answer: int) -> TokenHold:
        """For a generation: as much of `answer` as is left of the day; 429 if that is nothing."""
        account, most = self._account(caller), caller.limits.tokens_per_day
        if most is not None:
            self._check_day(caller, account, needed=prompt + min(1, answer))
            answer = min(answer, most - account.spent - account.held - prompt)
        account.held += prompt + answer
        return TokenHold(account, account.day_s, prompt, answer)

    def _check_day(self, caller: KeySummary, account: _Account, *, needed: int) -> None:
        most = caller.limits.tokens_per_day
        if most is None or account.spent + account.held + needed <= most:
            return
        left, held = most - account.spent, account.held
        spent = f"of the {most} tokens that the API key {caller.key_id} may use a day"
        if needed > left:
            message = f"{max(0, left)} {spent} are left, and this needs {needed} or more."
            now_s = self._wall_clock()
            raise _refusal(message, "the day ends at 00:00 UTC", "insufficient_quota", DAY_S - now_s % DAY_S)
        message = f"{left} {spent} are left, and requests that are being answered may use {held} of them."
        raise _refusal(message, "send it again when one has ended", "rate_limit_exceeded", 1.0)

    async def _open_day(self, caller: KeySummary, account: _Account) -> None:
        """Begins to count a new day, with what is on record of it: a restart forgives nothing."""
        now_s = self._wall_clock()
        day_s = now_s - now_s % DAY_S
        if caller.limits.tokens_per_day is None or account.day_s == day_s:
            return
        spent = 0 if self._spent is None else await asyncio.to_thread(self._spent, caller.key_id, day_s)
        if account.day_s != day_s:  # Another request may have been faster.
            account.day_s, account.spent, account.held = day_s, spent, 0

    def _account(self, caller: KeySummary) -> _Account:
        if caller.key_id not in self._accounts:
            while len(self._accounts) >= _MOST_KEYS:
                del self._accounts[next(iter(self._accounts))]
            self._accounts[caller.key_id] = _Account()
        return self._accounts[caller.key_id]


def _refusal(message: str, hint: str, code: str, wait_s: float) -> RequestError:
    headers = {"retry-after": str(max(1, math.ceil(wait_s)))}
    return RequestError(message, hint=hint, code=code, status=429, headers=headers)
