from __future__ import annotations

from dataclasses import replace
from itertools import combinations, product

import pytest

from shardcompute.control import (
    Model,
    NodeCapacity,
    Placement,
    PlacementPolicy,
    Request,
    Unplaceable,
    explain_plan,
    place_chains,
)
from shardcompute.control import place as choose
from shardcompute.control.placement.cuts import cut_for_latency
from shardcompute.control.sizes import sizes_of
from shardcompute.control.state import Assignment, MeasuredLink

GIB = 1 << 30


def model(layers: int = 32, layer_bytes: int = GIB // 8, **changes: object) -> Model:
    fields: dict[str, object] = {
        "name": "m",
        "layer_bytes": (layer_bytes,) * layers,
        "embedding_bytes": 0,
        "head_bytes": 0,
        "kv_bytes_per_token_and_layer": 0,
        "kv_tokens": 0,
        "hidden": 4096,
        "context_length": 4096,
        "weight_form": "int8",
    }
    return Model(**{**fields, **changes})  # type: ignore[arg-type]


def offers(*memories_gib: float, speed: float = 1e-11) -> tuple[NodeCapacity, ...]:
    return tuple(
        NodeCapacity(name, int(size * GIB), speed)
        for name, size in zip("abcdefghijklmnop", memories_gib, strict=False)
    )


def all_links(nodes: str, rtt_s: float) -> tuple[MeasuredLink, ...]:
    return tuple(MeasuredLink(a, b, rtt_s, 1e8) for a, b in combinations(sorted([*nodes, "driver"]), 2))


def place(request: Request) -> Placement:
    placement = choose(request)
    assert isinstance(placement, Placement), placement
    return placement


def test_a_second_machine_is_used_on_a_lan_and_left_out_over_a_wan() -> None:
    near = place(Request(model(), offers(8, 8), all_links("ab", 0.0005)))
    assert [(stage.start, stage.stop) for stage in near.stages] == [(0, 16), (16, 32)]
    far = place(
        Request(
            model(), offers(8, 8), (MeasuredLink("a", "b", 0.08, 1e7), MeasuredLink("b", "driver", 0.08, 1e7))
        )
    )
    assert far.assignments == (Assignment("a", 0, 32),)
    [(left_out, why)] = far.unused
    assert left_out == "b"
    assert "does not pay" in why
    assert far.standbys == (Assignment("b", 0, 32),)


def test_weights_decide_between_one_stream_and_many() -> None:
    request = Request(model(), offers(8, 8), all_links("ab", 0.02))
    latency = place(replace(request, policy=PlacementPolicy(latency_weight=1.0)))
    throughput = place(replace(request, policy=PlacementPolicy(latency_weight=0.0)))
    assert (len(latency.stages), len(throughput.stages)) == (1, 2)
    assert latency.predicted_tokens_per_s_one_stream > throughput.predicted_tokens_per_s_one_stream
    assert latency.predicted_tokens_per_s_many < throughput.predicted_tokens_per_s_many


@pytest.mark.parametrize("count", range(1, 11))
def test_no_layer_is_dropped_over_any_number_of_machines(count: int) -> None:
    policy = PlacementPolicy(latency_weight=0.0, machine_price=0.0)
    placement = place(Request(model(layers=30), offers(*[8] * count), policy=policy))
    assert [stage.start for stage in placement.stages] == [0, *(s.stop for s in placement.stages[:-1])]
    assert placement.stages[-1].stop == 30
    assert max(stage.stop - stage.start for stage in placement.stages) == -(-30 // count)


def test_uneven_machines_are_filled_when_memory_is_tight() -> None:
    placement = place(Request(model(), offers(0.5, 2.5, 1)))
    assert {(s.node, s.stop - s.start) for s in placement.stages} == {("a", 4), ("b", 20), ("c", 8)}


def test_embedding_head_and_kv_need_room() -> None:
    big = model(embedding_bytes=GIB, head_bytes=GIB, kv_bytes_per_token_and_layer=1, kv_tokens=GIB // 32)
    total = 4 + 2 + 1
    assert choose(Request(big, offers(total))) != choose(Request(big, offers(total - 0.1)))
    assert isinstance(choose(Request(big, offers(total))), Placement)
    short = choose(Request(big, offers(total - 0.1)))
    assert isinstance(short, Unplaceable)


def test_a_tied_head_counts_once_on_one_machine_and_twice_on_two() -> None:
    tied = model(embedding_bytes=GIB, head_bytes=GIB, is_head_tied=True)
    assert isinstance(choose(Request(tied, offers(5))), Placement)
    assert isinstance(choose(Request(tied, offers(2.6, 2.6))), Unplaceable)
    assert isinstance(choose(Request(tied, offers(3, 3))), Placement)


def test_what_is_missing_is_said() -> None:
    plan = choose(Request(model(), offers(1, 2, 0.01)))
    assert isinstance(plan, Unplaceable)
    assert plan.missing_bytes == GIB
    text = explain_plan(plan, model())
    assert "c is too small: one layer needs 128.0 MiB, it offers 10.2 MiB" in text
    assert "m cannot be served: 1.0 GiB are missing" in text
    assert choose(Request(model(), ())) == Unplaceable(4 * GIB, choose(Request(model(), ())).reasons)


def test_a_slow_machine_gets_few_layers_or_none() -> None:
    fast, slow = NodeCapacity("a", 8 * GIB, 1e-11), NodeCapacity("b", 8 * GIB, 3e-11)
    policy = PlacementPolicy(latency_weight=0.0, machine_price=0.0)
    shared = place(Request(model(), (fast, slow), policy=policy))
    assert {s.node: s.stop - s.start for s in shared.stages} == {"a": 24, "b": 8}
    alone = place(Request(model(), (fast, slow)))
    assert alone.nodes == {"a"}


def test_the_ring_is_ordered_by_its_links() -> None:
    names = "abcdef"
    close = {frozenset(pair) for pair in (("driver", "c"), ("c", "a"), ("a", "e"), ("e", "b"))}
    close |= {frozenset(pair) for pair in (("b", "f"), ("f", "d"), ("d", "driver"))}
    links = tuple(
        replace_rtt(link, 0.001 if {link.a, link.b} in close else 0.05) for link in all_links(names, 1.0)
    )
    placement = place(Request(model(), offers(*[0.76] * 6), links))
    order = "".join(stage.node for stage in placement.stages)
    assert order in ("caebfd", "dfbeac")


def replace_rtt(link: MeasuredLink, rtt_s: float) -> MeasuredLink:
    return MeasuredLink(link.a, link.b, rtt_s, link.bytes_per_s)


def test_closed_links_are_planned_around() -> None:
    links = (MeasuredLink("a", "b", 0.001, 1e8, is_open=False),)
    placement = place(Request(model(), offers(1.6, 1.6, 1.6), links))
    order = [stage.node for stage in placement.stages]
    assert order[1] == "c"
    closed = choose(Request(model(), offers(2, 2), links))
    assert isinstance(closed, Unplaceable)
    assert "links are closed" in closed.reasons[-1]


def test_standby_machines_serve_only_where_nothing_else_does() -> None:
    first, second = offers(4, 4)
    reserve = replace(second, is_standby=True)
    placement = place(Request(model(), (first, reserve)))
    assert placement.nodes == {"a"}
    assert placement.standbys == (Assignment("b", 0, 32),)
    assert place(Request(model(), (reserve,))).nodes == {"b"}


def test_two_copies_where_memory_allows() -> None:
    request = Request(model(), offers(2, 2, 2, 2))
    both = place_chains(request, 2)
    assert all(isinstance(each, Placement) for each in both)
    assert [len(each.stages) for each in both if isinstance(each, Placement)] == [2, 2]
    first, second = place_chains(request, 3)[1:]
    assert isinstance(first, Placement)
    assert isinstance(second, Unplaceable)


def test_many_machines_are_placed_within_memory_and_alike() -> None:
    request = Request(model(), offers(*[0.4, 0.6, 0.3] * 5))
    placement = place(request)
    assert sum(stage.stop - stage.start for stage in placement.stages) == 32
    assert all(stage.memory_bytes <= 0.6 * GIB for stage in placement.stages)
    assert placement == choose.__wrapped__(replace(request, offers=request.offers[::-1]))


def test_a_plan_explains_itself() -> None:
    request = Request(model(), (*offers(8, 8), NodeCapacity("z", 8 * GIB, 1e-9)), all_links("abz", 0.0005))
    text = explain_plan(place(request), request.model, {"a": "attic", "z": "old laptop"})
    assert "filter: m needs 4.0 GiB, 3 machines offer 24.0 GiB" in text
    assert "score: 2 machines: " in text
    assert "← chosen" in text
    assert "attic: layers 0 to 15 (16), 2.0 GiB, 21.5 ms a token" in text
    assert "old laptop: left out, with it one stream would go from" in text
    assert "bottleneck: attic" in text


def test_a_slow_network_is_named_as_the_bottleneck() -> None:
    request = Request(model(), offers(2, 2), all_links("ab", 0.2))
    assert "bottleneck: the network" in explain_plan(place(request), request.model)


def test_a_machine_that_adds_next_to_nothing_is_left_out() -> None:
    request = Request(model(), (*offers(8), NodeCapacity("b", 8 * GIB, 1.3e-10)), all_links("ab", 0.0))
    eager = replace(request, policy=PlacementPolicy(latency_weight=0.0, machine_price=0.0))
    thrifty = replace(request, policy=PlacementPolicy(latency_weight=0.0, machine_price=0.1))
    assert (len(place(eager).stages), len(place(thrifty).stages)) == (2, 1)


def test_the_shortest_cut_for_one_machine_holds_a_tied_table_once() -> None:
    tied = model(embedding_bytes=GIB, head_bytes=GIB, is_head_tied=True)
    assert cut_for_latency(offers(5), sizes_of(tied)) == (0, 32)
    assert cut_for_latency(offers(4.9), sizes_of(tied)) is None


def test_spare_machines_stand_by_for_different_stages() -> None:
    links = (*all_links("ab", 0.0005), *(MeasuredLink(a, b, 0.5, 1e6) for a, b in product("ab", "cd")))
    placement = place(Request(model(), offers(3, 3, 3, 3), (*links, MeasuredLink("c", "driver", 0.5, 1e6))))
    assert placement.nodes == {"a", "b"}
    assert {(each.start, each.stop) for each in placement.standbys} == {(0, 16), (16, 32)}
    assert [each.node for each in placement.standbys] == ["c", "d"]
