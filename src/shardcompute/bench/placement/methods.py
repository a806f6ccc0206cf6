"""Ways to place a model, each as an order of machines for the same search space."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import inf

import numpy as np

from shardcompute.bench.placement.brkga import evolve
from shardcompute.control.solver.annealing import Annealing
from shardcompute.control.solver.bounds import bound_layouts
from shardcompute.control.solver.cp_sat import has_cp_sat, improve_by_cp_sat
from shardcompute.control.solver.held_karp import EXACT_LIMIT, LayoutTable
from shardcompute.control.solver.multi_start import search_orders, times_around
from shardcompute.control.solver.space import CountedOrder, Floats, OrderCosts, SearchSpace

_WALK_MOVES = 40_000
_WALK_BOUNDS = (1.0, 1.06, 0.97, 1.15)
_EXACT_TIMES = 8
_MOST_ORDERS = 20_000


@dataclass(frozen=True, slots=True)
class Problem:
    costs: OrderCosts
    seed: int
    budget_s: float
    """CPU time of those methods that go on for as long as they are let."""

    @property
    def space(self) -> SearchSpace:
        return self.costs.space


Order = tuple[int, ...]
Method = Callable[[Problem], Order | None]


def spread_times(space: SearchSpace) -> Floats:
    """Times of the slowest stage from what all machines together could do to what the slowest does alone."""
    work = float(space.work_before[-1]) + space.head_work
    fast_s = work / float((1 / space.seconds_per_byte).sum())
    slow_s = float((space.overhead_s + space.seconds_per_byte * work).max())
    return np.geomspace(fast_s, slow_s, 24)


def _until(budget_s: float) -> Callable[[], bool]:
    started_s = time.process_time()
    return lambda: time.process_time() - started_s >= budget_s


def place_at_random(problem: Problem) -> Order | None:
    """The best of many random orders, each as long as memory needs."""
    costs, chance, is_over = problem.costs, random.Random(problem.seed), _until(problem.budget_s)
    times_s = spread_times(problem.space)
    best: CountedOrder | None = None
    machines = list(range(problem.space.count))
    for _ in range(_MOST_ORDERS):
        if is_over() and best is not None:
            break
        chance.shuffle(machines)
        rooms = np.cumsum(costs.room[machines])
        enough = int(np.searchsorted(rooms, problem.space.layers)) + 1
        found = costs.judge(
            machines[: min(enough + chance.randrange(3), len(machines), problem.space.layers)], times_s
        )
        if found.cost < inf and (best is None or found.cost < best.cost):
            best = found
    return None if best is None else best.order


def place_greedily(problem: Problem) -> Order | None:
    return _first(search_orders(problem.space, bound_layouts(problem.space)[1], steps=0))


def place_by_local_search(problem: Problem) -> Order | None:
    """Greedy starts, the best of them improved: what `place` does."""
    return _first(search_orders(problem.space, bound_layouts(problem.space)[1]))


def place_by_annealing(problem: Problem) -> Order | None:
    """Local search, and then walks from its result."""
    is_over = _until(problem.budget_s)
    found = search_orders(problem.space, bound_layouts(problem.space)[1])
    if not found:
        return None
    best, walk = found[0], 0
    while not is_over() and walk < 1000:
        bound_s = best.bottleneck_s * _WALK_BOUNDS[walk % len(_WALK_BOUNDS)]
        best = Annealing(problem.costs, bound_s, problem.seed + walk).improve(best, _WALK_MOVES, is_over)
        walk += 1
    return best.order


def place_by_genetics(problem: Problem) -> Order | None:
    """BRKGA from random keys alone."""
    is_over = _until(problem.budget_s)
    return _order(evolve(problem.costs, spread_times(problem.space), problem.seed, should_stop=is_over))


def place_by_warm_genetics(problem: Problem) -> Order | None:
    """BRKGA with the greedy orders among the first keys."""
    is_over = _until(problem.budget_s)
    boxes = bound_layouts(problem.space)[1]
    warm = [each.order for each in search_orders(problem.space, boxes, steps=0)]
    times_s = np.concatenate([times_around(box.slow_s) for box in boxes[:1]] or [spread_times(problem.space)])
    return _order(evolve(problem.costs, times_s, problem.seed, warm=warm, should_stop=is_over))


def place_by_cp_sat(problem: Problem) -> Order | None:
    """Local search, and then CP-SAT hinted with its result; None without `ortools`."""
    if not has_cp_sat():
        return None
    found = search_orders(problem.space, bound_layouts(problem.space)[1])
    if not found:
        return None
    best = found[0]
    for factor in _WALK_BOUNDS:
        bound_s = found[0].bottleneck_s * factor
        best = improve_by_cp_sat(
            problem.costs, best, bound_s, budget_s=problem.budget_s / len(_WALK_BOUNDS), seed=problem.seed
        )
    return best.order


def place_exactly(problem: Problem) -> Order | None:
    """Held-Karp for several times of the slowest stage; None of more machines than it can do."""
    space = problem.space
    if space.count > EXACT_LIMIT:
        return None
    boxes = bound_layouts(space)[1]
    times_s = [inf, *(box.slow_s for box in boxes[:_EXACT_TIMES])]
    layouts = [layout for bound_s in times_s for layout in LayoutTable(space, bound_s).best()]
    cost = space.objective.cost
    best = min(
        layouts, key=lambda each: cost(each.latency_s, each.bottleneck_s, len(each.order)), default=None
    )
    return None if best is None else best.order


METHODS: Mapping[str, Method] = {
    "random": place_at_random,
    "greedy": place_greedily,
    "local-search": place_by_local_search,
    "annealing": place_by_annealing,
    "brkga": place_by_genetics,
    "brkga-warm": place_by_warm_genetics,
    "cp-sat": place_by_cp_sat,
    "exact": place_exactly,
}


def _first(found: list[CountedOrder]) -> Order | None:
    return found[0].order if found else None


def _order(found: CountedOrder | None) -> Order | None:
    return None if found is None else found.order
