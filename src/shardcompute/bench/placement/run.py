"""The placement benchmark: all methods take turns on the same clusters; their layouts are cut and judged alike.

A layout's value is what it is worth of the lower bound's worth: 100 % cannot be had by less than luck of the bound, and
less says only that nobody has shown better to be impossible.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import exp
from typing import Any

import numpy as np

from shardcompute.bench.placement.graphs import measure_graphs
from shardcompute.bench.placement.instances import ROOMS, drift, make_instance
from shardcompute.bench.placement.library import KEYS, LayoutLibrary
from shardcompute.bench.placement.methods import METHODS, Problem, place_by_local_search, spread_times
from shardcompute.bench.report import Result, Say
from shardcompute.control.placement.capacities import Request
from shardcompute.control.placement.place import Placement, place
from shardcompute.control.placement.search_space import space_of
from shardcompute.control.policy import PlacementPolicy
from shardcompute.control.solver.bounds import Bound, bound_layouts
from shardcompute.control.solver.cutting import best_edges
from shardcompute.control.solver.space import OrderCosts
from shardcompute.core.errors import UsageError

_LIBRARY_SEED = 1000
_STRANGER = "another cluster"
PLAN = "plan"
"""All that `plan` and the coordinator do: arrays, bound, search, cuts, and reasons in words."""


@dataclass(frozen=True, slots=True)
class PlacementBench:
    machines: Sequence[int]
    rooms: Sequence[str]
    seeds: int
    budget_s: float
    methods: Sequence[str]
    latency_weight: float
    schemes: int
    drifts: Sequence[float]
    graphs: int = 0
    """Over so many clusters graphs that are no chain are sliced."""


@dataclass(frozen=True, slots=True)
class MethodRun:
    """What one method did with one cluster."""

    method: str
    machines: int
    room: str
    seed: int
    cpu_s: float
    value: float | None
    """Of the bound; None where no layout was found."""


def run_placement_bench(bench: PlacementBench, say: Say) -> tuple[list[Result], list[MethodRun]]:
    """Medians over clusters, and every run."""
    unknown = [each for each in bench.methods if each not in (PLAN, *METHODS)]
    unknown += [each for each in bench.rooms if each not in ROOMS]
    if unknown:
        raise UsageError(
            f"no method or room {unknown[0]!r}",
            hint=f"methods: {', '.join((PLAN, *METHODS))}; rooms: {', '.join(ROOMS)}",
        )
    policy = PlacementPolicy(latency_weight=bench.latency_weight)
    runs: list[MethodRun] = []
    for machines in bench.machines:
        for room in bench.rooms:
            for seed in range(bench.seeds):
                say(f"{machines} machines, {room}, cluster {seed + 1} of {bench.seeds}")
                runs += _measure(bench, policy, machines, room, seed)
    libraries = [
        result
        for machines in bench.machines
        for room in bench.rooms
        for result in measure_library(bench, policy, machines, room, say)
    ]
    graphs = measure_graphs(bench.graphs) if bench.graphs else ()
    return [*_medians(runs), *libraries, *graphs], runs


def _measure(
    bench: PlacementBench, policy: PlacementPolicy, machines: int, room: str, seed: int
) -> Iterator[MethodRun]:
    request = make_instance(machines, room, seed, policy)
    if PLAN in bench.methods:
        started_s = time.process_time()
        plan = place(request)
        planned_s = time.process_time() - started_s
    space = space_of(request)
    costs = OrderCosts(space)
    bound = bound_layouts(space, is_close=True)[0]
    if PLAN in bench.methods:
        score = plan.score if isinstance(plan, Placement) and bound is not None else None
        value = None if score is None or bound is None else score / bound.score
        yield MethodRun(PLAN, machines, room, seed, planned_s, value)
    for name in (each for each in METHODS if each in bench.methods):
        problem = Problem(costs, seed, bench.budget_s)
        started_s = time.process_time()
        order = METHODS[name](problem)
        spent_s = time.process_time() - started_s
        yield MethodRun(name, machines, room, seed, spent_s, _value(costs, order, bound))


def _value(costs: OrderCosts, order: Sequence[int] | None, bound: Bound | None) -> float | None:
    """Of the bound, with the best cut for this order."""
    edges = None if order is None else best_edges(costs, np.array(order))
    if order is None or edges is None or bound is None:
        return None
    latency_s, bottleneck_s = costs.space.times(order, edges)
    return exp(-costs.space.objective.cost(latency_s, bottleneck_s, len(order))) / bound.score


def _medians(runs: Sequence[MethodRun]) -> Iterator[Result]:
    seen = dict.fromkeys((run.method, run.machines, run.room) for run in runs)
    for method, machines, room in seen:
        alike = [run for run in runs if (run.method, run.machines, run.room) == (method, machines, room)]
        values = [run.value for run in alike if run.value is not None]
        labels = {"method": method, "machines": machines, "room": room}
        if values:
            yield Result("value of the bound", 100 * statistics.median(values), "%", labels)
            yield Result("worst value", 100 * min(values), "%", labels)
        if values or method not in ("exact", "cp-sat"):
            yield Result("found", len(values), f"of {len(alike)} clusters", labels)
            yield Result("CPU time", 1000 * statistics.median(run.cpu_s for run in alike), "ms", labels)


def measure_library(
    bench: PlacementBench, policy: PlacementPolicy, machines: int, room: str, say: Say
) -> Iterator[Result]:
    """Layouts of several clusters, recalled for the same clusters after their links have changed, and for others."""
    if not bench.schemes:
        return
    say(f"{machines} machines, {room}: a library of {bench.schemes} layouts")
    requests = [make_instance(machines, room, _LIBRARY_SEED + i, policy) for i in range(bench.schemes)]
    spaces = [space_of(request) for request in requests]
    known = [(i, space, _solved(OrderCosts(space))) for i, space in enumerate(spaces)]
    kept = [(i, space, order) for i, space, order in known if order is not None]
    libraries = {name: LayoutLibrary(fingerprint) for name, fingerprint in KEYS.items()}
    for library in libraries.values():
        for _, space, order in kept:
            library.add(space, order)
    for what, queries in _queries(bench, policy, machines, room, [requests[i] for i, _, _ in kept]):
        asked = [OrderCosts(space_of(each)) for each in queries]
        fresh = [_worth(costs, _solved(costs)) for costs in asked]
        for name, library in libraries.items():
            labels = {"method": name, "machines": machines, "room": room, "asked": what}
            yield from _recall(library, asked, fresh, labels)


def _queries(
    bench: PlacementBench, policy: PlacementPolicy, machines: int, room: str, known: Sequence[Request]
) -> Iterator[tuple[str, list[Request]]]:
    for spread in bench.drifts:
        yield f"{spread:.0%} drift", [drift(request, spread, i) for i, request in enumerate(known)]
    strangers = (make_instance(machines, room, 2 * _LIBRARY_SEED + i, policy) for i in range(len(known)))
    yield _STRANGER, list(strangers)


def _recall(
    library: LayoutLibrary, asked: Sequence[OrderCosts], fresh: Sequence[float], labels: Mapping[str, Any]
) -> Iterator[Result]:
    """How much less a recalled layout is worth than one computed anew, and what finding it takes."""
    regrets, times_s, hits = [], [], 0
    for i, (costs, worth) in enumerate(zip(asked, fresh, strict=True)):
        started_s = time.process_time()
        at, recalled = library.recall(costs, spread_times(costs.space))
        times_s.append(time.process_time() - started_s)
        found = _worth(costs, recalled.order if recalled.cost < np.inf else None)
        regrets.append(1 - found / worth if worth > 0 else 0.0)
        hits += at == i
    if not regrets:
        return
    yield Result("regret", 100 * statistics.median(regrets), "%", labels)
    yield Result("CPU time of a recall", 1000 * statistics.median(times_s), "ms", labels)
    if labels["asked"] != _STRANGER:
        yield Result("right cluster", 100 * hits / len(regrets), "%", labels)


def _solved(costs: OrderCosts) -> tuple[int, ...] | None:
    return place_by_local_search(Problem(costs, 0, 0.0))


def _worth(costs: OrderCosts, order: Sequence[int] | None) -> float:
    edges = None if order is None else best_edges(costs, np.array(order))
    if order is None or edges is None:
        return 0.0
    return exp(-costs.space.objective.cost(*costs.space.times(order, edges), len(order)))
