"""Multi-start search: rings grown greedily for several times of the slowest stage and from several machines, the best
of them improved by local search.

The boxes of the lower bound say which times are promising. Work is counted, not timed, so that equal questions have
equal answers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from shardcompute.control.solver.bounds import Box
from shardcompute.control.solver.construction import grow_ring
from shardcompute.control.solver.local_search import LocalSearch
from shardcompute.control.solver.space import (
    CountedOrder,
    Floats,
    Ints,
    OrderCosts,
    SearchSpace,
    layer_limits,
)

QUICK_STEPS = 60
"""Rounds of local search of a quick answer."""
_TIMES = 2
_SEEDS = 6
_IMPROVED = 2
_PASSES = 2
_FAST = (1, 2, 3, 4, 6, 8, 12, 16)
_FULL_BOXES = 8
_THROUGHPUT_ALONE = 0.01
_NO_LIMIT_S = 1e12
_AROUND = np.geomspace(0.7, 3.0, 16)
_ABOVE = np.geomspace(1.0, 1.3, 24)


@dataclass(frozen=True, slots=True)
class _GrownRing:
    found: CountedOrder
    bound_s: float
    limits: Ints


def search_orders(
    space: SearchSpace,
    boxes: Sequence[Box],
    *,
    least: int = 1,
    most: int | None = None,
    steps: int = QUICK_STEPS,
    should_stop: Callable[[], bool] = lambda: False,
) -> list[CountedOrder]:
    """Good orders, the best first; none where no ring was found on which everything fits."""
    costs = OrderCosts(space)
    search = LocalSearch(costs, least, most, lambda: search.steps >= steps or should_stop())
    grown = [*_starts(costs, boxes, least, most), *_fast_starts(costs, search, least, most)]
    if space.objective.latency_weight < _THROUGHPUT_ALONE:
        grown += _fullest_starts(costs, boxes, search)
    starts = sorted(grown, key=lambda each: (each.found.cost, each.found.order))
    found = {each.found.order: each.found for each in starts[:1]}
    seen: set[tuple[int, ...]] = set()
    for start in starts:
        if len(seen) >= _IMPROVED or search.steps >= steps or should_stop():
            break
        if start.found.order in seen:
            continue
        seen.add(start.found.order)
        better = _improve(costs, search, start)
        found[better.order] = better
    return sorted(found.values(), key=lambda each: (each.cost, each.order))


def _improve(costs: OrderCosts, search: LocalSearch, start: _GrownRing) -> CountedOrder:
    """By local search, for the time that the ring was grown for and then for the one that turned out best."""
    best, bound_s, limits = start.found, start.bound_s, start.limits
    for _ in range(_PASSES):
        better = search.improve(list(best.order), bound_s, limits)
        if better.cost < np.inf:
            judged = costs.judge(better.order, times_around(bound_s))
            best = min(best, judged, key=lambda each: each.cost)
        if best.bottleneck_s == bound_s:
            break
        bound_s = best.bottleneck_s
        limits = layer_limits(costs.space, bound_s)
    return best


def times_around(bound_s: float) -> Floats:
    """Times of the slowest stage to judge an order by: near this one, and far beyond."""
    return np.append(bound_s * _AROUND, 1e12)


def _starts(costs: OrderCosts, boxes: Sequence[Box], least: int, most: int | None) -> Iterator[_GrownRing]:
    space = costs.space
    apart_s = float(np.median(costs.hops[:-1, :-1])) / 2
    for place, (bound_s, box) in enumerate(_promising(boxes)):
        limits = layer_limits(space, bound_s)
        machine_s = _machine_s(space, box)
        seeds = 0 if bound_s == _NO_LIMIT_S else _SEEDS // (1 + 2 * place)
        for seed in [None, *_seeds(costs, limits, seeds, apart_s)]:
            order = grow_ring(costs, limits, machine_s, seed, least, most)
            if order is not None:
                found = costs.judge(order, times_around(bound_s))
                if found.cost < np.inf:
                    yield _GrownRing(found, bound_s, limits)


def _fast_starts(
    costs: OrderCosts, search: LocalSearch, least: int, most: int | None
) -> Iterator[_GrownRing]:
    """Rings of the fastest machines, wherever they are."""
    space = costs.space
    fast = [int(i) for i in np.argsort(costs.layer_s, kind="stable")[: _FAST[-1]]]
    for count in _FAST:
        if not least <= count <= min(most or count, len(fast), space.layers):
            continue
        if costs.room[fast[:count]].sum() < space.layers:
            continue
        found = costs.judge(search.shorten(fast[:count]), times_around(_fluid_s(space, fast[:count])))
        if found.cost < np.inf:
            yield _GrownRing(found, found.bottleneck_s, layer_limits(space, found.bottleneck_s))


def _fullest_starts(costs: OrderCosts, boxes: Sequence[Box], search: LocalSearch) -> Iterator[_GrownRing]:
    """Where only many streams count, the way round the ring does not: those that compute most in a box's time."""
    space = costs.space
    for box in boxes[:_FULL_BOXES]:
        limits = layer_limits(space, box.slow_s)
        fullest = np.argsort(-limits, kind="stable")[: box.most]
        last = int(
            fullest[np.argmin(costs.head_s[fullest] + np.where(costs.last_room[fullest] > 0, 0.0, np.inf))]
        )
        others = [int(i) for i in fullest if i != last and limits[i] > 0]
        others.sort(key=lambda i: -int(costs.first_room[i]))
        order = [*others[:1], *search.shorten(others[1:]), last] if others else [last]
        found = costs.judge(order, box.slow_s * _ABOVE)
        if found.cost < np.inf:
            yield _GrownRing(found, found.bottleneck_s, layer_limits(space, found.bottleneck_s))


def _fluid_s(space: SearchSpace, machines: list[int]) -> float:
    """How long each of these takes if they share the work evenly."""
    work = float(space.work_before[-1]) + space.head_work
    return work / float((1 / space.seconds_per_byte[machines]).sum())


def _promising(boxes: Sequence[Box]) -> list[tuple[float, Box]]:
    """A few times that differ, the most promising first, and one that limits nobody."""
    chosen: list[tuple[float, Box]] = []
    for box in boxes:
        if all(not 0.92 < box.slow_s / known < 1.09 for known, _ in chosen):
            chosen.append((box.slow_s, box))
        if len(chosen) == _TIMES:
            break
    return [*chosen, (_NO_LIMIT_S, boxes[0])] if boxes else []


def _machine_s(space: SearchSpace, box: Box) -> float:
    """What a machine must gain to pay for itself, where a token takes as long as the box allows."""
    objective = space.objective
    weight = max(objective.latency_weight, 0.01)
    rest = box.cost - (1 - weight) * np.log(box.fast_s) - (box.least - 1) * objective.machine_cost
    latency_s = float(np.exp(min(50.0, rest / weight)))
    return latency_s * objective.machine_cost / weight


def _seeds(costs: OrderCosts, limits: Ints, most: int, apart_s: float) -> list[int]:
    """Machines that would be a good beginning, so far apart."""
    space = costs.space
    with np.errstate(divide="ignore", invalid="ignore"):
        prices = (space.overhead_s + costs.layer_s * limits + costs.hops[-1, :-1] / 2) / limits
    prices[~(limits > 0)] = np.inf
    seeds: list[int] = []
    far = np.full(space.count, np.inf)
    ranked = [int(i) for i in np.argsort(prices, kind="stable") if prices[i] < np.inf]
    for each in ranked:
        if len(seeds) >= most:
            break
        if far[each] >= apart_s:
            seeds.append(each)
            far = np.minimum(far, costs.hops[each, :-1])
    return seeds
