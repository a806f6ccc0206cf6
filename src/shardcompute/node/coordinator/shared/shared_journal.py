"""Journal in a store that coordinators share: the same events and notes as in SQLite, written by the leader alone.

Every write holds only if the store's epoch is the leader's own, checked by the store in the same step. A write whose
answer was lost is written again under the same numbers, so that nothing is there twice.
"""

from __future__ import annotations

import threading
import zlib
from collections.abc import Collection, Iterator, Sequence
from itertools import pairwise

from shardcompute.core.errors import JournalError, NotLeadingError, SourceError
from shardcompute.node.coordinator.journal.recovery import CLUSTER_NOTE
from shardcompute.node.coordinator.journal.reserve import DiskReserve
from shardcompute.node.coordinator.shared.key_value import Change, Delete, KeyValueStore, Put
from shardcompute.node.coordinator.shared.leadership import Leadership

_MOST_OPERATIONS = 100
_MOST_BATCH_BYTES = 512 << 10
_MOST_VALUE_BYTES = 1 << 20
"""What etcd takes at once, by default, less what surrounds it."""
_MOST_EVENT_BYTES = 64 << 20
_DIGITS = 16


def cluster_prefix(name: str) -> str:
    """Where in a store the cluster of this name keeps its keys."""
    return f"/shardcompute/{name}/"


class SharedJournal:
    """A `JournalStore`. Without a `leadership` it can be read only. Methods may be called from any thread."""

    is_shared = True
    reserve: DiskReserve | None = None

    def __init__(self, store: KeyValueStore, prefix: str, leadership: Leadership | None = None) -> None:
        self._store = store
        self._prefix = prefix
        self._leadership = leadership
        self._lock = threading.Lock()
        numbers = [number for number, _ in self.numbered_events()]
        self._next = max(numbers, default=0) + 1

    @property
    def place(self) -> str:
        return f"{self._store.name}{self._prefix.rstrip('/')}"

    @property
    def may_act(self) -> bool:
        return self._leadership is not None and self._leadership.is_held

    def append(self, *events: bytes) -> None:
        """In their order. Where the store fails in the middle those before are there, and all of them are written
        again, in the same places, when it is tried again."""
        with self._lock:
            puts = [self._put(self._next + number, event) for number, event in enumerate(events)]
            for batch in _batches(puts):
                self._write(*batch)
            self._next += len(puts)

    def events(self) -> Iterator[bytes]:
        for _, event in self.numbered_events():
            yield event

    def numbered_events(self) -> list[tuple[int, bytes]]:
        return [
            (int(key.rpartition("/")[2]), _unpack(key, value))
            for key, value in self._store.read_all(f"{self._prefix}events/")
        ]

    def compact(self, events: Sequence[bytes], *, keeping: Collection[int] = ()) -> None:
        with self._lock:
            bounds = [0, *sorted(keeping), self._next]
            gaps = pairwise(bounds)
            deletes = [
                Delete(self._event_key(start + (start in keeping)), self._event_key(stop))
                for start, stop in gaps
                if start + (start in keeping) < stop
            ]
            puts = [self._put(self._next + number, event) for number, event in enumerate(events)]
            # Also what was written after a step whose answer was lost: the outcome has it already.
            rest = Delete(self._event_key(self._next + len(puts)), f"{self._prefix}events0")
            self._write(*deletes, *puts, rest)
            self._next += len(puts)

    def shrink(self) -> None:
        """The store sees to that itself."""

    def read_note(self, name: str) -> bytes | None:
        content = self._store.read(f"{self._prefix}notes/{name}")
        return None if content is None else _unpack(name, content)

    def read_notes(self) -> dict[str, bytes]:
        prefix = f"{self._prefix}notes/"
        return {key[len(prefix) :]: _unpack(key, value) for key, value in self._store.read_all(prefix)}

    def write_note(self, name: str, value: bytes) -> None:
        self._write(Put(f"{self._prefix}notes/{name}", _pack(value)))

    def close(self) -> None:
        """The store belongs to whoever opened it."""

    def _write(self, *changes: Change) -> None:
        leadership = self._leadership
        if leadership is None or leadership.is_deposed:
            raise _not_leading()
        if changes and not self._store.write([leadership.condition], changes):
            leadership.check()
            raise _not_leading()

    def _put(self, number: int, event: bytes) -> Put:
        return Put(self._event_key(number), _pack(event))

    def _event_key(self, number: int) -> str:
        return f"{self._prefix}events/{number:0{_DIGITS}d}"


def check_owner(journal: SharedJournal, fingerprint: str | None) -> None:
    """SourceError unless the journal is that of the cluster whose authority has this fingerprint, or of nobody yet."""
    owner = journal.read_note(CLUSTER_NOTE)
    if owner is None or (fingerprint is not None and owner == fingerprint.encode()):
        return
    name = journal.place.rpartition("/")[2]
    if fingerprint is None:
        raise SourceError(
            f"{journal.place} is the journal of a cluster whose authority is not on this machine",
            hint="bring it here: shardcompute backup FILE where it runs, then shardcompute restore FILE here; or begin "
            "another cluster with another --name",
        )
    raise SourceError(
        f"{journal.place} is the journal of another cluster that is called {name}, too",
        hint="use another store, or begin a cluster with another --name",
    )


def _batches(puts: Sequence[Put]) -> Iterator[list[Put]]:
    batch: list[Put] = []
    size_bytes = 0
    for put in puts:
        if batch and (len(batch) >= _MOST_OPERATIONS or size_bytes + len(put.value) > _MOST_BATCH_BYTES):
            yield batch
            batch, size_bytes = [], 0
        batch.append(put)
        size_bytes += len(put.value)
    if batch:
        yield batch


def _pack(value: bytes) -> bytes:
    packed = zlib.compress(value)
    if len(packed) > _MOST_VALUE_BYTES:
        raise SourceError(
            f"{len(packed)} bytes are more than the coordinators' store takes at once",
            hint="serve fewer models or machines from one cluster",
        )
    return packed


def _unpack(key: str, packed: bytes) -> bytes:
    try:
        unpacking = zlib.decompressobj()
        value = unpacking.decompress(packed, _MOST_EVENT_BYTES)
        if unpacking.eof:
            return value
    except zlib.error:
        pass
    raise JournalError(
        f"{key.rpartition('/')[2]} in the coordinators' store is damaged",
        hint="restore the cluster from a backup: shardcompute restore FILE",
    )


def _not_leading() -> NotLeadingError:
    return NotLeadingError(
        "another coordinator leads this cluster", hint="ask that one; this one waits to take over"
    )
