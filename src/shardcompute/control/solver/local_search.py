"""Local search: an order of machines made better by dropping, adding, exchanging and moving them.

All moves of a kind are estimated at once, as matrices; what looks best is then judged exactly. The time of the slowest
stage is fixed meanwhile, so that a machine's worth does not depend on how the others share the layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from shardcompute.control.solver.space import CountedOrder, Floats, Ints, OrderCosts

_JUDGED = 2
"""Of each kind of moves, so many that look best are judged."""
_LEAST_GAIN = 1e-9


@dataclass(frozen=True, slots=True)
class _Shares:
    """How an order divides the layers now, and what a layer more or less would cost."""

    limits: Ints
    taken: Ints
    spare: int
    marginal_s: float
    """Of the machine that would give layers away first."""
    machine_s: float
    """What one machine more must gain."""


class LocalSearch:
    """`steps` says how many rounds of moves have been weighed."""

    def __init__(
        self,
        costs: OrderCosts,
        least: int = 1,
        most: int | None = None,
        is_over: Callable[[], bool] = lambda: False,
    ) -> None:
        self._costs = costs
        self._least = least
        self._most = min(most or costs.space.count, costs.space.layers)
        self._is_over = is_over
        self.steps = 0

    def improve(self, order: list[int], bound_s: float, limits: Ints) -> CountedOrder:
        """Until no move that is weighed gains anything, or it is over. `limits` are those of all machines."""
        bounds = np.array([bound_s])
        best = self._shortened(self._costs.judge(order, bounds), bounds)
        while not self._is_over() and best.cost < np.inf:
            self.steps += 1
            shares = self._shares(np.array(best.order), bounds, best)
            judged = [
                self._costs.judge(each, bounds) for each in self._moves(list(best.order), shares, limits)
            ]
            following = min(judged, key=lambda each: (each.cost, each.order), default=best)
            if following.cost >= best.cost - _LEAST_GAIN:
                break
            best = following
            if self.steps % 4 == 0:
                best = self._shortened(best, bounds)
        return self._shortened(best, bounds)

    def _shortened(self, known: CountedOrder, bounds: Floats) -> CountedOrder:
        """On a shorter ring, where everything fits there: the ends of the model take room, too."""
        shorter = self._costs.judge(self.shorten(list(known.order)), bounds)
        if shorter.cost == np.inf:
            shorter = self._costs.judge(self.shorten(list(known.order), has_same_ends=True), bounds)
        return min(known, shorter, key=lambda each: each.cost)

    def shorten(self, order: list[int], *, has_same_ends: bool = False) -> list[int]:
        """The same machines on a shorter ring: pieces turned round, machines put elsewhere."""
        if has_same_ends:
            return self._shorten_between(order)
        driver = self._costs.space.count
        return self._shorten(driver, order, driver)

    def _shorten_between(self, order: list[int]) -> list[int]:
        if len(order) < 3:
            return order
        return [order[0], *self._shorten(order[0], order[1:-1], order[-1]), order[-1]]

    def _shorten(self, start: int, order: list[int], stop: int) -> list[int]:
        hops = self._costs.hops
        for _ in range(2 * len(order)):
            ring = np.array([start, *order, stop])
            between = hops[ring[:, None], ring]
            turning, i, j = _best_turn(between)
            moving, p, q = _best_shift(between)
            if max(turning, moving) <= _LEAST_GAIN:
                break
            if turning >= moving:
                order[i : j + 1] = order[i : j + 1][::-1]
            else:
                moved = order.pop(p)
                order.insert(q if q <= p else q - 1, moved)
        return order

    def _shares(self, order: Ints, bounds: Floats, best: CountedOrder) -> _Shares:
        costs, space = self._costs, self._costs.space
        limits = costs.limits(order, bounds)[0].astype(np.int64)
        fast = np.argsort(costs.layer_s[order], kind="stable")
        more = (limits - 1)[fast]
        taken = np.ones(len(order), np.int64)
        taken[fast] += np.clip(space.layers - len(order) - (np.cumsum(more) - more), 0, more)
        giving = order[taken > 1] if (taken > 1).any() else order
        weight = max(space.objective.latency_weight, 0.01)
        return _Shares(
            limits,
            taken,
            int(limits.sum()) - space.layers,
            float(costs.layer_s[giving].max()),
            best.latency_s * space.objective.machine_cost / weight,
        )

    def _moves(self, order: list[int], shares: _Shares, limits: Ints) -> Iterator[list[int]]:
        costs, space = self._costs, self._costs.space
        chosen = np.array(order)
        ring = np.array([space.count, *order, space.count])
        arcs = costs.hops[ring[:-1], ring[1:]]
        outside = np.flatnonzero(limits > 0)
        outside = outside[~np.isin(outside, chosen)]
        own_s = space.overhead_s[chosen] + costs.layer_s[chosen] * shares.taken
        if len(order) > self._least:
            for p in self._droppable(ring, arcs, own_s, shares):
                yield order[:p] + order[p + 1 :]
        yield from self._ending(order, ring, arcs)
        if not len(outside):
            return
        to, back = costs.hops[ring[:-1, None], outside], costs.hops[outside, ring[1:, None]]
        layer_s, fixed_s = costs.layer_s[outside], space.overhead_s[outside]
        full = limits[outside]
        gains = full * np.maximum(shares.marginal_s - layer_s, 0.0)
        if len(order) < self._most:
            idle = np.where(gains > 0, 0.0, layer_s - shares.marginal_s)
            added = to + back - arcs[:, None] + fixed_s + shares.machine_s + idle - gains
            for flat in _smallest(added):
                at, j = divmod(int(flat), len(outside))
                yield [*order[:at], int(outside[j]), *order[at:]]
        detour = to[:-1] + back[1:] - (arcs[:-1] + arcs[1:])[:, None]
        absorbed = np.maximum(shares.spare - (shares.limits - shares.taken), 0)
        needed = np.clip((shares.taken - absorbed)[:, None], 1, full)
        taking = np.where(layer_s < shares.marginal_s, full, needed)
        others_s = shares.marginal_s * (shares.taken[:, None] - taking)
        exchanged = detour + fixed_s + layer_s * taking - own_s[:, None] + others_s
        exchanged[(shares.spare - shares.limits)[:, None] + full < 0] = np.inf
        for flat in _smallest(exchanged):
            at, j = divmod(int(flat), len(outside))
            yield [*order[:at], int(outside[j]), *order[at + 1 :]]

    def _ending(self, order: list[int], ring: Ints, arcs: Floats) -> Iterator[list[int]]:
        """With another machine as the last, which has the head to compute; or as the first."""
        if len(order) < 2:
            return
        hops, chosen = self._costs.hops, ring[1:-1]
        freed = arcs[:-1] + arcs[1:] - hops[ring[:-2], ring[2:]]
        last_s = hops[ring[-2], chosen] + hops[chosen, -1] - arcs[-1] - freed + self._costs.head_s[chosen]
        for p in _smallest(last_s[:-1])[:2]:
            yield [*order[:p], *order[p + 1 :], order[p]]
        first_s = hops[-1, chosen] + hops[chosen, ring[1]] - arcs[0] - freed
        for p in _smallest(first_s[1:])[:1] + 1:
            yield [order[p], *order[:p], *order[p + 1 :]]

    def _droppable(self, ring: Ints, arcs: Floats, own_s: Floats, shares: _Shares) -> list[int]:
        hops = self._costs.hops
        gained = arcs[:-1] + arcs[1:] - hops[ring[:-2], ring[2:]] + own_s + shares.machine_s
        dropped = shares.taken * shares.marginal_s - gained
        dropped[shares.limits > shares.spare] = np.inf
        return [int(each) for each in _smallest(dropped)]


def _smallest(values: Floats) -> Ints:
    """Where the few smallest are that can be at all, the least first."""
    flat = values.ravel()
    few = min(_JUDGED, len(flat))
    found = np.argpartition(flat, few - 1)[:few]
    found = found[np.argsort(flat[found], kind="stable")]
    return np.asarray(found[np.isfinite(flat[found])], np.int64)


def _best_turn(between: Floats) -> tuple[float, int, int]:
    """What turning machines i to j round gains at most, and which, given the hops between all of a ring."""
    count = len(between) - 2
    if count < 2:
        return 0.0, 0, 0
    arcs = between.diagonal(1)
    gains = (arcs[:-1, None] + arcs[1:]) - (between[:-2, 1:-1] + between[1:-1, 2:])
    gains[np.tri(count, dtype=np.bool_)] = 0.0
    i, j = divmod(int(gains.argmax()), count)
    return float(gains[i, j]), i, j


def _best_shift(between: Floats) -> tuple[float, int, int]:
    """What putting machine p onto link q gains at most, and which."""
    count = len(between) - 2
    if count < 3:
        return 0.0, 0, 0
    arcs = between.diagonal(1)
    freed = arcs[:-1] + arcs[1:] - between.diagonal(2)
    gains = freed + arcs[:, None] - between[:-1, 1:-1] - between[1:-1, 1:].T
    positions = np.arange(count)
    gains[positions, positions] = gains[positions + 1, positions] = -np.inf
    q, p = divmod(int(gains.argmax()), count)
    return float(gains[q, p]), p, q
