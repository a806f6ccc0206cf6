"""Metering of API keys: requests of the last minute, tokens of the day (UTC), and the 429 that ends either.

All servers of a cluster draw from one ledger (`node.telemetry.quota`), a portion at a time. What is about to be
generated is held back until it is known, so that requests at the same time cannot spend it twice. Used by one event
loop.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from shardcompute.api.errors import RequestError
from shardcompute.core.units import count_of
from shardcompute.node.telemetry.quota import DAY_S, QuotaDraw, QuotaGrant, QuotaSource
from shardcompute.security.api_keys import KeySummary

_MOST_KEYS = 10_000
_MOST_PORTION = 2048
_PARTS = 200
"""What is kept in store is at most such a part of a day's tokens."""
_RATE_PARTS = 20
_REQUESTS_VALID_S = 10.0


@dataclass(slots=True)
class _Account:
    """What this server knows of one key."""

    drawing: asyncio.Lock = field(default_factory=asyncio.Lock)
    day: int = -1
    version: int = 0
    spent: int = 0
    in_flight: int = 0
    store: int = 0
    """Tokens that were granted and that nobody uses."""
    drawn_s: float = -math.inf
    requests: int = 0
    requests_until_s: float = -math.inf


@dataclass(slots=True)
class TokenHold:
    """Tokens that one generation may spend. `settle` it once."""

    prompt: int
    answer: int
    settle: Callable[[int], None]
    """Say how many it has."""


class KeyMeter:
    """Knows keys that have limits; others are not counted."""

    def __init__(
        self,
        source: QuotaSource,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._source = source
        self._clock = clock
        self._wall_clock = wall_clock
        self._accounts: dict[str, _Account] = {}

    async def admit(self, caller: KeySummary, *, is_counted: bool = True) -> None:
        """429 if this is a request too many, or the day's tokens are spent. Not every request is counted."""
        if not is_counted:
            return
        account, most = self._account(caller), caller.limits.tokens_per_day
        async with account.drawing:
            if most is not None and self._in_store(account) < 1:
                grant = await self._draw(caller, account)
                if most - grant.spent - grant.held < 1:
                    raise self._too_many_tokens(caller, most, grant, needed=1)
            if caller.limits.requests_per_minute is not None:
                await self._take_request(caller, account, caller.limits.requests_per_minute)

    async def hold(self, caller: KeySummary, prompt: int, answer: int) -> TokenHold:
        """For a generation: as much of `answer` as is left of the day; 429 if that is nothing."""
        account, most = self._account(caller), caller.limits.tokens_per_day
        if most is None:
            return TokenHold(prompt, answer, lambda used: None)
        async with account.drawing:
            missing = prompt + answer - self._in_store(account)
            if missing > 0:
                grant = await self._draw(caller, account, tokens=max(missing, _portion(most)))
                least = prompt + min(1, answer)
                if account.store < least:
                    raise self._too_many_tokens(caller, most, grant, needed=least)
            answer = min(answer, account.store - prompt)
            account.store -= prompt + answer
            account.in_flight += prompt + answer
            account.version += 1
        return TokenHold(prompt, answer, self._settlement(caller, account, prompt + answer))

    def _settlement(self, caller: KeySummary, account: _Account, total: int) -> Callable[[int], None]:
        day, most = account.day, caller.limits.tokens_per_day or 0

        def settle(used: int) -> None:
            if account.day != day:
                return  # What began yesterday is yesterday's.
            account.in_flight -= total
            account.spent += used
            account.store = min(account.store + max(0, total - used), _portion(most))
            account.version += 1
            self._source.settle(_position(caller, account))

        return settle

    def _in_store(self, account: _Account) -> int:
        """Tokens that may be used without asking; none of another day, nor of a lease that has run out."""
        lease_s = self._source.lease_s
        is_old = lease_s is not None and self._clock() - account.drawn_s > lease_s
        if is_old or account.day != int(self._wall_clock() // DAY_S):
            account.store = 0
            account.version += 1
        return account.store

    async def _take_request(self, caller: KeySummary, account: _Account, rate: int) -> None:
        if account.requests < 1 or self._clock() > account.requests_until_s:
            is_far = self._source.lease_s is not None
            wanted = max(1, rate // _RATE_PARTS) if is_far else 1
            valid_s = _REQUESTS_VALID_S if is_far else 0.0
            asked_s = self._clock()
            grant = await self._draw(caller, account, requests=wanted, valid_s=valid_s)
            account.requests, account.requests_until_s = grant.requests, asked_s + valid_s
            if grant.requests < 1:
                raise _refusal(
                    f"The API key {caller.key_id} may send {count_of(rate, 'request')} a minute.",
                    "wait a moment, or ask for another limit",
                    "rate_limit_exceeded",
                    grant.wait_s,
                )
        account.requests -= 1

    async def _draw(
        self,
        caller: KeySummary,
        account: _Account,
        *,
        tokens: int = 0,
        requests: int = 0,
        valid_s: float = 0.0,
    ) -> QuotaGrant:
        draw = _position(caller, account, tokens, requests, valid_s)
        grant = await asyncio.to_thread(self._source.draw, draw, caller.limits)
        if grant.day != account.day:
            account.day, account.spent, account.in_flight, account.store = grant.day, 0, 0, 0
        account.store += grant.tokens
        account.drawn_s = self._clock()
        account.version += 1
        return grant

    def _too_many_tokens(
        self, caller: KeySummary, most: int, grant: QuotaGrant, *, needed: int
    ) -> RequestError:
        left = most - grant.spent
        spent = f"of the {most} tokens that the API key {caller.key_id} may use a day"
        if needed > left:
            message = f"{max(0, left)} {spent} are left, and this needs {needed} or more."
            now_s = self._wall_clock()
            return _refusal(message, "the day ends at 00:00 UTC", "insufficient_quota", DAY_S - now_s % DAY_S)
        message = (
            f"{left} {spent} are left, and requests that are being answered may use {grant.held} of them."
        )
        return _refusal(message, "send it again when one has ended", "rate_limit_exceeded", 1.0)

    def _account(self, caller: KeySummary) -> _Account:
        if caller.key_id not in self._accounts:
            while len(self._accounts) >= _MOST_KEYS:
                del self._accounts[next(iter(self._accounts))]
            self._accounts[caller.key_id] = _Account()
        return self._accounts[caller.key_id]


def _portion(most: int) -> int:
    return min(_MOST_PORTION, most // _PARTS)


def _position(
    caller: KeySummary, account: _Account, tokens: int = 0, requests: int = 0, valid_s: float = 0.0
) -> QuotaDraw:
    return QuotaDraw(
        key=caller.key_id,
        day=max(0, account.day),
        version=account.version,
        spent=account.spent,
        held=account.in_flight + account.store,
        tokens=tokens,
        requests=requests,
        valid_s=valid_s,
    )


def _refusal(message: str, hint: str, code: str, wait_s: float) -> RequestError:
    headers = {"retry-after": str(max(1, math.ceil(wait_s)))}
    return RequestError(message, hint=hint, code=code, status=429, headers=headers)
