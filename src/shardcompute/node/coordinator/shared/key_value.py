"""Key-value store as coordinators share it: small values under keys, conditions and changes in one step, leases.

What `write` did is seen by every later read of anybody. Keys with a lease are gone when the lease has run out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Condition:
    """A key has this value; None: there is no such key."""

    key: str
    value: bytes | None


@dataclass(frozen=True, slots=True)
class Put:
    """Write a value; with a `lease`, for as long as that is kept alive."""

    key: str
    value: bytes
    lease: int = 0


@dataclass(frozen=True, slots=True)
class Delete:
    """Delete the keys from `start` to before `stop`."""

    start: str
    stop: str


Change = Put | Delete


@dataclass(frozen=True, slots=True)
class Grant:
    """A lease, and for how long it is good after each sign of life: the store may give more than was asked for."""

    lease: int
    ttl_s: float


class KeyValueStore(Protocol):
    """Methods may be called from any thread. All of them raise StoreError where the store does not answer in time;
    then what was asked for may have been done, or be done yet."""

    @property
    def name(self) -> str:
        """For people."""
        ...

    def read(self, key: str) -> bytes | None: ...

    def read_all(self, prefix: str) -> list[tuple[str, bytes]]:
        """All keys that begin so, in their order."""
        ...

    def write(self, conditions: Sequence[Condition], changes: Sequence[Change]) -> bool:
        """All changes in one step, if all conditions hold; whether they do."""
        ...

    def grant(self, ttl_s: float) -> Grant: ...

    def keep_alive(self, lease: int) -> float:
        """For how many seconds from now on it is good; 0 where it has run out."""
        ...

    def revoke(self, lease: int) -> None: ...

    def close(self) -> None: ...
