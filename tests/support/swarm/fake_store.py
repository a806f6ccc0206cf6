"""A key-value store in memory, as coordinators share one: with a clock of its own, and readers that can be cut off."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from shardcompute.core.errors import StoreError
from shardcompute.node.coordinator.shared.key_value import Change, Condition, Grant, Put

Result = TypeVar("Result")


class FakeStore:
    """What is true. `client` gives one reader's view of it."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.values: dict[str, tuple[bytes, int]] = {}
        self.is_down = False
        self.lock = threading.RLock()
        self._leases: dict[int, tuple[float, float]] = {}
        self._numbers = itertools.count(1)

    def client(self) -> FakeStoreClient:
        return FakeStoreClient(self)

    def expire(self) -> None:
        over = {lease for lease, (until_s, _) in self._leases.items() if until_s <= self.clock()}
        for lease in over:
            self.revoke(lease)

    def revoke(self, lease: int) -> None:
        self._leases.pop(lease, None)
        self.values = {key: value for key, value in self.values.items() if value[1] != lease or not lease}

    def grant(self, ttl_s: float) -> Grant:
        lease = next(self._numbers)
        self._leases[lease] = (self.clock() + ttl_s, ttl_s)
        return Grant(lease, ttl_s)

    def keep_alive(self, lease: int) -> float:
        if lease not in self._leases:
            return 0.0
        ttl_s = self._leases[lease][1]
        self._leases[lease] = (self.clock() + ttl_s, ttl_s)
        return ttl_s

    def write(self, conditions: Sequence[Condition], changes: Sequence[Change]) -> bool:
        for each in conditions:
            known = self.values.get(each.key)
            if (None if known is None else known[0]) != each.value:
                return False
        if any(isinstance(each, Put) and each.lease and each.lease not in self._leases for each in changes):
            return False
        for change in changes:
            if isinstance(change, Put):
                self.values[change.key] = (change.value, change.lease)
            else:
                gone = [key for key in self.values if change.start <= key < change.stop]
                for key in gone:
                    del self.values[key]
        return True


class FakeStoreClient:
    """One coordinator's way to the store. While `is_cut_off` nothing gets through; `loses_answers` lets what is
    asked for happen and says nothing."""

    name = "fake://store"

    def __init__(self, store: FakeStore) -> None:
        self._store = store
        self.is_cut_off = False
        self.loses_answers = False

    def read(self, key: str) -> bytes | None:
        return self._ask(lambda: self._store.values.get(key, (None, 0))[0])

    def read_all(self, prefix: str) -> list[tuple[str, bytes]]:
        return self._ask(
            lambda: sorted((k, v[0]) for k, v in self._store.values.items() if k.startswith(prefix))
        )

    def write(self, conditions: Sequence[Condition], changes: Sequence[Change]) -> bool:
        return self._ask(lambda: self._store.write(conditions, changes))

    def grant(self, ttl_s: float) -> Grant:
        return self._ask(lambda: self._store.grant(ttl_s))

    def keep_alive(self, lease: int) -> float:
        return self._ask(lambda: self._store.keep_alive(lease))

    def revoke(self, lease: int) -> None:
        return self._ask(lambda: self._store.revoke(lease))

    def close(self) -> None:
        pass

    def _ask(self, do: Callable[[], Result]) -> Result:
        with self._store.lock:
            if self.is_cut_off or self._store.is_down:
                raise StoreError("the store does not answer")
            self._store.expire()
            result = do()
            if self.loses_answers:
                raise StoreError("the store did not answer in time")
            return result
