"""Measured links as tables, made once for all requests that have the same: a thousand machines have half a million."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
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
        self._matrices: dict[tuple[float, float], LinkMatrices] = {}

    @cached_property
    def by_pair(self) -> dict[tuple[str, str], MeasuredLink]:
        return {(link.a, link.b): link for link in self.links}

    def matrices(self, policy: PlacementPolicy) -> LinkMatrices:
        """With the policy's defaults for what was not measured."""
        defaults = (policy.default_rtt_s, policy.default_bytes_per_s)
        known = self._matrices.get(defaults)
        if known is None:
            known = self._matrices[defaults] = _make_matrices(self.links, *defaults)
        return known


def _make_matrices(links: tuple[MeasuredLink, ...], rtt_s: float, bytes_per_s: float) -> LinkMatrices:
    starts, stops = [link.a for link in links], [link.b for link in links]
    index = {name: i for i, name in enumerate(dict.fromkeys([*starts, *stops]))}
    shape = (len(index) + 1, len(index) + 1)
    rtts, rates = np.full(shape, rtt_s), np.full(shape, bytes_per_s)
    a, b = (
        np.array([index[name] for name in starts], np.int64),
        np.array([index[name] for name in stops], np.int64),
    )
    rates[a, b] = rates[b, a] = np.array([link.bytes_per_s for link in links], np.float64)
    rtts[a, b] = rtts[b, a] = np.array([link.rtt_s if link.is_open else inf for link in links], np.float64)
    return LinkMatrices(index, rtts, rates)


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
