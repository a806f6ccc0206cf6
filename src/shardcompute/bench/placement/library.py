"""A library of layouts that were computed before, found again by a fingerprint of the machines' latencies.

Two fingerprints, neither of which knows the machines' names: quantiles of all latencies, and persistent homology in
dimension 0, which is the lengths of a minimum spanning tree's edges: at which distance groups of machines merge. A
layout is kept by the machines' ranks in speed, so that it can be laid over other machines.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from shardcompute.control.solver.space import CountedOrder, Floats, Ints, OrderCosts, SearchSpace
from shardcompute.control.solver.spanning import tree_edges

Fingerprint = Callable[[SearchSpace], Floats]
_QUANTILES = np.linspace(0.0, 1.0, 17)


def quantile_key(space: SearchSpace) -> Floats:
    """Of the latencies between any two machines."""
    inner = space.hops[:-1, :-1]
    return _log_quantiles(inner[np.triu_indices(len(inner), 1)])


def persistence_key(space: SearchSpace) -> Floats:
    """Of the distances at which components merge (0-dimensional persistence)."""
    return _log_quantiles(tree_edges(space.hops[:-1, :-1]))


KEYS: dict[str, Fingerprint] = {"quantile keys": quantile_key, "persistence keys": persistence_key}


def _log_quantiles(values: Floats) -> Floats:
    finite = values[np.isfinite(values)]
    return np.asarray(np.log(np.maximum(np.quantile(finite, _QUANTILES), 1e-7)), np.float64)


@dataclass(frozen=True, slots=True)
class KeptLayout:
    key: Floats
    ranks: tuple[int, ...]
    """The order of a ring, each machine by its rank in speed."""


class LayoutLibrary:
    def __init__(self, fingerprint: Fingerprint) -> None:
        self._fingerprint = fingerprint
        self.layouts: list[KeptLayout] = []

    def add(self, space: SearchSpace, order: Sequence[int]) -> None:
        rank_of = np.argsort(_by_speed(space))
        self.layouts.append(KeptLayout(self._fingerprint(space), tuple(int(rank_of[i]) for i in order)))

    def find(self, space: SearchSpace) -> int:
        """Which layout's key is nearest."""
        key = self._fingerprint(space)
        return int(np.argmin([float(np.abs(each.key - key).sum()) for each in self.layouts]))

    def recall(self, costs: OrderCosts, times_s: Floats) -> tuple[int, CountedOrder]:
        """The nearest layout, laid over these machines."""
        at = self.find(costs.space)
        machines = _by_speed(costs.space)
        order = [int(machines[rank]) for rank in self.layouts[at].ranks]
        return at, costs.judge(order, times_s)


def _by_speed(space: SearchSpace) -> Ints:
    return np.asarray(np.lexsort((-space.room, space.seconds_per_byte)), np.int64)
