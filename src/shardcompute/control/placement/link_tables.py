"""Measured links as tables, made once for all requests that have the same: a thousand machines have half a million."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from threading import Lock

import numpy as np

from shardcompute.control.policy import PlacementPolicy
from shardcompute.control.solver.space import Floats
from shardcompute.control.state import MeasuredLink

_KEPT = 8


@dataclass(frozen=True, slots=True)
class LinkMatrices:
    """By index and index; the last row and column are those of a machine that nobody has measured."""

    index: dict[str, int]
    rtt_s: Floats
    """Infinite where a link is closed."""
    bytes_per_s: Floats


class LinkTable:
    def __init__(self, links: tuple[MeasuredLink, ...]) -> None:
        self.links = links
        starts, stops = [link.a for link in links], [link.b for link in links]
        self._index = {name: i for i, name in enumerate(dict.fromkeys([*starts, *stops]))}
        self._starts = np.array([self._index[name] for name in starts], np.int64)
        self._stops = np.array([self._index[name] for name in stops], np.int64)
        self._at = np.full((len(self._index), len(self._index)), -1, np.int64)
        self._at[self._starts, self._stops] = self._at[self._stops, self._starts] = np.arange(len(links))
        self._matrices: dict[tuple[float, float], LinkMatrices] = {}

    def find(self, a: str, b: str) -> MeasuredLink | None:
        """What was measured between two machines."""
        one, other = self._index.get(a), self._index.get(b)
        at = -1 if one is None or other is None else int(self._at[one, other])
        return None if at < 0 else self.links[at]

    def matrices(self, policy: PlacementPolicy) -> LinkMatrices:
        """With the policy's defaults for what was not measured."""
        defaults = (policy.default_rtt_s, policy.default_bytes_per_s)
        known = self._matrices.get(defaults)
        if known is None:
            known = self._matrices[defaults] = self._fill(*defaults)
        return known

    def _fill(self, rtt_s: float, bytes_per_s: float) -> LinkMatrices:
        shape = (len(self._index) + 1, len(self._index) + 1)
        rtts, rates = np.full(shape, rtt_s), np.full(shape, bytes_per_s)
        a, b = self._starts, self._stops
        rates[a, b] = rates[b, a] = np.array([link.bytes_per_s for link in self.links], np.float64)
        measured = [link.rtt_s if link.is_open else inf for link in self.links]
        rtts[a, b] = rtts[b, a] = np.array(measured, np.float64)
        return LinkMatrices(self._index, rtts, rates)


class _NewestTables:
    """Found by comparing, not by hashing: mostly the links are the very same objects."""

    def __init__(self) -> None:
        self._kept: tuple[LinkTable, ...] = ()
        self._lock = Lock()

    def find(self, links: tuple[MeasuredLink, ...]) -> LinkTable:
        for table in self._kept:
            if table.links is links or table.links == links:
                return table
        made = LinkTable(links)
        with self._lock:
            self._kept = (made, *self._kept[: _KEPT - 1])
        return made


link_table = _NewestTables().find
