"""Lower bounds: what no layout of these machines can do better than, whatever the method.

A relaxation. Layers are taken by whoever is cheapest, in parts if need be; every machine that takes any pays its
overhead and half of its two shortest hops, in proportion to how full it is; or its shortest hop, and a part of the way
between its site and others; or all together pay for the shortest forest of so many links. That holds for every number
of machines and every time of the slowest stage, so the worth of both together is bounded by the best of a few boxes
(so many machines, slowest stage between two times), split where the best is until nothing is gained.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import exp, inf, log

import numpy as np
import numpy.typing as npt

from shardcompute.control.solver.sites import SiteCharges
from shardcompute.control.solver.space import Floats, SearchSpace
from shardcompute.control.solver.spanning import tree_edges

_SPLITS, _CLOSE_SPLITS = 20, 240
"""How often a box is split at most: a few milliseconds for 64 machines; and where the bound is to be shown."""
_PARTS = 6
_TUNED_EVERY = 12
_TUNINGS = 6
_NARROW, _CLOSE = 4e-3, 5e-4
"""A box is not split further when that could raise its cost by less."""
_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class Bound:
    """No layout has a smaller latency, a faster slowest stage, or more worth than these."""

    latency_s: float
    bottleneck_s: float
    score: float


@dataclass(frozen=True, slots=True)
class Floors:
    """What is known exactly: the least latency by number of machines (none of a number that cannot be), and the fastest
    slowest stage."""

    latency_s: Mapping[int, float]
    bottleneck_s: float

    def latency_of(self, least: int, most: int) -> float:
        return min((self.latency_s.get(count, inf) for count in range(least, most + 1)), default=inf)


@dataclass(frozen=True, slots=True)
class Box:
    """Layouts of so many machines whose slowest stage takes between two times, and what they cost at least."""

    cost: float
    least: int
    most: int
    fast_s: float
    slow_s: float
    latency_s: float
    price: float
    """The best for its machines that was tried, see `Relaxation`."""

    def __lt__(self, other: Box) -> bool:
        return (self.cost, self.least, self.fast_s) < (other.cost, other.least, other.fast_s)


class Relaxation:
    """The relaxed problem, to be asked for any number of machines and any time of the slowest stage."""

    def __init__(
        self, space: SearchSpace, least: int = 1, most: int | None = None, floors: Floors | None = None
    ) -> None:
        self.space = space
        self._floors = floors
        self.most = min(most or space.count, space.count, space.layers)
        self._unit = space.layer_work if space.is_uniform else 1.0
        self._room = np.asarray(space.room if space.is_uniform else space.most_work, np.float64)
        self._last_room = _last_room(space)
        self._work = float(space.work_before[-1]) / self._unit
        self._head_s = space.seconds_per_byte * space.head_work
        self._fixed = space.overhead_s + _half_hops(space)
        self._sorted_fixed = np.sort(self._fixed)
        self._driver_s = 0.5 * (_least(space.hops[-1, :-1]) + _least(space.hops[:-1, -1]))
        self._forest = _forest_sums(space)
        self._sites = SiteCharges(space)
        self._ways_to_share = [(self._fixed, self._driver_s), (self._sites.fixed, self._sites.driver_s)]
        self.least = max(least, self._fewest())

    def _fewest(self) -> int:
        """So many machines are needed by memory alone."""
        rooms = np.cumsum(np.sort(self._room)[::-1])
        enough = np.flatnonzero(rooms >= self._work * (1 - _ROUNDING))
        return int(enough[0]) + 1 if len(enough) else self.space.count + 1

    def capacities(self, times_s: Floats, rooms: Floats) -> Floats:
        """What each machine computes at most within memory and these times, in layers where they are alike."""
        space = self.space
        units = (times_s - space.overhead_s) / (space.seconds_per_byte * self._unit)
        if space.is_uniform:
            units = np.floor(units + 1e-6)
        return np.clip(units, 0, rooms)

    def can_within(self, times_s: Floats, most: int) -> npt.NDArray[np.bool_]:
        """Whether so many machines could have all layers with no stage beyond each time, one of them with the head."""
        alone = self.capacities(times_s[:, None], self._room)
        ending = self.capacities(times_s[:, None] - self._head_s, self._last_room)
        largest = np.sort(alone, axis=1)[:, ::-1]
        others, smallest = largest[:, : most - 1].sum(axis=1), largest[:, most - 1]
        # One of the largest gives what it has besides the head, or one more takes the smallest one's place.
        totals = others[:, None] + np.minimum(smallest[:, None] - alone, 0) + ending
        totals[ending <= 0] = -inf
        return np.asarray(totals.max(axis=1) >= self._work * (1 - _ROUNDING), np.bool_)

    def latency_s(
        self, times_s: Floats, least: int, most: int, prices: tuple[float, ...]
    ) -> tuple[Floats, float]:
        """The least time of one token for so many machines, for each time that no stage may exceed; and which of the
        prices says so."""
        space = self.space
        capacity = self.capacities(times_s[:, None], self._room)
        priced = [row for price in prices for row in self._priced(price, least, most)]
        charge = max(0.0, -prices[0])
        priced.append((space.overhead_s, float(self._forest[least])))
        if charge > 0:
            priced.append((space.overhead_s + charge, float(self._forest[least]) - charge * most))
        extra = np.stack([fixed for fixed, _ in priced])
        constants = np.array([constant for _, constant in priced])
        shape = (len(times_s), len(priced), space.count)
        with np.errstate(divide="ignore", invalid="ignore"):
            each = space.seconds_per_byte * self._unit + extra[None] / capacity[:, None]
        rates = np.where(np.isfinite(each), each, inf).reshape(-1, space.count)
        sizes = np.broadcast_to(capacity[:, None], shape).reshape(-1, space.count)
        rows = np.arange(len(rates))[:, None]
        order = np.argsort(rates, axis=1)
        rates, sizes = rates[rows, order], sizes[rows, order]
        taken = np.minimum(np.maximum(self._work - (np.cumsum(sizes, axis=1) - sizes), 0), sizes)
        taken[np.isinf(rates)] = 0.0
        rates[np.isinf(rates)] = 0.0
        costs = (taken * rates).sum(axis=1)
        costs[taken.sum(axis=1) < self._work * (1 - 1e-6)] = inf
        costs = costs.reshape(shape[:2])
        bounds = costs + constants + float(self._head_s.min())
        known = len(prices) * len(self._ways_to_share)
        best = int(bounds[0, :known].reshape(len(prices), -1).max(axis=1).argmax())
        return np.asarray(bounds.max(axis=1), np.float64), prices[best]

    def first_prices(self, least: int) -> tuple[float, ...]:
        """What a machine may be paid for taking part, or charged: any such price gives a bound, see `_priced`."""
        full = float(self._sorted_fixed[least - 1])
        paid = (full,) if full < inf else ()
        stage_s = float(
            np.median(self.space.seconds_per_byte * self._unit * np.minimum(self._room, self._work))
        )
        return (0.0, *paid, *(-stage_s * part for part in (0.1, 0.3, 0.8)))

    def _priced(self, price: float, least: int, most: int) -> Iterator[tuple[Floats, float]]:
        """What taking part costs beyond the price, and what all pay together, with hops shared in two ways. Paid: at
        least so many get it, and those for whom it is more than enough take part anyway. Charged: at most so many pay
        it. (A Lagrangean relaxation of their number.)"""
        for fixed, driver_s in self._ways_to_share:
            if price < 0:
                yield fixed - price, price * most + driver_s
            else:
                gained = float(np.minimum(fixed - price, 0.0).sum())
                yield np.maximum(fixed - price, 0.0), price * least + gained + driver_s

    def tune(self, box: Box) -> None:
        """Let those pay for the way between sites whom the relaxed layouts of a box would use; and share hops from then
        on in the way that tells more of them."""
        price = min(box.price, 0.0)
        capacity = self.capacities(np.array([box.slow_s]), self._room)
        capacity = np.maximum(capacity, 1e-12)
        for _ in range(_TUNINGS):
            taken, _ = self._fill(capacity, self._sites.fixed - price)
            self._sites.shift(taken / capacity)
        by_site = self._fill(capacity, self._sites.fixed - price)[1] + self._sites.driver_s
        alone = self._fill(capacity, self._fixed - price)[1] + self._driver_s
        best = (
            (self._sites.fixed, self._sites.driver_s) if by_site >= alone else (self._fixed, self._driver_s)
        )
        self._ways_to_share = [best]

    def _fill(self, capacity: Floats, fixed: Floats) -> tuple[Floats, float]:
        """How much each takes where that costs so much besides, and what all of it costs."""
        each = self.space.seconds_per_byte * self._unit + fixed / capacity
        order = np.argsort(each)
        sizes = capacity[order]
        taken = np.empty_like(sizes)
        taken[order] = np.clip(self._work - (np.cumsum(sizes) - sizes), 0, sizes)
        used = taken > 0
        return taken, float((taken[used] * each[used]).sum())

    def boxes(self) -> Iterator[Box]:
        """All layouts, by number of machines."""
        fast_s, slow_s = self._range()
        low = self.least
        while low <= self.most:
            high = min(self.most, low * 3 // 2)
            yield from self.weigh(low, high, [fast_s, slow_s], self.first_prices(low))
            low = high + 1

    def weigh(self, least: int, most: int, times_s: list[float], prices: tuple[float, ...]) -> Iterator[Box]:
        """Boxes between these times, without those in which nothing fits."""
        slow_s = np.array(times_s[1:])
        possible = self.can_within(slow_s, most)
        if not possible.any():
            return
        latency_s, price = self.latency_s(slow_s[possible], least, most, prices)
        if self._floors is not None:
            latency_s = np.maximum(latency_s, self._floors.latency_of(least, most))
        for i, seconds in zip(np.flatnonzero(possible), latency_s, strict=True):
            cost = self.space.objective.cost(float(seconds), times_s[i], least)
            if cost < inf:
                yield Box(cost, least, most, times_s[i], times_s[i + 1], float(seconds), price)

    def parts(self, box: Box) -> Iterator[Box]:
        """The same layouts in smaller boxes."""
        objective = self.space.objective
        by_count = (box.most - box.least) * objective.machine_cost
        by_time = (1 - objective.latency_weight) * log(box.slow_s / box.fast_s)
        prices = (box.price, 0.7 * box.price, 1.4 * box.price)
        if box.most > box.least and by_count >= by_time:
            middle = (box.least + box.most) // 2
            yield from self.weigh(box.least, middle, [box.fast_s, box.slow_s], prices)
            yield from self.weigh(middle + 1, box.most, [box.fast_s, box.slow_s], prices)
        else:
            yield from self.weigh(box.least, box.most, _between(box.fast_s, box.slow_s), prices)

    def width(self, box: Box) -> float:
        """By how much the cost of a box could grow if it were split for ever."""
        objective = self.space.objective
        by_count = (box.most - box.least) * objective.machine_cost
        return by_count + (1 - objective.latency_weight) * log(box.slow_s / box.fast_s)

    def fastest_s(self, rounds: int) -> float:
        """The least time of the slowest stage, whatever else; each round makes it six times as close."""
        times = _between(*self._range())
        for _ in range(rounds):
            possible = self.can_within(np.array(times), self.most)
            first = int(np.argmax(possible))
            if not possible.any() or first == 0:
                return times[0] if possible.any() else inf
            times = _between(times[first - 1], times[first])
        return times[0]

    def _range(self) -> tuple[float, float]:
        """Between what all machines together could do, and the slowest one with all that it can hold."""
        space = self.space
        slowest = space.overhead_s + space.seconds_per_byte * (self._unit * self._room + space.head_work)
        fluid_s = (self._work * self._unit + space.head_work) / float((1 / space.seconds_per_byte).sum())
        fast_s = max(fluid_s, _least(space.transfers[-1, :-1]), 1e-12)
        if self._floors is not None:
            fast_s = max(fast_s, self._floors.bottleneck_s)
        return fast_s, max(float(slowest.max()), fast_s) * (1 + 1e-6)


def bound_layouts(
    space: SearchSpace,
    least: int = 1,
    most: int | None = None,
    *,
    is_close: bool = False,
    floors: Floors | None = None,
) -> tuple[Bound | None, list[Box]]:
    """What no layout of so many machines can exceed, with the most promising boxes; None where nothing fits. A close
    one takes some ten times as long."""
    relaxation = Relaxation(space, least, most, floors)
    heap = list(relaxation.boxes())
    if not heap:
        return None, []
    latency_s = min(box.latency_s for box in heap)
    heapq.heapify(heap)
    for split in range(_CLOSE_SPLITS if is_close else _SPLITS):
        if split % _TUNED_EVERY == 0:
            relaxation.tune(heap[0])
        if relaxation.width(heap[0]) < (_CLOSE if is_close else _NARROW):
            break
        box = heapq.heappop(heap)
        for part in relaxation.parts(box):
            heapq.heappush(heap, part)
        if not heap:
            return None, []
    fastest_s = relaxation.fastest_s(6 if is_close else 3) if floors is None else floors.bottleneck_s
    return Bound(latency_s, fastest_s, exp(-heap[0].cost)), heapq.nsmallest(24, heap)


def _between(fast_s: float, slow_s: float) -> list[float]:
    """Times from one to the other in equal ratios."""
    ratio = slow_s / fast_s
    return [fast_s * ratio ** (i / _PARTS) for i in range(_PARTS)] + [slow_s]


def _least(values: Floats) -> float:
    return float(values.min()) if len(values) else 0.0


def _last_room(space: SearchSpace) -> Floats:
    """What a machine computes at most besides the head."""
    if space.is_uniform:
        ending = space.layers - space.last_from
        return np.asarray(np.where(space.fits_whole, space.layers, ending), np.float64)
    ending_work = space.work_before[-1] - space.work_before[space.last_from]
    return np.asarray(np.where(space.fits_whole, space.work_before[-1], ending_work), np.float64)


def _half_hops(space: SearchSpace) -> Floats:
    """Half of the two shortest hops of each machine: every one on a ring has two."""
    count = space.count
    inner = space.hops[:-1, :-1].copy()
    inner[np.arange(count), np.arange(count)] = inf
    ends = np.stack([space.hops[-1, :-1], space.hops[:-1, -1]], axis=1)
    ways = np.concatenate([inner, ends], axis=1)
    return np.asarray(np.partition(ways, 1, axis=1)[:, :2].sum(axis=1) / 2, np.float64)


def _forest_sums(space: SearchSpace) -> Floats:
    """By number of machines, the least that a ring through them travels: to the first and back, and from one to the
    next. The way is a tree, so no shorter than the shortest forest of as many links."""
    count = space.count
    entry, back = space.hops[-1, :-1], space.hops[:-1, -1]
    weights = np.full((count + 1, count + 1), inf)
    weights[:-1, :-1] = space.hops[:-1, :-1]
    weights[-1, :-1] = weights[:-1, -1] = np.minimum(entry, back)
    whole = np.concatenate(([0.0], np.cumsum(tree_edges(weights))))
    inner = np.concatenate(([0.0, 0.0], np.cumsum(tree_edges(space.hops[:-1, :-1])))) + _least(entry)
    inner[0] = 0.0
    return np.asarray(np.maximum(whole, inner) + _least(back), np.float64)
