"""CP-SAT: orders of machines by constraint programming, hinted with what is known. Needs `ortools` (extra `planner`).

A ring is a circuit through the driver and the machines that take part; each has a number of layers that its memory and
a time for the slowest stage allow. Least latency is sought for that time; layers that differ count as the mean, so
that a cut has to confirm what is found. It may take long: for the background, within a time.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from itertools import pairwise
from math import inf
from typing import Any

from shardcompute.control.solver.multi_start import times_around
from shardcompute.control.solver.space import CountedOrder, OrderCosts, layer_limits

_PER_SECOND = 1_000_000.0
"""Times are whole numbers to it: microseconds."""
_MOST_MACHINES = 128
"""Arcs grow with their square; beyond, its time is spent on reading the question."""


def has_cp_sat() -> bool:
    return find_spec("ortools") is not None


def improve_by_cp_sat(
    costs: OrderCosts,
    known: CountedOrder,
    bound_s: float,
    *,
    budget_s: float,
    least: int = 1,
    most: int | None = None,
    seed: int = 1,
    should_stop: Callable[[], bool] = lambda: False,
) -> CountedOrder:
    """A shorter ring than the known one in which no stage takes longer than `bound_s`, or the known one."""
    space = costs.space
    if space.count > _MOST_MACHINES or bound_s == inf or not has_cp_sat() or budget_s <= 0 or should_stop():
        return known
    from ortools.sat.python import cp_model

    model = cp_model.CpModel()
    driver = space.count
    limits = [int(limit) for limit in layer_limits(space, bound_s)]
    arcs = _arcs(model, costs, driver, limits)
    used = [model.new_bool_var(f"used {i}") for i in range(driver)]
    layers = [model.new_int_var(0, limit, f"layers {i}") for i, limit in enumerate(limits)]
    model.add_circuit(
        [*((a, b, arc) for (a, b), arc in arcs.items()), *((i, i, used[i].negated()) for i in range(driver))]
    )
    model.add(sum(layers) == space.layers)
    model.add(sum(used) >= max(1, least))
    model.add(sum(used) <= min(most or driver, space.layers))
    _bind_layers(model, costs, arcs, used, layers)
    hops = [_whole(costs.hops[a, b]) * arc for (a, b), arc in arcs.items()]
    stages = [
        _whole(costs.layer_s[i]) * layers[i] + _whole(space.overhead_s[i]) * used[i] for i in range(driver)
    ]
    heads = [_whole(costs.head_s[i]) * arcs[i, driver] for i in range(driver) if (i, driver) in arcs]
    model.minimize(sum(hops) + sum(stages) + sum(heads))
    _hint(model, arcs, used, known.order, driver)
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = budget_s
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = seed
    status = solver.solve(model, _stopping(cp_model, should_stop))
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return known
    order, at = [], driver
    for _ in range(driver):
        at = next(b for (a, b), arc in arcs.items() if a == at and solver.value(arc))
        if at == driver:
            break
        order.append(at)
    found = costs.judge(order, times_around(bound_s))
    return found if found.cost < known.cost else known


def _whole(seconds: float) -> int:
    return round(min(float(seconds), 1e6) * _PER_SECOND)


def _arcs(model: Any, costs: OrderCosts, driver: int, limits: list[int]) -> dict[tuple[int, int], Any]:
    """Ways from machine to machine that are open, between those that can take a layer."""
    able = [i for i in range(driver) if limits[i] > 0]
    hops = costs.space.hops
    return {
        (a, b): model.new_bool_var(f"{a} to {b}")
        for a in (*able, driver)
        for b in (*able, driver)
        if a != b and hops[a, b] < inf
    }


def _bind_layers(
    model: Any, costs: OrderCosts, arcs: dict[tuple[int, int], Any], used: list[Any], layers: list[Any]
) -> None:
    """Who takes part has layers, and fewer where it holds the embedding or the head besides."""
    driver = costs.space.count
    for i in range(driver):
        model.add(layers[i] >= 1).only_enforce_if(used[i])
        model.add(layers[i] == 0).only_enforce_if(used[i].negated())
        alone = costs.space.fits_whole[i]
        for arc, room in (
            (arcs.get((driver, i)), int(costs.first_room[i])),
            (arcs.get((i, driver)), int(costs.last_room[i])),
        ):
            if arc is not None and not alone:
                model.add(layers[i] <= room).only_enforce_if(arc)


def _hint(
    model: Any, arcs: dict[tuple[int, int], Any], used: list[Any], order: tuple[int, ...], driver: int
) -> None:
    ring = [driver, *order, driver]
    taken = set(pairwise(ring))
    for ends, arc in arcs.items():
        model.add_hint(arc, ends in taken)
    for i, each in enumerate(used):
        model.add_hint(each, i in order)


def _stopping(cp_model: Any, should_stop: Callable[[], bool]) -> Any:
    """Ends a search that is no longer wanted, whenever it has found something better."""

    class Stopping(cp_model.CpSolverSolutionCallback):  # type: ignore[misc]
        def on_solution_callback(self) -> None:
            if should_stop():
                self.stop_search()

    return Stopping()
