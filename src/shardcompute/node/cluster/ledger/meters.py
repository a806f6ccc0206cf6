"""Meters: what machines report of themselves, read from time to time and told to the ledger as what was added since."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field, replace

from shardcompute.control.state import ClusterState
from shardcompute.node.service import StageWork
from shardcompute.trust.ledger.records import MOST_NODES, MeterRead

_MOST_BYTES = 1 << 53
"""That a member may claim."""


@dataclass(frozen=True, slots=True)
class MeterReadings:
    """By node, since this process started; `stored_bytes` as of now."""

    steps: dict[str, int] = field(default_factory=dict)
    stored_bytes: dict[str, int] = field(default_factory=dict)
    seeded_bytes: dict[str, int] = field(default_factory=dict)
    relayed_bytes: dict[str, int] = field(default_factory=dict)


ReadMeters = Callable[[], MeterReadings]


class SeededBytes:
    """What members say they have sent, over several lives of their processes. Methods may be called from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lives: dict[str, tuple[int, int]] = {}
        """By node: of the lives before this one, and of this one."""

    def hear(self, node: str, count: int) -> None:
        with self._lock:
            before, now = self._lives.get(node, (0, 0))
            if count < now:
                before += now
            if node in self._lives or len(self._lives) < MOST_NODES:
                self._lives[node] = (before, min(count, _MOST_BYTES))

    def totals(self) -> dict[str, int]:
        with self._lock:
            return {node: sum(lives) for node, lives in self._lives.items()}


class Meters:
    """What of the readings is on record, and what is not yet."""

    def __init__(self, read: ReadMeters) -> None:
        self._read = read
        self._told = MeterReadings()
        self._latest = MeterReadings()
        self._seeded = SeededBytes()

    def heard(self, node: str, seeded_bytes: int) -> None:
        """A member says what it has sent to others of weights since its process started. From any thread."""
        self._seeded.hear(node, seeded_bytes)

    def read(self, members: Collection[str]) -> MeterRead | None:
        """What was added since the last entry that was written, of these machines; None: nothing."""
        latest = self._read()
        latest = replace(latest, seeded_bytes={**self._seeded.totals(), **latest.seeded_bytes})
        self._latest = latest
        stored, before = _of(latest.stored_bytes, members), _of(self._told.stored_bytes, members)
        added = {
            name: _added(getattr(self._told, name), getattr(latest, name), members)
            for name in ("steps", "seeded_bytes", "relayed_bytes")
        }
        if stored == before and not any(added.values()):
            return None
        return MeterRead(number=0, at_s=0, stored_bytes=stored, **added)

    def stored(self, members: Collection[str]) -> dict[str, int]:
        """As of the last reading."""
        return _of(self._latest.stored_bytes, members)

    def settle(self) -> None:
        """What was read last is on record."""
        self._told = self._latest


def _added(told: dict[str, int], latest: dict[str, int], members: Collection[str]) -> dict[str, int]:
    found = {node: count - told.get(node, 0) for node, count in latest.items() if node in members}
    return {node: count for node, count in found.items() if count > 0}


def _of(counts: dict[str, int], members: Collection[str]) -> dict[str, int]:
    return {node: count for node, count in counts.items() if node in members and count}


def steps_of(stages: Iterable[StageWork]) -> dict[str, int]:
    """Of every machine, whichever chains it computed for."""
    found: Counter[str] = Counter()
    for stage in stages:
        found[stage.node] += stage.steps
    return dict(found)


def stored_bytes_of(state: ClusterState) -> dict[str, int]:
    """Layers in the memory of machines that are there."""
    return {
        node.id: sum(shard.size_bytes for shard in node.shards)
        for node in state.nodes.values()
        if node.is_live
    }
