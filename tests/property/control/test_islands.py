"""Rank groups in any cluster: sound, within every machine's memory, and never worth less than without them."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

from hypothesis import given, settings
from hypothesis import strategies as st

from shardcompute.control import NodeCapacity, Placement, Request, place, replace_stage
from shardcompute.control.placement.cost_model import score
from shardcompute.control.placement.parallelism import AUTO, PIPELINE, Parallelism
from shardcompute.control.placement.place import place_thoroughly
from shardcompute.control.placement.replacement import Replacement
from shardcompute.control.sizes import sums_of
from shardcompute.control.state import Assignment, MeasuredLink, covers
from support.models.plain_model import LAYERS, ranked_model

MIB = 1 << 20
shapes = st.sampled_from([(32, 4), (9, 3), (4, 1), (32, 32)])


@st.composite
def clusters(draw: st.DrawFn) -> Request:
    heads, kv_heads = draw(shapes)
    nodes = "abcdef"[: draw(st.integers(1, 6))]
    offers = tuple(
        NodeCapacity(
            node,
            draw(st.integers(100, 1500)) * MIB,
            draw(st.floats(3e-11, 4e-10)),
            rank_class=draw(st.sampled_from(["x", "x", "x", "y", ""])),
            is_measured=draw(st.sampled_from([True, True, True, False])),
        )
        for node in nodes
    )
    links = tuple(
        MeasuredLink(
            a, b, draw(st.sampled_from([3e-5, 1e-4, 4e-4, 5e-3])), 1.2e8, draw(st.integers(0, 9)) > 0
        )
        for a, b in combinations(sorted([*nodes, "driver"]), 2)
        if draw(st.integers(0, 9)) > 0
    )
    return Request(ranked_model(heads, kv_heads), offers, links)


def check(request: Request, stages: tuple[Assignment, ...]) -> None:
    offers = {offer.node: offer for offer in request.offers}
    assert covers(stages, LAYERS)
    for stage in stages:
        for node in stage.members:
            held = sums_of(request.model, offers[node].holding, stage.place_of(node))
            assert held.memory_bytes(stage.start, stage.stop) <= offers[node].memory_bytes
        if stage.ranks:
            assert len({offers[node].rank_class for node in stage.members}) == 1
            assert offers[stage.node].rank_class
            closed = {(link.a, link.b) for link in request.links if not link.is_open}
            assert not closed & {*combinations(sorted(stage.members), 2)}


@settings(max_examples=150, deadline=None)
@given(
    clusters(),
    st.sampled_from([AUTO, PIPELINE, *(Parallelism(tp=tp, pp=pp) for tp in (2, 3) for pp in (0, 2))]),
)
def test_groups_are_sound_and_never_worth_less_than_none(request: Request, asked: Parallelism) -> None:
    plain, found = place(request), place(replace(request, parallel=asked))
    assert isinstance(plain, Placement) <= isinstance(found, Placement), "what serves without serves with"
    if not isinstance(found, Placement):
        return
    check(request, found.assignments)
    if asked == AUTO and isinstance(plain, Placement):
        assert found.score >= plain.score * (1 - 1e-9)
        is_grouped = any(stage.ranks for stage in found.stages)
        assert not is_grouped or found.score >= plain.score * (1 + request.policy.tensor_min_gain - 1e-9)
        measured = {offer.node for offer in request.offers if offer.is_measured}
        assert all(set(stage.members) <= measured for stage in found.assignments if stage.ranks)
    if asked == PIPELINE:
        assert not any(stage.ranks for stage in found.stages)
    assert found.score == score(request, found.assignments).score
    assert place(replace(request, offers=request.offers[::-1], parallel=asked)) == found


@settings(max_examples=60, deadline=None)
@given(clusters(), st.sampled_from([AUTO, Parallelism(tp=2)]), st.data())
def test_what_loses_a_member_gets_another_shape(
    request: Request, asked: Parallelism, data: st.DataObject
) -> None:
    request = replace(request, parallel=asked)
    found = place(request)
    if not isinstance(found, Placement):
        return
    lost = data.draw(st.sampled_from(sorted(found.nodes)))
    after = replace_stage(request, found.assignments, [lost])
    if isinstance(after, Replacement):
        check(request, after.stages)
        assert all(lost not in stage.members for stage in after.stages)
    left = replace(request, offers=tuple(offer for offer in request.offers if offer.node != lost))
    assert isinstance(after, Replacement) >= isinstance(place(left), Placement)


@settings(max_examples=25, deadline=None)
@given(clusters())
def test_more_time_finds_nothing_unsound(request: Request) -> None:
    found = place_thoroughly(replace(request, parallel=AUTO))
    if isinstance(found, Placement):
        check(request, found.assignments)
