"""Leadership: which coordinator of a cluster decides, by a lease in their store and an epoch that fences.

The leader's key lives as long as its lease. Whoever finds none takes it and raises the epoch in the same step; every
write of a leader names its epoch, so that nothing of a former one is ever written once another leads. Acting is bounded
by the lease: a leader counts it from when it asked for it, which is earlier than the store does, and stops before the
store lets anybody else begin.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable

import msgspec

from shardcompute.core.errors import StoreError
from shardcompute.node.coordinator.shared.key_value import Condition, KeyValueStore, Put

log = logging.getLogger(__name__)
TTL_S = 2.0
"""The least that etcd grants. Another takes over when so much has passed without a sign of life."""
_MARGIN = 0.1
_RENEWALS = 5


class LeaderNote(msgspec.Struct, frozen=True):
    """What stands under the leader's key."""

    node: str
    epoch: int
    since_s: float = 0.0
    """When it began to lead, in seconds since 1970."""


def leader_key(prefix: str) -> str:
    return f"{prefix}leader"


class Leadership:
    """One coordinator's claim to lead. Methods may be called from any thread; those that change it (`try_to_lead`,
    `renew`, `resign`) by one at a time."""

    def __init__(
        self,
        store: KeyValueStore,
        prefix: str,
        node: str,
        *,
        ttl_s: float = TTL_S,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self.store = store
        self.prefix = prefix
        self.node = node
        self.epoch = 0
        """Of this leadership; 0 while it has not begun."""
        self.is_deposed = False
        """Another has led since. It does not end."""
        self._ttl_s = ttl_s
        self._clock = clock
        self._wall_clock = wall_clock
        self._lease = 0
        self._held_until_s = 0.0
        self._since_s = 0.0

    @property
    def is_held(self) -> bool:
        """Whether nobody else can lead at this moment."""
        return not self.is_deposed and self._clock() < self._held_until_s

    @property
    def condition(self) -> Condition:
        """What must hold for a write of this leader."""
        return Condition(self._epoch_key, b"%d" % self.epoch)

    @property
    def renew_every_s(self) -> float:
        return self._ttl_s / _RENEWALS

    def leader(self) -> LeaderNote | None:
        """Who leads now, None where nobody does; StoreError where that cannot be told."""
        content = self.store.read(self._leader_key)
        with contextlib.suppress(ValueError):
            return None if content is None else msgspec.json.decode(content, type=LeaderNote)
        return LeaderNote("unknown", 0)

    def try_to_lead(self) -> bool:
        """Lead from now on, unless somebody does; StoreError where the store is away."""
        if self.leader() is not None:
            return False
        known = self.store.read(self._epoch_key)
        # Nodes listen to no lower epoch than they have heard: one that begins anew must be higher, too.
        epoch = _epoch_of(known) + 1 if known is not None else int(self._wall_clock())
        asked_s = self._clock()
        grant = self.store.grant(self._ttl_s)
        self._since_s = self._wall_clock()
        note = msgspec.json.encode(LeaderNote(self.node, epoch, self._since_s))
        has_won = self.store.write(
            [Condition(self._leader_key, None), Condition(self._epoch_key, known)],
            [Put(self._leader_key, note, grant.lease), Put(self._epoch_key, b"%d" % epoch)],
        )
        if not has_won:
            self._let_go(grant.lease)
            return False
        self.epoch, self.is_deposed, self._lease = epoch, False, grant.lease
        self._hold(asked_s, grant.ttl_s)
        log.info("this coordinator leads, in epoch %d", epoch)
        return True

    def renew(self) -> None:
        """Show a sign of life. Where the lease has run out and nobody else has led, it is taken again."""
        asked_s = self._clock()
        left_s = self.store.keep_alive(self._lease)
        if left_s > 0:
            self._hold(asked_s, left_s)
        elif not self.is_deposed:
            self._lead_again()

    def check(self) -> None:
        """A write was refused: see whether another leads."""
        if _epoch_of(self.store.read(self._epoch_key)) != self.epoch:
            self._depose()

    def resign(self) -> None:
        """Let another lead at once."""
        lease, self._lease, self._held_until_s = self._lease, 0, 0.0
        if lease:
            self._let_go(lease)

    def _lead_again(self) -> None:
        asked_s = self._clock()
        grant = self.store.grant(self._ttl_s)
        note = msgspec.json.encode(LeaderNote(self.node, self.epoch, self._since_s))
        if self.store.write([self.condition], [Put(self._leader_key, note, grant.lease)]):
            self._lease = grant.lease
            self._hold(asked_s, grant.ttl_s)
            log.warning("the lease ran out, and nobody else has led since: this coordinator goes on")
        else:
            self._let_go(grant.lease)
            self.check()

    def _hold(self, asked_s: float, ttl_s: float) -> None:
        self._held_until_s = asked_s + ttl_s * (1 - _MARGIN)

    def _depose(self) -> None:
        if not self.is_deposed:
            log.warning("another coordinator leads; epoch %d is over", self.epoch)
        self.is_deposed = True

    def _let_go(self, lease: int) -> None:
        with contextlib.suppress(StoreError):
            self.store.revoke(lease)

    @property
    def _leader_key(self) -> str:
        return leader_key(self.prefix)

    @property
    def _epoch_key(self) -> str:
        return f"{self.prefix}epoch"


class LeaseKeeper:
    """Renews a leadership in a thread of its own, until it is closed or another leads."""

    def __init__(self, leadership: Leadership) -> None:
        self._leadership = leadership
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="lease", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closing.set()
        self._thread.join()

    def _keep(self) -> None:
        is_away = False
        while not self._closing.wait(self._leadership.renew_every_s) and not self._leadership.is_deposed:
            try:
                self._leadership.renew()
                is_away = False
            except StoreError as error:
                if not is_away:
                    log.warning("the lease is not renewed: %s", error.message)
                is_away = True


def _epoch_of(content: bytes | None) -> int:
    return int(content) if content is not None and content.isdigit() else 0
