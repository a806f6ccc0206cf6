"""CP-SAT against the exact solver, where it is installed; and that everything does without it."""

from __future__ import annotations

from math import inf

import pytest

from shardcompute.bench.placement.instances import make_instance
from shardcompute.control.placement.search_space import space_of
from shardcompute.control.policy import PlacementPolicy
from shardcompute.control.solver import cp_sat
from shardcompute.control.solver.cp_sat import has_cp_sat, improve_by_cp_sat
from shardcompute.control.solver.held_karp import LayoutTable
from shardcompute.control.solver.multi_start import times_around
from shardcompute.control.solver.space import CountedOrder, OrderCosts

needs_cp_sat = pytest.mark.skipif(not has_cp_sat(), reason="ortools is not installed")


def some_costs(machines: int, room: str, seed: int) -> OrderCosts:
    return OrderCosts(space_of(make_instance(machines, room, seed, PlacementPolicy(latency_weight=1.0))))


def any_order(costs: OrderCosts, bound_s: float) -> CountedOrder:
    """All machines, one behind the other."""
    return costs.judge(list(range(min(costs.space.count, costs.space.layers))), times_around(bound_s))


@needs_cp_sat
@pytest.mark.parametrize("room", ["roomy", "tight"])
@pytest.mark.parametrize("seed", [0, 1])
def test_it_finds_what_the_exact_solver_finds(room: str, seed: int) -> None:
    costs = some_costs(6, room, seed)
    best = min(LayoutTable(costs.space, inf).best(), key=lambda each: each.latency_s)
    found = improve_by_cp_sat(
        costs, any_order(costs, best.bottleneck_s), best.bottleneck_s * 1.0001, budget_s=20.0
    )
    assert found.latency_s <= best.latency_s * 1.01
    assert sorted(set(found.order)) == sorted(found.order)


@needs_cp_sat
def test_what_is_known_is_never_made_worse() -> None:
    costs = some_costs(7, "roomy", 3)
    best = min(LayoutTable(costs.space, inf).best(), key=lambda each: each.latency_s)
    known = costs.judge(list(best.order), times_around(best.bottleneck_s))
    assert improve_by_cp_sat(costs, known, best.bottleneck_s, budget_s=5.0).cost <= known.cost
    assert improve_by_cp_sat(costs, known, best.bottleneck_s, budget_s=5.0, should_stop=lambda: True) is known


def test_without_it_what_is_known_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cp_sat, "find_spec", lambda name: None)
    costs = some_costs(5, "roomy", 0)
    known = any_order(costs, 1.0)
    assert not cp_sat.has_cp_sat()
    assert improve_by_cp_sat(costs, known, 1.0, budget_s=1.0) is known
