"""The placement benchmark: every method on the same clusters, none better than the bound; and libraries of layouts."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from shardcompute.bench.placement.brkga import Genetics, decode, encode, evolve
from shardcompute.bench.placement.instances import drift, make_instance
from shardcompute.bench.placement.library import KEYS, LayoutLibrary
from shardcompute.bench.placement.methods import METHODS, spread_times
from shardcompute.bench.placement.run import PLAN, PlacementBench, run_placement_bench
from shardcompute.control.placement.search_space import space_of
from shardcompute.control.solver.bounds import bound_layouts
from shardcompute.control.solver.cp_sat import has_cp_sat
from shardcompute.control.solver.multi_start import search_orders
from shardcompute.control.solver.space import OrderCosts
from shardcompute.core.errors import UsageError

BENCH = PlacementBench(
    machines=[7],
    rooms=["roomy"],
    seeds=1,
    budget_s=0.02,
    methods=[PLAN, *(name for name in METHODS if name != "cp-sat" or has_cp_sat())],
    latency_weight=0.8,
    schemes=2,
    drifts=[0.1],
)


def test_all_methods_are_measured_on_the_same_clusters() -> None:
    said: list[str] = []

    results, runs = run_placement_bench(BENCH, said.append)

    assert said == ["7 machines, roomy, cluster 1 of 1", "7 machines, roomy: a library of 2 layouts"]
    assert [run.method for run in runs] == list(BENCH.methods)
    assert all(run.value is not None and 0 < run.value <= 1 + 1e-9 and run.cpu_s > 0 for run in runs)
    exact = next(run.value for run in runs if run.method == "exact")
    assert exact is not None
    assert all(run.value is not None and run.value <= exact * 1.01 for run in runs)
    recalled = [each for each in results if each.metric == "right cluster"]
    assert {each.labels["method"] for each in recalled} == set(KEYS)
    assert all(each.value == 100 for each in recalled)


def test_what_is_not_known_is_refused_before_anything_is_measured() -> None:
    with pytest.raises(UsageError, match="no method or room 'magic'"):
        run_placement_bench(replace(BENCH, methods=["magic"]), print)
    with pytest.raises(UsageError, match="no method or room 'empty'"):
        run_placement_bench(replace(BENCH, rooms=["empty"]), print)


def test_clusters_are_the_same_for_the_same_seed() -> None:
    assert make_instance(9, "tight", 3) == make_instance(9, "tight", 3)
    assert make_instance(9, "tight", 3) != make_instance(9, "tight", 4)
    later = drift(make_instance(9, "tight", 3), 0.5, 1)
    assert later.offers == make_instance(9, "tight", 3).offers
    assert later.links != make_instance(9, "tight", 3).links


def test_keys_decode_to_the_order_that_they_were_made_from() -> None:
    costs = OrderCosts(space_of(make_instance(12, "tight", 1)))
    order = search_orders(costs.space, bound_layouts(costs.space)[1])[0].order
    keys = encode(order, costs.space.count, np.random.default_rng(0))
    assert decode(costs, keys) == list(order)


def test_evolution_is_seeded_and_keeps_what_it_was_given() -> None:
    costs = OrderCosts(space_of(make_instance(12, "tight", 1)))
    known = search_orders(costs.space, bound_layouts(costs.space)[1])[0]
    terms, times_s = Genetics(population=12, best=3, newborn=3, generations=4), spread_times(costs.space)
    cold = [evolve(costs, times_s, 5, genetics=terms) for _ in range(2)]
    assert cold[0] == cold[1]
    warm = evolve(costs, times_s, 5, warm=[known.order], genetics=terms)
    assert warm is not None
    assert warm.cost <= costs.judge(known.order, times_s).cost


@pytest.mark.parametrize("name", list(KEYS))
def test_a_layout_is_recalled_for_the_cluster_that_it_was_made_for(name: str) -> None:
    library = LayoutLibrary(KEYS[name])
    spaces = [space_of(make_instance(16, "tight", seed)) for seed in range(4)]
    orders = [search_orders(space, bound_layouts(space)[1])[0].order for space in spaces]
    for space, order in zip(spaces, orders, strict=True):
        library.add(space, order)
    for i, space in enumerate(spaces):
        at, recalled = library.recall(OrderCosts(space), spread_times(space))
        assert at == i
        assert recalled.order == orders[i]
