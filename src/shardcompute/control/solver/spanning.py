"""Spanning trees of links: the least that any way through so many machines has to travel."""

from __future__ import annotations

import numpy as np

from shardcompute.control.solver.space import Floats


def tree_edges(weights: Floats) -> Floats:
    """The lengths of a minimum spanning tree's edges, the shortest first (Prim): the shortest forest of `k` edges has
    the first `k` of them. Infinite ones stand for parts that no open link joins."""
    count = len(weights)
    if count < 2:
        return np.zeros(0)
    nearest = np.array(weights[0], np.float64)
    left = np.arange(1, count)
    found = np.empty(count - 1)
    for i in range(count - 1):
        at = int(np.argmin(nearest[left]))
        chosen = int(left[at])
        found[i] = nearest[chosen]
        np.minimum(nearest, weights[chosen], out=nearest)
        left = np.delete(left, at)
    return np.sort(found)
