"""The solver on clusters of many machines: the same answer for the same question, and never worse for more work."""

from __future__ import annotations

import numpy as np
import pytest

from shardcompute.bench.placement.instances import make_instance
from shardcompute.control.placement.search_space import space_of
from shardcompute.control.solver.annealing import Annealing
from shardcompute.control.solver.bounds import bound_layouts
from shardcompute.control.solver.held_karp import LayoutTable
from shardcompute.control.solver.multi_start import search_orders, times_around
from shardcompute.control.solver.sites import SiteCharges, find_sites
from shardcompute.control.solver.space import OrderCosts, SearchSpace
from shardcompute.control.solver.spanning import tree_edges

CASES = [(9, "roomy"), (24, "tight"), (40, "roomy")]


def space_for(machines: int, room: str, seed: int = 0) -> SearchSpace:
    return space_of(make_instance(machines, room, seed))


@pytest.mark.parametrize(("machines", "room"), CASES)
def test_more_work_never_makes_it_worse_and_equal_questions_have_equal_answers(
    machines: int, room: str
) -> None:
    space = space_for(machines, room)
    bound, boxes = bound_layouts(space)
    assert bound is not None
    greedy, searched = search_orders(space, boxes, steps=0)[0], search_orders(space, boxes)[0]
    assert searched == search_orders(space, boxes)[0]
    assert searched.cost <= greedy.cost
    assert np.exp(-searched.cost) <= bound.score
    costs = OrderCosts(space)
    walked = [Annealing(costs, searched.bottleneck_s, 7).improve(searched, 2000) for _ in range(2)]
    assert walked[0] == walked[1]
    assert walked[0].cost <= searched.cost
    assert len(set(walked[0].order)) == len(walked[0].order)


def test_annealing_mends_a_bad_order() -> None:
    space = space_for(24, "tight")
    costs = OrderCosts(space)
    searched = search_orders(space, bound_layouts(space)[1])[0]
    chance = np.random.default_rng(0)
    shuffled = costs.judge(chance.permutation(np.array(searched.order)), times_around(searched.bottleneck_s))
    mended = Annealing(costs, searched.bottleneck_s, 1).improve(shuffled, 8000)
    assert shuffled.cost > searched.cost
    assert mended.cost < (shuffled.cost + searched.cost) / 2


@pytest.mark.parametrize("room", ["roomy", "tight"])
def test_searching_finds_nearly_what_is_exact_for_few_machines(room: str) -> None:
    for seed in range(3):
        space = space_for(8, room, seed)
        _, boxes = bound_layouts(space)
        cost = space.objective.cost
        layouts = [each for box in boxes[:2] for each in LayoutTable(space, box.slow_s).best()]
        if not layouts:
            continue
        exact = min(cost(each.latency_s, each.bottleneck_s, len(each.order)) for each in layouts)
        assert search_orders(space, boxes)[0].cost <= exact + 0.05


def test_a_bound_is_closer_with_more_work() -> None:
    space = space_for(40, "roomy")
    quick, close = bound_layouts(space)[0], bound_layouts(space, is_close=True)[0]
    assert quick is not None
    assert close is not None
    assert close.score <= quick.score * (1 + 1e-9)


def test_a_tree_has_the_shortest_edges_that_join_everything() -> None:
    weights = np.array([[9.0, 1, 4, 8], [1, 9, 2, 8], [4, 2, 9, 5], [8, 8, 5, 9]])
    assert tree_edges(weights).tolist() == [1, 2, 5]
    weights[3, :3] = weights[:3, 3] = np.inf
    assert tree_edges(weights).tolist() == [1, 2, np.inf]
    weights[0, 1:] = weights[1:, 0] = np.inf
    assert tree_edges(weights).tolist() == [2, np.inf, np.inf]


def test_sites_are_told_apart_by_the_greatest_step_between_distances() -> None:
    near, far = 0.001, 0.05
    ways = np.full((5, 5), far)
    ways[:2, :2] = ways[2:4, 2:4] = near
    ways[4, :2] = ways[:2, 4] = near
    np.fill_diagonal(ways, np.inf)
    assert find_sites(ways).tolist() == [0, 0, 1, 1, 0]
    assert find_sites(np.where(np.isinf(ways), np.inf, near)).tolist() == [0] * 5


def test_only_machines_away_from_the_driver_pay_for_the_way_between_sites() -> None:
    space = space_for(24, "tight")
    ways = np.minimum(space.hops, space.hops.T)
    np.fill_diagonal(ways, np.inf)
    home = find_sites(ways)[:-1] == find_sites(ways)[-1]
    charges = SiteCharges(space)
    paid = charges.fixed - space.overhead_s - ways.min(axis=1)[:-1]
    assert np.allclose(paid[home], 0)
    assert (paid[~home] > 0).all()
    before = paid.sum()
    charges.shift(np.where(np.arange(space.count) % 2 == 0, 1.0, 0.0))
    after = charges.fixed - space.overhead_s - ways.min(axis=1)[:-1]
    assert after.sum() == pytest.approx(before)
    assert after[0::2].sum() > paid[0::2].sum()
