"""The quick search against the thorough one: never much worse, and never more work than it may do."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import combinations

import pytest

from shardcompute.control import Model, NodeCapacity, Placement, Request, Unplaceable, place
from shardcompute.control.placement.parallelism import Parallelism
from shardcompute.control.placement.place import place_thoroughly
from shardcompute.control.placement.search import QUICK_WORK, STEP_WORK, Search
from shardcompute.control.state import MeasuredLink

MIB = 1 << 20
LAYERS = 64
WORST = 0.95
"""What a plan that is found quickly must be worth, of one that is searched for."""
PROVEN = 0.995
"""As much, where a bound says that nothing better is worth searching for."""


def instance(machines: int, room: float, seed: int) -> Request:
    """Machines of many sizes and speeds, with `room` times the memory that the model needs."""
    chance = random.Random(seed)
    model = Model(
        name="m",
        layer_bytes=(400 * MIB,) * LAYERS,
        embedding_bytes=500 * MIB,
        head_bytes=500 * MIB,
        kv_bytes_per_token_and_layer=4096,
        kv_tokens=16384,
        hidden=8192,
        context_length=8192,
        weight_form="int8",
    )
    mean = (LAYERS * 464 + 1000) * MIB * room / machines
    offers = tuple(
        NodeCapacity(
            f"n{number:02}",
            int(mean * chance.uniform(0.6, 1.4)),
            chance.choice([2e-11, 4e-11, 8e-11]) * chance.uniform(0.8, 1.2),
        )
        for number in range(machines)
    )
    ends = sorted([*(offer.node for offer in offers), "driver"])
    links = tuple(
        MeasuredLink(a, b, chance.choice([0.0005, 0.005, 0.02]), chance.choice([1e8, 1e7]))
        for a, b in combinations(ends, 2)
    )
    return Request(model, offers, links)


@pytest.mark.parametrize("machines", [3, 5, 7, 9, 14])
@pytest.mark.parametrize("room", [1.3, 4.0], ids=["tight", "roomy"])
def test_a_quick_plan_is_nearly_as_good_as_a_thorough_one(machines: int, room: float) -> None:
    for seed in range(3):
        request = instance(machines, room, seed)
        quick, thorough = place(request), place_thoroughly(request)
        assert isinstance(quick, Placement) is isinstance(thorough, Placement)
        if isinstance(quick, Placement) and isinstance(thorough, Placement):
            assert quick.score >= WORST * thorough.score
            assert thorough.is_final
            assert not quick.is_final or quick.score >= PROVEN * thorough.score


@pytest.mark.parametrize("machines", [5, 10, 32, 64])
@pytest.mark.parametrize("room", [1.3, 4.0], ids=["tight", "roomy"])
def test_a_quick_search_does_little_work(machines: int, room: float) -> None:
    search = Search(instance(machines, room, 1), is_quick=True)
    search.run()
    # What is found is cut for, and the step that is under way is done.
    assert search.work <= QUICK_WORK + 4 * machines + 4 * STEP_WORK


def test_a_search_ends_when_it_should_with_the_best_so_far() -> None:
    request = instance(9, 4.0, 2)
    asked = 0

    def stop_soon() -> bool:
        nonlocal asked
        asked += 1
        return asked > 3

    early, whole = place_thoroughly(request, stop_soon), place_thoroughly(request)
    assert isinstance(early, Placement)
    assert isinstance(whole, Placement)
    assert early.score <= whole.score
    assert not early.is_final
    assert asked == 4


def test_nothing_is_given_up_for_want_of_time() -> None:
    """Where next to no layout fits, a quick search goes on until it finds it."""
    for seed in range(6):
        request = instance(8, 1.12, seed)
        quick, thorough = place(request), place_thoroughly(request, lambda: True)
        assert isinstance(quick, Unplaceable) is isinstance(thorough, Unplaceable)


@pytest.mark.parametrize("stages", [1, 4, 11])
def test_many_machines_are_cut_into_as_many_stages_as_were_asked_for(stages: int) -> None:
    request = replace(instance(12, 14.0, 1), parallel=Parallelism(pp=stages))
    plan = place(request)
    assert isinstance(plan, Placement)
    assert len(plan.stages) == stages


def test_of_many_machines_the_slow_and_the_far_are_left_out_and_said_to_be() -> None:
    request = instance(14, 4.0, 3)
    plan = place(request)
    assert isinstance(plan, Placement)
    assert len(plan.stages) < 14
    why = dict(plan.unused)
    assert {*why} | plan.nodes == {offer.node for offer in request.offers}
    assert any("that does not pay" in each for each in why.values())


def test_a_machine_that_cannot_be_reached_is_planned_around() -> None:
    request = instance(9, 1.7, 2)
    plan = place(request)
    assert isinstance(plan, Placement)
    inner = plan.stages[1].node
    ends = {"driver", *(offer.node for offer in request.offers)} - {inner}
    closed = tuple(
        MeasuredLink(link.a, link.b, link.rtt_s, link.bytes_per_s, is_open=False)
        if inner in (link.a, link.b) and {link.a, link.b} & ends
        else link
        for link in request.links
    )
    around = place(replace(request, links=closed))
    assert not isinstance(around, Placement) or inner not in around.nodes
    roomy = place(replace(instance(9, 4.0, 2), links=closed))
    assert isinstance(roomy, Placement)
    assert inner not in roomy.nodes
