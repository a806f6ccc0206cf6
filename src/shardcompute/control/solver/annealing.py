"""Simulated annealing: an order of machines, changed at random, at first freely and then only for the better.

The time of the slowest stage is fixed and the price of a layer is the marginal one, so that a change is weighed by its
hops and its machines alone, in a few operations. What is found is then judged as every other order is.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from math import exp, inf

import numpy as np

from shardcompute.control.solver.local_search import LocalSearch
from shardcompute.control.solver.space import CountedOrder, Ints, OrderCosts, layer_limits

_CHUNK = 500
"""Changes between two questions whether it is over."""
_NEAR = 12
_COLDEST = 1e-3


class Annealing:
    """One walk from a given order, for one time of the slowest stage."""

    def __init__(
        self, costs: OrderCosts, bound_s: float, seed: int, *, least: int = 1, most: int | None = None
    ) -> None:
        self._costs = costs
        self._bound_s = bound_s
        self._chance = random.Random(seed)
        self._least = least
        self._most = min(most or costs.space.count, costs.space.layers)
        self._hops: list[list[float]] = costs.hops.tolist()
        self._limits: Ints = layer_limits(costs.space, bound_s)
        able = [int(i) for i in np.flatnonzero(self._limits > 0)]
        near = np.argsort(costs.space.hops[:-1, :-1], axis=1, kind="stable")[:, : _NEAR + 1]
        is_able = set(able)
        self._near = [
            [int(j) for j in row if int(j) in is_able and int(j) != i] for i, row in enumerate(near)
        ]
        self._able = able

    def improve(
        self, start: CountedOrder, moves: int, should_stop: Callable[[], bool] = lambda: False
    ) -> CountedOrder:
        """The better of the start and what so many changes lead to."""
        if start.cost == inf or len(self._able) < 2:
            return start
        self._prepare(start)
        heat = 0.05 * start.latency_s
        cooling = _COLDEST ** (1 / max(1, moves))
        best, best_energy, energy = list(self._order), 0.0, 0.0
        for move in range(moves):
            if move % _CHUNK == 0 and should_stop():
                break
            energy += self._change(heat)
            heat *= cooling
            if energy < best_energy - 1e-12 and self._left <= 0:
                best, best_energy = list(self._order), energy
        bounds = np.append(self._bound_s * np.geomspace(0.7, 1.5, 12), 1e12)
        search = LocalSearch(self._costs, self._least, self._most, should_stop)
        refined = search.improve(best, self._bound_s, self._limits)
        found = [self._costs.judge(each, bounds) for each in (best, refined.order)]
        return min(start, *found, key=lambda each: (each.cost, each.order))

    def _prepare(self, start: CountedOrder) -> None:
        """Prices of machines and layers near the start."""
        space = self._costs.space
        chosen = np.array(start.order)
        layer_s = self._costs.layer_s
        weight = max(space.objective.latency_weight, 0.01)
        machine_s = start.latency_s * space.objective.machine_cost / weight
        self._marginal_s = float(np.max(layer_s[chosen]))
        # A layer that nobody takes is dearer than any machine that could.
        self._missing_s = 4 * float(layer_s[self._able].max()) + float(space.overhead_s.max()) + machine_s
        worth = space.overhead_s + machine_s * space.machines + self._limits * (layer_s - self._marginal_s)
        self._worth: list[float] = worth.tolist()
        self._room: list[int] = self._limits.tolist()
        self._order = list(start.order)
        self._inside = set(self._order)
        self._left = space.layers - sum(self._room[i] for i in self._order)

    def _change(self, heat: float) -> float:
        """One change at random, kept if it is good enough: by how much the energy grew."""
        kind = self._chance.random()
        if kind < 0.3:
            return self._turn(heat)
        if kind < 0.5:
            return self._shift(heat)
        if kind < 0.85:
            return self._exchange(heat)
        return self._add(heat) if kind < 0.93 else self._drop(heat)

    def _is_kept(self, growth: float, heat: float) -> bool:
        if growth <= 0:
            return True
        return growth < inf and heat > 0 and self._chance.random() < exp(-min(growth / heat, 700.0))

    def _at(self, position: int) -> int:
        """Who is there; the driver before the first and after the last."""
        return self._order[position] if 0 <= position < len(self._order) else len(self._hops) - 1

    def _short(self, left: int) -> float:
        """The price of layers that nobody has."""
        return self._missing_s * left if left > 0 else 0.0

    def _turn(self, heat: float) -> float:
        if len(self._order) < 2:
            return 0.0
        i, j = sorted(self._chance.sample(range(len(self._order)), 2))
        before, after, hops = self._at(i - 1), self._at(j + 1), self._hops
        first, last = self._order[i], self._order[j]
        growth = hops[before][last] + hops[first][after] - hops[before][first] - hops[last][after]
        if not self._is_kept(growth, heat):
            return 0.0
        self._order[i : j + 1] = self._order[i : j + 1][::-1]
        return growth

    def _shift(self, heat: float) -> float:
        if len(self._order) < 3:
            return 0.0
        i = self._chance.randrange(len(self._order))
        moved = self._order[i]
        freed = self._freed(i)
        self._order.pop(i)
        j = self._chance.randrange(len(self._order) + 1)
        growth = self._detour(j, moved) - freed
        if self._is_kept(growth, heat):
            self._order.insert(j, moved)
            return growth
        self._order.insert(i, moved)
        return 0.0

    def _freed(self, i: int) -> float:
        before, own, after, hops = self._at(i - 1), self._order[i], self._at(i + 1), self._hops
        return hops[before][own] + hops[own][after] - (hops[before][after] if before != after else 0.0)

    def _detour(self, i: int, machine: int) -> float:
        before, after, hops = self._at(i - 1), self._at(i), self._hops
        return (
            hops[before][machine] + hops[machine][after] - (hops[before][after] if before != after else 0.0)
        )

    def _candidate(self, neighbour: int) -> int | None:
        """A machine outside: often one near the neighbour."""
        is_known = neighbour < len(self._near) and self._near[neighbour]
        pool = self._near[neighbour] if is_known and self._chance.random() < 0.7 else self._able
        found = self._chance.choice(pool)
        return None if found in self._inside else found

    def _exchange(self, heat: float) -> float:
        i = self._chance.randrange(len(self._order))
        before, own, after, hops = self._at(i - 1), self._order[i], self._at(i + 1), self._hops
        other = self._candidate(before)
        if other is None:
            return 0.0
        left = self._left + self._room[own] - self._room[other]
        growth = hops[before][other] + hops[other][after] - hops[before][own] - hops[own][after]
        growth += self._worth[other] - self._worth[own] + self._short(left) - self._short(self._left)
        if not self._is_kept(growth, heat):
            return 0.0
        self._order[i] = other
        self._inside.remove(own)
        self._inside.add(other)
        self._left = left
        return growth

    def _add(self, heat: float) -> float:
        i = self._chance.randrange(len(self._order) + 1)
        other = self._candidate(self._at(i - 1))
        if other is None or len(self._order) >= self._most:
            return 0.0
        left = self._left - self._room[other]
        growth = self._detour(i, other) + self._worth[other] + self._short(left) - self._short(self._left)
        if not self._is_kept(growth, heat):
            return 0.0
        self._order.insert(i, other)
        self._inside.add(other)
        self._left = left
        return growth

    def _drop(self, heat: float) -> float:
        if len(self._order) <= max(1, self._least):
            return 0.0
        i = self._chance.randrange(len(self._order))
        own = self._order[i]
        left = self._left + self._room[own]
        growth = self._short(left) - self._short(self._left) - self._freed(i) - self._worth[own]
        if not self._is_kept(growth, heat):
            return 0.0
        self._order.pop(i)
        self._inside.remove(own)
        self._left = left
        return growth
