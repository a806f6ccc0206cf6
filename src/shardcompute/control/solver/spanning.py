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
    is_left = np.ones(count, np.bool_)
    is_left[0] = False
    nearest = np.where(is_left, weights[0], np.inf)
    found = np.empty(count - 1)
    for i in range(count - 1):
        chosen = int(nearest.argmin())
        if not is_left[chosen]:
            # No open link leads on: begin elsewhere.
            chosen = int(is_left.argmax())
        found[i] = nearest[chosen]
        is_left[chosen] = False
        np.minimum(nearest, weights[chosen], out=nearest, where=is_left)
        nearest[chosen] = np.inf
    return np.sort(found)
