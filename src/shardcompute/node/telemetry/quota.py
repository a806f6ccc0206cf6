"""Quota ledger: what API keys with limits have used, counted once for all servers of a cluster.

Each server (a *holder*) draws tokens of the day in portions and says with every draw how much it has spent so far and
what it still holds: cumulative figures, so that a message that comes twice counts once, and a ledger that forgot
learns again. What a holder that is heard no more still held goes back after a minute; what it spent unheard is the
user's gain. Requests a minute are a sliding window; it is written down with the rest, now and then, so that who is
started anew, or takes over, forgives those of the last seconds at most.
"""

from __future__ import annotations

import math
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from shardcompute.core.errors import SourceError
from shardcompute.security.api_keys import KeyLimits

DAY_S = 86_400.0
MINUTE_S = 60.0
LEASE_S = 60.0
"""So long a holder in another process may use what it was given without being heard again."""
_SHARDS = 16
_MOST_KEYS = 10_000
_MOST_LOT_S = 2 * MINUTE_S
"""So long a request counts at most, whatever clock wrote it down."""
_MOST_HOLDERS = 64


@dataclass(frozen=True, slots=True)
class QuotaDraw:
    """A holder's position on one key, and what it wants: `tokens` of the day, `requests` of the minute. With neither it
    only tells, and is told."""

    key: str
    day: int
    """Whose position this is, in days since 1970."""
    version: int
    """Grows with the position: of two that overtook each other the newer counts."""
    spent: int
    held: int
    """Granted and not spent: being used, or in store."""
    tokens: int = 0
    requests: int = 0
    valid_s: float = 0.0
    """So long after they were granted requests may be used."""


@dataclass(frozen=True, slots=True)
class QuotaGrant:
    day: int
    tokens: int
    requests: int
    spent: int
    """By all holders."""
    held: int
    """By all holders, with what was granted now."""
    wait_s: float = 0.0
    """Until another request may be granted, where none was."""


class QuotaSource(Protocol):
    """What a server's meter draws from."""

    lease_s: float | None
    """How long what was granted may be used without another draw; None: for as long as this process runs."""

    def draw(self, draw: QuotaDraw, limits: KeyLimits) -> QuotaGrant:
        """May wait for a disk or a network; CapacityError where nobody can be asked."""
        ...

    def settle(self, position: QuotaDraw) -> None:
        """Tell how things stand; never waits."""
        ...


class _Holder(msgspec.Struct, array_like=True):
    spent: int = 0
    held: int = 0
    version: int = 0


class _KeyDay(msgspec.Struct, array_like=True):
    holders: dict[str, _Holder] = {}
    gone: int = 0
    """Spent by holders that are not listed any more."""

    @property
    def spent(self) -> int:
        return self.gone + sum(each.spent for each in self.holders.values())

    @property
    def held(self) -> int:
        return sum(each.held for each in self.holders.values())


class _Shard(msgspec.Struct, array_like=True):
    day: int
    keys: dict[str, _KeyDay]
    windows: dict[str, list[tuple[int, int]]] = {}
    """Of the last minute's requests: until when (in seconds since 1970) how many count."""


@dataclass(slots=True)
class _Window:
    """Requests of the last minute: until when each lot counts."""

    lots: deque[tuple[float, int]] = field(default_factory=deque)
    used: int = 0

    def take(self, rate: int, wanted: int, valid_s: float, now_s: float) -> tuple[int, float]:
        while self.lots and self.lots[0][0] <= now_s:
            self.used -= self.lots.popleft()[1]
        granted = max(0, min(wanted, rate - self.used))
        if granted:
            self.lots.append((now_s + MINUTE_S + valid_s, granted))
            self.used += granted
            return granted, 0.0
        return 0, self.lots[0][0] - now_s if self.lots else 0.0

    def told(self, now_s: float, wall_s: float) -> list[tuple[int, int]]:
        """By the second, so that it is short however many there were."""
        counts: dict[int, int] = {}
        for until_s, count in self.lots:
            if until_s > now_s:
                at_s = math.ceil(wall_s + until_s - now_s)
                counts[at_s] = counts.get(at_s, 0) + count
        return sorted(counts.items())

    @classmethod
    def learnt(cls, told: list[tuple[int, int]], now_s: float, wall_s: float) -> _Window:
        lots = ((min(at_s - wall_s, _MOST_LOT_S), count) for at_s, count in told)
        left = sorted((now_s + left_s, count) for left_s, count in lots if left_s > 0 and count > 0)
        return cls(deque(left), sum(count for _, count in left))


class QuotaLedger:
    """Methods may be called from any thread. `read` and `write` keep notes by name; what was granted is written before
    it is used, what was spent now and then and by `flush`."""

    lease_s: float | None = None

    def __init__(
        self,
        *,
        own: str = "own",
        read: Callable[[str], bytes | None] = lambda name: None,
        write: Callable[[str, bytes], object] = lambda name, content: None,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        """`own` is the holder in this process, which is never given up."""
        self._own = own
        self._write = write
        self._clock = clock
        self._wall_clock = wall_clock
        self._lock = threading.Lock()
        self._writing = threading.Lock()
        self._windows: list[dict[str, _Window]] = [{} for _ in range(_SHARDS)]
        self._heard_s: dict[tuple[str, str], float] = {}
        """By key and holder."""
        self._dirty: set[int] = set()
        self._day = self._today()
        self._shards: list[dict[str, _KeyDay]] = [{} for _ in range(_SHARDS)]
        for number in range(_SHARDS):
            self._load(number, read(_name(number)))

    def draw(self, draw: QuotaDraw, limits: KeyLimits) -> QuotaGrant:
        return self.draw_for(self._own, draw, limits)

    def settle(self, position: QuotaDraw) -> None:
        self._note(self._own, position)

    def draw_for(self, name: str, draw: QuotaDraw, limits: KeyLimits) -> QuotaGrant:
        """What this holder may have of what it wants."""
        with self._lock:
            account = self._position(name, draw)
            tokens = requests = 0
            wait_s, spent = 0.0, account.spent
            if limits.tokens_per_day is not None and draw.tokens:
                tokens = max(0, min(draw.tokens, limits.tokens_per_day - spent - account.held))
                account.holders[name].held += tokens
            if limits.requests_per_minute is not None and draw.requests:
                window = self._windows[shard_of(draw.key)].setdefault(draw.key, _Window())
                requests, wait_s = window.take(
                    limits.requests_per_minute, draw.requests, draw.valid_s, self._clock()
                )
            grant = QuotaGrant(self._day, tokens, requests, spent, account.held, wait_s)
        if tokens:
            self.flush()
        return grant

    def _note(self, name: str, position: QuotaDraw) -> None:
        with self._lock:
            self._position(name, position)

    def flush(self) -> None:
        """Write what has changed."""
        with self._writing:
            with self._lock:
                dirty, self._dirty = sorted(self._dirty), set()
                contents = [(number, msgspec.msgpack.encode(self._told(number))) for number in dirty]
            for number, content in contents:
                self._write(_name(number), content)

    # With the lock held

    def _told(self, number: int) -> _Shard:
        now_s, wall_s = self._clock(), self._wall_clock()
        windows = {key: window.told(now_s, wall_s) for key, window in self._windows[number].items()}
        return _Shard(self._day, self._shards[number], {key: told for key, told in windows.items() if told})

    def _position(self, name: str, draw: QuotaDraw) -> _KeyDay:
        """Of a key, with what this holder says of itself."""
        now_s = self._clock()
        self._open_day()
        number = shard_of(draw.key)
        account = self._shards[number].setdefault(draw.key, _KeyDay())
        self._give_up(draw.key, account, now_s)
        holder = account.holders.setdefault(name, _Holder())
        # A generation that began yesterday was yesterday's.
        if draw.day == self._day and draw.version >= holder.version:
            holder.spent = max(holder.spent, draw.spent)
            holder.held, holder.version = draw.held, draw.version
        self._heard_s[draw.key, name] = now_s
        self._dirty.add(number)
        self._bound(number, account)
        return account

    def _give_up(self, key: str, account: _KeyDay, now_s: float) -> None:
        for name, holder in account.holders.items():
            if name != self._own and now_s - self._heard_s.get((key, name), now_s) > LEASE_S:
                holder.held = 0

    def _open_day(self) -> None:
        today = self._today()
        if today != self._day:
            self._day = today
            self._shards = [{} for _ in range(_SHARDS)]
            self._heard_s.clear()
            self._dirty.update(range(_SHARDS))

    def _bound(self, number: int, account: _KeyDay) -> None:
        while len(account.holders) > _MOST_HOLDERS:
            oldest = next(name for name in account.holders if name != self._own)
            account.gone += account.holders.pop(oldest).spent
        keys = self._shards[number]
        while len(keys) > _MOST_KEYS // _SHARDS:
            del keys[next(iter(keys))]
        windows = self._windows[number]
        while len(windows) > _MOST_KEYS // _SHARDS:
            del windows[next(iter(windows))]

    def _load(self, number: int, content: bytes | None) -> None:
        if content is None:
            return
        try:
            kept = msgspec.msgpack.decode(content, type=_Shard)
        except (ValueError, RecursionError) as error:
            raise SourceError(f"The ledger of tokens is damaged: {error}") from error
        now_s, wall_s = self._clock(), self._wall_clock()
        self._windows[number] = {
            key: _Window.learnt(told, now_s, wall_s) for key, told in kept.windows.items()
        }
        if kept.day == self._day:
            self._shards[number] = kept.keys
            self._heard_s |= {(key, name): now_s for key, each in kept.keys.items() for name in each.holders}

    def _today(self) -> int:
        return int(self._wall_clock() // DAY_S)


def shard_of(key: str) -> int:
    return zlib.crc32(key.encode()) % _SHARDS


def _name(number: int) -> str:
    return f"quota-{number:02}"
