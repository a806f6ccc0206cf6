"""Which machines, in which order, with which cuts: the search for the placement of most worth.

All orders of up to 5 machines are considered, so that the result is exact for the cuts that are weighed; up to
10 machines every subset with its shortest ring to every last machine (Held-Karp); beyond that prefixes of
sorted lists, improved by adding, dropping and exchanging machines. Whatever cannot beat the best found so far
by an optimistic bound is not looked at.

It may be ended at any time once something is found: the best so far is good, and more work makes it better. A quick
search does only as much work as `QUICK_WORK`, and begins with the sorted lists from 6 machines on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import permutations
from math import exp, inf, log

from shardcompute.control.placement.capacities import NodeCapacity, Request
from shardcompute.control.placement.cost_model import Score, count_machines, hops_of, score, score_of, stage_s
from shardcompute.control.placement.cuts import (
    cut_for_latency,
    cut_for_throughput,
    cut_within,
    fill,
    slowest_s,
)
from shardcompute.control.placement.rings import EXACT_LIMIT, RingTable, choose_order
from shardcompute.control.policy import PlacementPolicy
from shardcompute.control.sizes import Sizes
from shardcompute.control.state import Assignment

_ALL_ORDERS_LIMIT = 5
_BOUNDS = 5
"""How many compromises between the fastest slowest stage and the smallest sum are weighed."""
_CLIMB_LIMIT = 400
_QUICK_EXACT_RINGS = 6
"""A quick search knows the shortest ring of up to so many machines only."""
QUICK_WORK = 350
"""What a quick search may do, in machines that were cut for: some 80 ms of one core."""


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
        """Machines that were cut for so far; pairs of machines that were ordered count an eighth."""
        self.was_cut_short = False
        """There was more to look at; or this was a quick search, and a thorough one looks at more."""
        self._is_quick = is_quick
        self._quick_work = quick_work
        self._should_stop = should_stop

    def run(self) -> Found | None:
        count = len(self._offers)
        if count <= _ALL_ORDERS_LIMIT:
            if self._is_quick and count == _ALL_ORDERS_LIMIT:
                self._climb()  # a good one soon, in case that there is no time for all orders
            self._weigh_all(self._every_order())
        elif count <= EXACT_LIMIT and not self._is_quick:
            self._weigh_all(self._every_ring())
        else:
            self.was_cut_short = self._is_quick
            self._climb()
        if self.best is None:
            self._weigh_filled()
        if self.best is None and self._is_quick and _ALL_ORDERS_LIMIT < count <= EXACT_LIMIT:
            self._weigh_all(self._every_ring())  # whatever it takes: there may be one layout that fits
        return self.best

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

    def _has_done_enough(self) -> bool:
        return self._is_quick and self.work >= self._quick_work

    def _try(self, order: Sequence[NodeCapacity]) -> None:
        self.work += len(order)
        known = self.best_by_count.get(len(order))
        floor = 0.0 if known is None or self.best is None else self.best.worth.score
        found = best_cut(self._request, order, floor)
        if found is None:
            return
        if self.best is None or found.rank < self.best.rank:
            self.best = found
        if known is None or found.rank < known.rank:
            self.best_by_count[len(order)] = found

    def _every_order(self) -> Iterator[_Candidate]:
        for machines in range(self._min_machines, self._max_machines + 1):
            for order in permutations(self._offers.values(), machines):
                ring_s = self._hops.ring_s([offer.node for offer in order])
                if ring_s < inf and _has_room(self._request, order):
                    yield _Candidate(_bound(self._request, order, ring_s), machines, partial(tuple, order))

    def _every_ring(self) -> Iterator[_Candidate]:
        offers = list(self._offers.values())
        table = RingTable(list(self._offers), self._hops)
        for mask, last, ring_s in table.ends():
            chosen = [offer for i, offer in enumerate(offers) if mask >> i & 1 and i != last]
            chosen.append(offers[last])
            if self._allows(len(chosen)) and _has_room(self._request, chosen):
                yield _Candidate(
                    _bound(self._request, chosen, ring_s),
                    len(chosen),
                    partial(self._walk, table, mask, last),
                )

    def _walk(self, table: RingTable, mask: int, last: int) -> list[NodeCapacity]:
        return self._named(table.order(mask, last))

    def _named(self, nodes: Iterable[str]) -> list[NodeCapacity]:
        return [self._offers[node] for node in nodes]

    def _climb(self) -> None:
        offers = list(self._offers.values())
        lists = [
            sorted(offers, key=lambda offer: offer.seconds_per_byte),
            sorted(offers, key=lambda offer: self._hops.entry_s(offer.node)),
            sorted(offers, key=lambda offer: -offer.memory_bytes),
        ]
        for machines in filter(self._allows, _spread(self._max_machines)):
            for ranked in lists:
                if self._is_over() or self._has_done_enough():
                    return
                self._try_subset([offer.node for offer in ranked[:machines]])
        tries, current = 0, self.best
        while current is not None and tries < _CLIMB_LIMIT:
            before = current
            for nodes in self._neighbours([stage.node for stage in before.stages]):
                tries += 1
                self._try_subset(nodes)
                if self._is_over():
                    return
                if self.best is not before or tries >= _CLIMB_LIMIT:
                    break
            current = self.best if self.best is not before else None

    def _neighbours(self, nodes: list[str]) -> Iterator[list[str]]:
        outside = [node for node in self._offers if node not in nodes]
        if self._allows(len(nodes) - 1):
            yield from ([*nodes[:i], *nodes[i + 1 :]] for i in range(len(nodes)))
        if self._allows(len(nodes) + 1):
            yield from ([*nodes, node] for node in outside)
        yield from ([*nodes[:i], node, *nodes[i + 1 :]] for node in outside for i in range(len(nodes)))

    def _try_subset(self, nodes: Sequence[str]) -> None:
        chosen = self._named(sorted(nodes))
        if not _has_room(self._request, chosen):
            return
        # Were there no hops at all: this is far cheaper to see than the shortest ring.
        if self.best is not None and self._most(chosen) <= self.best.worth.score:
            return
        limit = _QUICK_EXACT_RINGS if self._is_quick else EXACT_LIMIT
        self.work += len(chosen) ** 2 // 8
        order = choose_order([offer.node for offer in chosen], self._hops, limit)
        if order is None:
            return
        ring_s = self._hops.ring_s(order)
        for way in (order, order[::-1]):
            offers = self._named(way)
            if self.best is None or _bound(self._request, offers, ring_s) > self.best.worth.score:
                self._try(offers)

    def _most(self, chosen: Sequence[NodeCapacity]) -> float:
        """What these machines could be worth at most, whichever of them is the last."""
        last = min(chosen, key=lambda offer: offer.seconds_per_byte)
        return _bound(self._request, [*(offer for offer in chosen if offer is not last), last], 0.0)

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
    for i, offer in enumerate(largest):
        others = largest[:i] + largest[i + 1 :]
        yield [offer, *others]
        yield [*others, offer]


def best_cut(request: Request, order: Sequence[NodeCapacity], floor: float = 0.0) -> Found | None:
    """The cut of most worth for machines in this order, among compromises of throughput and latency.

    None when memory does not suffice, or when no cut can be worth as much as `floor`.
    """
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


def _spread(limit: int) -> list[int]:
    """1, 2, 3, … growing in steps of about a fifth, up to and with the limit."""
    counts, count = [], 1
    while count < limit:
        counts.append(count)
        count = max(count + 1, count * 6 // 5)
    return [*counts, limit]
