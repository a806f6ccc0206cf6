"""Sites: groups of machines that are near each other, and what it costs at least to go from one to another.

Every ring enters and leaves each site where it uses a machine. What that takes, beyond each machine's shortest hop, is
divided between the site's machines: each pays its share if it takes part, and any division gives a lower bound, because
whoever takes part makes the site pay in full.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from shardcompute.control.solver.space import Floats, Ints, SearchSpace
from shardcompute.control.solver.spanning import tree_edges

_LEAST_SHARE = 0.02
_LEAST_RATIO = 2.0
"""Sites are as far apart as the greatest step between neighbouring distances, if that is at least so great."""


class SiteCharges:
    """What each machine pays for taking part: `fixed`, besides `driver_s` in any case."""

    def __init__(self, space: SearchSpace) -> None:
        ways = _ways(space)
        shortest = ways.min(axis=1)
        reduced = np.where(
            np.isinf(ways), np.inf, ways - np.minimum(shortest[:, None] / 2 + shortest / 2, 1e300)
        )
        self.driver_s = float(shortest[-1])
        self._base = space.overhead_s + shortest[:-1]
        self._groups: list[Ints] = []
        charges: list[float] = []
        labels = find_sites(ways)
        home = labels[-1]
        for label in range(int(labels.max()) + 1):
            inside = labels == label
            crossing = reduced[inside][:, ~inside]
            if label == home or not crossing.size:
                continue
            self._groups.append(np.flatnonzero(inside[:-1]))
            charges.append(float(crossing.min()))
        if self._groups:
            # Whoever leaves the driver's site also crosses its border.
            away = labels != home
            self._groups.append(np.flatnonzero(away[:-1]))
            charges.append(float(reduced[~away][:, away].min()))
        self._charges = charges
        self._shares = [np.full(len(group), 1 / len(group)) for group in self._groups]

        self.fixed = self._summed()

    def _summed(self) -> Floats:
        fixed: Floats = np.array(self._base, np.float64)
        for group, charge, shares in zip(self._groups, self._charges, self._shares, strict=True):
            fixed[group] += charge * shares
        return fixed

    def shift(self, taking: Floats) -> None:
        """Towards machines that take part, by how much of them does."""
        for i, group in enumerate(self._groups):
            weights = self._shares[i] * (_LEAST_SHARE + taking[group])
            self._shares[i] = weights / weights.sum()
        self.fixed = self._summed()


def _ways(space: SearchSpace) -> Floats:
    """The shorter way between any two, the driver last."""
    ways = np.minimum(space.hops, space.hops.T)
    np.fill_diagonal(ways, np.inf)
    return ways


def find_sites(ways: Floats) -> npt.NDArray[np.int64]:
    """The site of each, by number: those that a chain of links joins which are shorter than the ways between sites."""
    count = len(ways)
    limit = _site_limit(tree_edges(ways))
    labels = np.full(count, -1, np.int64)
    label = 0
    for first in range(count):
        if labels[first] >= 0:
            continue
        frontier = np.array([first])
        labels[first] = label
        while len(frontier):
            near = (ways[frontier] <= limit).any(axis=0) & (labels < 0)
            labels[near] = label
            frontier = np.flatnonzero(near)
        label += 1
    return labels


def _site_limit(edges: Floats) -> float:
    """The longest way inside a site."""
    known = edges[np.isfinite(edges)]
    if len(known) < 2:
        return np.inf
    steps = known[1:] / np.maximum(known[:-1], 1e-7)
    at = int(np.argmax(steps))
    return float(known[at]) if steps[at] >= _LEAST_RATIO else np.inf
