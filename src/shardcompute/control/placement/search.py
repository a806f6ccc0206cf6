"""Which machines, in which order, with which cuts: the search for the placement of most worth.

All orders of up to 5 machines are considered, so that the result is exact for the cuts that are weighed. Beyond that
the solver's arrays are asked (`control.solver`): a lower bound says what no layout can exceed and where to look; up to
6 machines (more where layers are few), or 12 in a thorough search, layouts are solved exactly for several times of the
slowest stage; of more machines rings are grown greedily from several beginnings and improved by local search, and in a
thorough search by annealing.

It may be ended at any time once something is found: the best so far is good, and more work makes it better. A quick
search does only as much work as `QUICK_WORK`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import permutations
from math import exp, inf, log

import numpy as np

from shardcompute.control.placement.capacities import NodeCapacity, Request
from shardcompute.control.placement.cost_model import Score, count_machines, hops_of, score, score_of, stage_s
from shardcompute.control.placement.cuts import (
    cut_for_latency,
    cut_for_throughput,
    cut_within,
    fill,
    slowest_s,
)
from shardcompute.control.placement.rank_groups import offers_of
from shardcompute.control.placement.search_space import space_of
from shardcompute.control.policy import PlacementPolicy
from shardcompute.control.sizes import Sizes
from shardcompute.control.solver.annealing import Annealing
from shardcompute.control.solver.bounds import Bound, Box, bound_layouts
from shardcompute.control.solver.cp_sat import has_cp_sat, improve_by_cp_sat
from shardcompute.control.solver.cutting import Edges, best_edges
from shardcompute.control.solver.held_karp import EXACT_LIMIT, LayoutTable, fastest_layout
from shardcompute.control.solver.multi_start import search_orders, times_around
from shardcompute.control.solver.space import OrderCosts, SearchSpace
from shardcompute.control.state import Assignment

_ALL_ORDERS_LIMIT = 5
_QUICK_TABLE = 250_000
"""Ways to come to entries of an exact table that a quick search may weigh: those of 6 machines and a hundred layers."""
_BOUNDS = 5
"""How many compromises between the fastest slowest stage and the smallest sum are weighed."""
QUICK_WORK = 350
"""What a quick search may do, in machines that were cut for."""
STEP_WORK = 6
"""What a round of local search counts for."""
_THOROUGH_STEPS = 600
_FILLED_ENDS = 64
_CUT_FOR = 2
"""Of the orders that a search found, so many are cut for."""
_WALKS = 6
_WALK_MOVES = 30_000
_THROUGHPUT_ALONE = 0.01
_CP_SAT_S = 5.0
"""Of the seconds that a search in the background has."""
_PROVEN = 0.005
"""A layout that is within so much of the bound is not worth searching for a better one."""


@dataclass(frozen=True, slots=True)
class Found:
    stages: tuple[Assignment, ...]
    worth: Score

    @property
    def rank(self) -> tuple[float, int, tuple[str, ...]]:
        """Smaller is better: more worth, then fewer machines, then names, so that ties are settled alike."""
        # Rounded so that the noise of floating point does not decide.
        score = float(f"{self.worth.score:.9e}")
        return -score, len(self.stages), tuple(stage.node for stage in self.stages)


@dataclass(frozen=True, slots=True)
class _Candidate:
    bound: float
    machines: int
    order: Callable[[], Sequence[NodeCapacity]]


class Search:
    """The best placement found, and the best for every number of machines that was worth a look."""

    def __init__(
        self,
        request: Request,
        max_machines: int | None = None,
        min_machines: int = 1,
        *,
        is_quick: bool = False,
        quick_work: int = QUICK_WORK,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> None:
        """`should_stop` is asked before every step, and ends a search that has found something."""
        self._request = request
        self._hops = hops_of(request)
        self._offers = {offer.node: offer for offer in sorted(request.offers, key=lambda each: each.node)}
        self._max_machines = min(max_machines or len(self._offers), request.sizes.layer_count)
        self._min_machines = min_machines
        self.best: Found | None = None
        self.best_by_count: dict[int, Found] = {}
        self.work = 0
        """Machines that were cut for so far; rounds of local search count as several."""
        self.was_cut_short = False
        """There was more to look at; or this was a quick search, and a thorough one looks at more."""
        self._is_quick = is_quick
        self._quick_work = quick_work
        self._should_stop = should_stop
        self.bound: Bound | None = None
        """What no layout can exceed, where that was asked."""
        self._boxes: Sequence[Box] = ()

    def run(self) -> Found | None:
        count = len(self._offers)
        if count >= _ALL_ORDERS_LIMIT and (self._is_quick or count > _ALL_ORDERS_LIMIT):
            self._bound()
        if count > _ALL_ORDERS_LIMIT:
            self.was_cut_short = self._is_quick
            if self.bound is None:
                return None
            self._solve()
        else:
            if self.bound is not None:
                self._climb(
                    QUICK_WORK // STEP_WORK
                )  # a good one soon, in case that there is no time for all orders
            self._weigh_all(self._every_order())
        if self.best is None:
            self._weigh_filled()
        if self.best is None and _ALL_ORDERS_LIMIT < count <= EXACT_LIMIT:
            self._solve_exactly()  # whatever it takes: there may be one layout that fits
        if self.best is not None:
            # To the last digit what everybody else computes for these stages.
            self.best = replace(self.best, worth=score(self._request, self.best.stages))
        if self.bound is not None and self.best is not None:
            is_proven = self.best.worth.score >= self.bound.score * (1 - _PROVEN)
            self.was_cut_short = self.was_cut_short and not is_proven
        return self.best

    def _bound(self) -> None:
        self.bound, self._boxes = bound_layouts(self._costs.space, self._min_machines, self._max_machines)

    @cached_property
    def _costs(self) -> OrderCosts:
        return OrderCosts(space_of(replace(self._request, offers=tuple(self._offers.values()))))

    def _solve(self) -> None:
        """By the solver, on arrays."""
        count, layers = len(self._offers), self._request.sizes.layer_count
        is_quickly_done = 2**count * count**2 * (layers + 1) <= _QUICK_TABLE
        is_few = is_quickly_done if self._is_quick else count <= EXACT_LIMIT
        if is_few:
            self._solve_exactly()
        if not is_few or self.best is None or self._is_quick:
            self._climb(self._quick_work // STEP_WORK)
        if not is_few and not self._is_quick and not self._is_over():
            self._climb(_THOROUGH_STEPS)
            self._constrain()
            self._anneal()

    def _climb(self, steps: int) -> None:
        found = search_orders(
            self._costs.space,
            self._boxes,
            least=self._min_machines,
            most=self._max_machines,
            steps=steps,
            should_stop=self._is_over_after_step,
        )
        for each in found[:_CUT_FOR]:
            self._try_order(each.order)

    def _solve_exactly(self) -> None:
        """The shortest layout of every number of machines, for several times of the slowest stage; and where only many
        streams count, the fastest slowest stage."""
        space, allowed = self._costs.space, (self._min_machines, self._max_machines)
        if self.bound is not None and self._request.policy.latency_weight < _THROUGHPUT_ALONE:
            fastest = fastest_layout(space, self.bound.bottleneck_s, *allowed, self._is_over)
            if fastest is not None:
                self._keep(fastest.order, fastest.edges)
        for bound_s in (inf, *_times(self._boxes, 1 if self._is_quick else 8)):
            if self._is_over():
                return
            for layout in LayoutTable(space, bound_s).best(*allowed):
                self._keep(layout.order, layout.edges)
        if self.best is not None:
            self._try_order(self._order_of(self.best))

    def _constrain(self) -> None:
        """By CP-SAT, where it is there, from the best that is known and for a part of the time."""
        if self.best is None or self._is_over() or not has_cp_sat():
            return
        bound_s = self.best.worth.bottleneck_s * 1.06
        start = self._costs.judge(np.array(self._order_of(self.best)), times_around(bound_s))
        found = improve_by_cp_sat(
            self._costs,
            start,
            bound_s,
            budget_s=_CP_SAT_S,
            least=self._min_machines,
            most=self._max_machines,
            should_stop=self._should_stop,
        )
        self._try_order(found.order)

    def _anneal(self) -> None:
        """From the best that is known, several times."""
        for walk in range(_WALKS):
            if self._is_over() or self.best is None:
                return
            order = np.array(self._order_of(self.best))
            bound_s = self.best.worth.bottleneck_s * (1.0, 1.06, 0.97, 1.15)[walk % 4]
            start = self._costs.judge(order, times_around(bound_s))
            annealing = Annealing(
                self._costs, bound_s, walk, least=self._min_machines, most=self._max_machines
            )
            self._try_order(annealing.improve(start, _WALK_MOVES, self._is_over).order)

    def with_one_more(self, extra: NodeCapacity) -> Score | None:
        """What the best would do with one more machine where that is nearest; None where nothing fits then."""
        if self.best is None:
            return None
        if len(self._offers) > _ALL_ORDERS_LIMIT and extra.node in self._offers:
            return self._with_index(self._order_of(self.best), list(self._offers).index(extra.node))
        order = [offers_of(self._request)[stage] for stage in self.best.stages]
        at = self._hops.nearest_link([offer.node for offer in order], extra.node)
        wider = [*order[:at], extra, *order[at:]]
        if self._hops.ring_s([offer.node for offer in wider]) == inf:
            return None
        found = best_cut(replace(self._request, offers=tuple(wider)), wider)
        return None if found is None else found.worth

    def _with_index(self, order: list[int], extra: int) -> Score | None:
        space, hops = self._costs.space, self._costs.hops
        ring = np.array([space.count, *order, space.count])
        detours = hops[ring[:-1], extra] + hops[extra, ring[1:]] - hops[ring[:-1], ring[1:]]
        at = int(detours.argmin())
        bound_s = self.best.worth.bottleneck_s if self.best is not None else inf
        found = self._costs.judge([*order[:at], extra, *order[at:]], times_around(bound_s))
        if found.cost == inf:
            return None
        machines = int(space.machines[list(found.order)].sum())
        return score_of(found.latency_s, found.bottleneck_s, machines, self._request.policy)

    def _order_of(self, found: Found) -> list[int]:
        index = {node: i for i, node in enumerate(self._offers)}
        return [index[stage.node] for stage in found.stages]

    def _try_order(self, order: Sequence[int]) -> None:
        self.work += len(order)
        edges = best_edges(self._costs, np.array(order))
        if edges is not None:
            self._keep(order, edges)

    def _keep(self, order: Sequence[int], edges: Edges) -> None:
        """What the solver found, if it is better than what is known."""
        offers = list(self._offers.values())
        chosen = [offers[i] for i in order]
        self._consider(_found_by_arrays(self._costs.space, chosen, order, edges, self._request.policy))

    def _allows(self, machines: int) -> bool:
        return self._min_machines <= machines <= self._max_machines

    def _weigh_all(self, candidates: Iterable[_Candidate]) -> None:
        for candidate in sorted(candidates, key=lambda each: (-each.bound, each.machines)):
            if self.best is not None and candidate.bound < self.best.worth.score * (1 - 1e-9):
                return
            if self._is_over():
                return
            self._try(candidate.order())

    def _is_over(self) -> bool:
        """Whether what was found has to do."""
        is_over = self.best is not None and (self._has_done_enough() or self._should_stop())
        self.was_cut_short |= is_over
        return is_over

    def _is_over_after_step(self) -> bool:
        """As `_is_over`, asked in each round of local search."""
        self.work += STEP_WORK
        return self._is_over()

    def _has_done_enough(self) -> bool:
        return self._is_quick and self.work >= self._quick_work

    def _try(self, order: Sequence[NodeCapacity]) -> None:
        self.work += len(order)
        known = self.best_by_count.get(len(order))
        floor = 0.0 if known is None or self.best is None else self.best.worth.score
        found = best_cut(self._request, order, floor)
        if found is not None:
            self._consider(found)

    def _consider(self, found: Found) -> None:
        known = self.best_by_count.get(len(found.stages))
        if self.best is None or found.rank < self.best.rank:
            self.best = found
        if known is None or found.rank < known.rank:
            self.best_by_count[len(found.stages)] = found

    def _every_order(self) -> Iterator[_Candidate]:
        for machines in range(self._min_machines, self._max_machines + 1):
            for order in permutations(self._offers.values(), machines):
                ring_s = self._hops.ring_s([offer.node for offer in order])
                if ring_s < inf and _has_room(self._request, order):
                    yield _Candidate(_bound(self._request, order, ring_s), machines, partial(tuple, order))

    def _weigh_filled(self) -> None:
        """When memory is tight: orders chosen for how well they fill, not for how fast they are."""
        for order in filling_orders(self._offers.values()):
            if self._is_over():
                return
            stages, left_over = fill(order, self._request.sizes)
            offers = [offer for offer, _, _ in stages]
            if left_over or not self._allows(len(offers)):
                continue
            if self._hops.ring_s([offer.node for offer in offers]) < inf:
                self._try(offers)


def filling_orders(offers: Iterable[NodeCapacity]) -> Iterator[list[NodeCapacity]]:
    """Orders in which machines are filled: by size, and with each one in turn as the first or the last."""
    largest = sorted(offers, key=lambda offer: (-offer.memory_bytes, offer.node))
    yield largest
    yield largest[::-1]
    for i, offer in enumerate(largest[:_FILLED_ENDS]):
        others = largest[:i] + largest[i + 1 :]
        yield [offer, *others]
        yield [*others, offer]


def best_cut(request: Request, order: Sequence[NodeCapacity], floor: float = 0.0) -> Found | None:
    """The cut of most worth for machines in this order, among compromises of throughput and latency.

    None when memory does not suffice, or when no cut can be worth as much as `floor`.
    """
    if len(order) > _ALL_ORDERS_LIMIT:
        return _best_cut_by_arrays(request, order)
    sizes, machines = request.sizes, count_machines(order)
    ring_s = hops_of(request).ring_s([offer.node for offer in order])

    def is_hopeless(stages_s: float, bottleneck_s: float) -> bool:
        bound = score_of(stages_s + ring_s, bottleneck_s, machines, request.policy).score
        return bound < floor * (1 - 1e-9)

    tolerable_s = _tolerable_s(ring_s + _least_stages_s(sizes, order), machines, request.policy, floor)
    if cut_within(order, sizes, tolerable_s) is None:
        return None
    fastest = cut_for_throughput(order, sizes)
    if fastest is None:
        return None
    low = slowest_s(order, sizes, fastest)
    shortest = cut_for_latency(order, sizes) or fastest
    if is_hopeless(_stages_s(order, sizes, shortest), low):
        return None
    high = slowest_s(order, sizes, shortest)
    steps = range(_BOUNDS - 1) if high > low > 0 else range(1)
    bounds = [low * (high / low) ** (i / (_BOUNDS - 1)) if low > 0 else low for i in steps]
    cuts = {fastest, shortest, *(cut_for_latency(order, sizes, bound) for bound in bounds)}
    found = [
        Found(stages, score(request, stages))
        for stages in (_assign(order, edges) for edges in cuts if edges is not None)
    ]
    return min(found, key=lambda each: (each.rank, [stage.stop for stage in each.stages]))


def _best_cut_by_arrays(request: Request, order: Sequence[NodeCapacity]) -> Found | None:
    space, indices = space_of(replace(request, offers=tuple(order))), range(len(order))
    edges = best_edges(OrderCosts(space), np.arange(len(order)))
    return None if edges is None else _found_by_arrays(space, order, indices, edges, request.policy)


def _found_by_arrays(
    space: SearchSpace,
    chosen: Sequence[NodeCapacity],
    order: Sequence[int],
    edges: Edges,
    policy: PlacementPolicy,
) -> Found:
    latency_s, bottleneck_s = space.times(order, edges)
    worth = score_of(latency_s, bottleneck_s, count_machines(chosen), policy)
    return Found(_assign(chosen, edges), worth)


def _tolerable_s(latency_s: float, machines: int, policy: PlacementPolicy, floor: float) -> float:
    """How slow the slowest stage may be for the worth to reach `floor` at this latency."""
    if floor <= 0 or policy.latency_weight >= 1:
        return inf
    ratio = score_of(latency_s, 1.0, machines, policy).score / (floor * (1 - 1e-9))
    power = log(ratio) / (1 - policy.latency_weight)
    return exp(power) if power < 100 else inf


def _stages_s(order: Sequence[NodeCapacity], sizes: Sizes, edges: Sequence[int]) -> float:
    return sum(stage_s(sizes, offer, edges[i], edges[i + 1]) for i, offer in enumerate(order))


def _least_stages_s(sizes: Sizes, order: Sequence[NodeCapacity]) -> float:
    """No cut makes the sum of stage times smaller: the fastest machines are filled to the brim first."""
    seconds = sizes.head_bytes * order[-1].seconds_per_byte
    left: float = sizes.work_before[-1]
    for offer in sorted(order, key=lambda each: each.seconds_per_byte):
        work = min(left, offer.memory_bytes * sizes.on(offer.holding).densest_work)
        seconds += offer.overhead_s + work * offer.seconds_per_byte
        left -= work
    return seconds


def _assign(order: Sequence[NodeCapacity], edges: Sequence[int]) -> tuple[Assignment, ...]:
    return tuple(offer.take(edges[i], edges[i + 1]) for i, offer in enumerate(order))


def _has_room(request: Request, order: Sequence[NodeCapacity]) -> bool:
    """No cut fits where this is False."""
    sizes = request.sizes
    if len({offer.holding for offer in order}) > 1:
        # In the costs of each, the part of all layers for which it has room.
        held = [(offer.memory_bytes, sizes.on(offer.holding)) for offer in order]
        parts = [max(0, room - sums.overhead_bytes) / max(1, sums.memory_before[-1]) for room, sums in held]
        return sum(parts) >= 1 - 1e-9
    held_alike = sizes.on(order[0].holding)
    room = sum(offer.memory_bytes for offer in order)
    need = held_alike.total_bytes + (len(order) - 1) * held_alike.overhead_bytes
    return room >= need + (held_alike.shared_bytes if len(order) > 1 else 0)


def _bound(request: Request, order: Sequence[NodeCapacity], ring_s: float) -> float:
    """No cut over these machines, the last one given, can be worth more than this."""
    sizes = request.sizes
    layers_work = sizes.work_before[-1]
    latency_s = ring_s + _least_stages_s(sizes, order)
    # Were layers as fine as water, all stages would take equally long.
    speed = sum(1 / offer.seconds_per_byte for offer in order)
    spent = sum(offer.overhead_s / offer.seconds_per_byte for offer in order)
    bottleneck_s = (layers_work + sizes.head_bytes + spent) / speed
    return score_of(latency_s, bottleneck_s, count_machines(order), request.policy).score


def _times(boxes: Sequence[Box], most: int) -> list[float]:
    """Times of the slowest stage that differ, the most promising first."""
    chosen: list[float] = []
    for box in boxes:
        if len(chosen) < most and all(not 0.97 < box.slow_s / known < 1.03 for known in chosen):
            chosen.append(box.slow_s)
    return chosen
