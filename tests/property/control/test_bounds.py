"""Bounds and exact methods against brute force: nothing exceeds a bound, and what is called exact is the best."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace as replace_fields

from shardcompute.control import Placement, Request, place
from shardcompute.control.placement.cost_model import Score, score
from shardcompute.control.placement.gaps import gap_of
from shardcompute.control.placement.search_space import space_of
from shardcompute.control.solver.bounds import bound_layouts
from shardcompute.control.solver.cutting import best_edges, cut_order
from shardcompute.control.solver.held_karp import LayoutTable, fastest_layout
from shardcompute.control.solver.multi_start import search_orders
from shardcompute.control.solver.space import OrderCosts
from shardcompute.control.state import Assignment
from support.swarm.small_placements import every_shape, requests

CLOSE = 1 + 1e-9


@st.composite
def problems(draw: st.DrawFn) -> Request:
    """With layers that are alike as often as not: what is exact for them is an estimate for others."""
    request = draw(requests(most=4))
    if draw(st.booleans()):
        alike = (request.model.layer_bytes[0],) * request.model.layer_count
        request = replace(request, model=replace_fields(request.model, layer_bytes=alike, held=()))
    offers = tuple(offer for offer in request.offers if offer.memory_bytes > 0)
    assume(offers)
    return replace(request, offers=offers)


def scored(request: Request) -> dict[tuple[Assignment, ...], Score]:
    return {shape: score(request, shape) for shape in every_shape(request)}


@settings(max_examples=100, deadline=None)
@given(problems())
def test_no_layout_exceeds_the_bound(request: Request) -> None:
    known = scored(request)
    bound, boxes = bound_layouts(space_of(request))
    if not known:
        return
    assert bound is not None
    assert boxes
    assert bound.score * CLOSE >= max(each.score for each in known.values())
    assert bound.latency_s <= min(each.latency_s for each in known.values()) * CLOSE
    assert bound.bottleneck_s <= min(each.bottleneck_s for each in known.values()) * CLOSE


@settings(max_examples=50, deadline=None)
@given(problems(), st.data())
def test_the_bound_holds_for_a_given_number_of_machines(request: Request, data: st.DataObject) -> None:
    known = scored(request)
    assume(known)
    count = data.draw(st.sampled_from(sorted({len(shape) for shape in known})))
    bound, _ = bound_layouts(space_of(request), count, count)
    assert bound is not None
    assert bound.score * CLOSE >= max(each.score for shape, each in known.items() if len(shape) == count)


@settings(max_examples=100, deadline=None)
@given(problems())
def test_exact_layouts_are_those_of_brute_force(request: Request) -> None:
    known, space = scored(request), space_of(request)
    layouts = LayoutTable(space).best()
    assert {len(each.order) for each in layouts} == {len(shape) for shape in known}
    for each in layouts:
        stages = tuple(
            request.offers[machine].take(each.edges[i], each.edges[i + 1])
            for i, machine in enumerate(each.order)
        )
        assert stages in known
        least_s = min(worth.latency_s for shape, worth in known.items() if len(shape) == len(stages))
        assert known[stages].latency_s <= least_s * CLOSE
        assert abs(each.latency_s - known[stages].latency_s) <= 1e-9 * each.latency_s
    bound, _ = bound_layouts(space)
    if bound is not None and known:
        fastest = fastest_layout(space, bound.bottleneck_s)
        assert fastest is not None
        assert fastest.bottleneck_s <= min(each.bottleneck_s for each in known.values()) * (1 + 1e-5)


@settings(max_examples=100, deadline=None)
@given(problems(), st.sampled_from([inf, 3.0, 8.0]))
def test_cuts_of_an_order_are_those_of_brute_force(request: Request, bound_s: float) -> None:
    known, costs = scored(request), OrderCosts(space_of(request))
    nodes = [offer.node for offer in request.offers]
    for order in {tuple(stage.node for stage in shape) for shape in known}:
        indices = np.array([nodes.index(node) for node in order])
        alike = [shape for shape in known if tuple(stage.node for stage in shape) == order]
        edges = [(0, *(stage.stop for stage in shape)) for shape in alike]
        times = [costs.space.stage_times(indices, each) for each in edges]
        within = [float(each.sum()) for each in times if each.max() <= bound_s * CLOSE]
        cut = cut_order(costs, indices, np.array([min(bound_s, 1e12)]))[0]
        assert (cut is not None) == bool(within)
        if cut is not None:
            assert cut in edges
            assert float(costs.space.stage_times(indices, cut).sum()) <= min(within) * (1 + 1e-6)


@settings(max_examples=50, deadline=None)
@given(problems())
def test_searched_orders_are_sound_and_never_better_than_possible(request: Request) -> None:
    known, space = scored(request), space_of(request)
    bound, boxes = bound_layouts(space)
    assume(bound is not None and known)
    assert bound is not None
    for found in search_orders(space, boxes):
        edges = best_edges(OrderCosts(space), np.array(found.order))
        if edges is None:
            assert not space.is_uniform
            continue
        stages = tuple(
            request.offers[machine].take(edges[i], edges[i + 1]) for i, machine in enumerate(found.order)
        )
        assert stages in known
        assert known[stages].score <= bound.score * CLOSE


@settings(max_examples=60, deadline=None)
@given(requests(most=4))
def test_the_gap_of_a_plan_covers_what_is_missed(request: Request) -> None:
    plan = place(request)
    assume(isinstance(plan, Placement))
    assert isinstance(plan, Placement)
    regulars = replace(request, offers=tuple(offer for offer in request.offers if not offer.is_standby))
    known = scored(regulars) or scored(request)
    gap = gap_of(request, plan)
    assert plan.score >= (1 - gap.gap) * max(each.score for each in known.values()) / CLOSE
    assert gap.most_one_stream == pytest.approx(max(each.one_stream for each in known.values()), rel=1e-5)
    assert gap.most_many * CLOSE >= max(each.many_streams for each in known.values())
    if request.policy.latency_weight == 1.0 or (
        request.policy.latency_weight == 0.0 and request.policy.machine_price == 0.0
    ):
        # For one stream alone, or many alone, both the plan and the bound are exact.
        assert gap.gap < 0.001


@settings(max_examples=40, deadline=None)
@given(requests(most=8, least=6))
def test_more_machines_are_placed_if_and_only_if_they_can_be(request: Request) -> None:
    """Against the exact table: closed links, unlike layers and machines of two kinds included."""
    regulars = tuple(offer for offer in request.offers if not offer.is_standby)
    request = replace(request, offers=regulars, policy=replace_fields(request.policy, machine_price=0.0))
    plan = place(request)
    usable = tuple(offer for offer in regulars if offer.memory_bytes > 0)
    layouts = LayoutTable(space_of(replace(request, offers=usable))).best() if usable else []
    assert isinstance(plan, Placement) == bool(layouts)
    if not isinstance(plan, Placement):
        return
    assert len(plan.nodes) == len(plan.stages)
    worth = score(request, plan.assignments)
    assert worth.score == pytest.approx(plan.score)
    if request.policy.latency_weight == 1.0:
        assert worth.latency_s <= 1.1 * min(each.latency_s for each in layouts)
