"""Islands: who computes every layer together, by what was measured between them."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import pytest

from shardcompute.control import NodeCapacity, Placement, PlacementPolicy, Request, place, place_chains
from shardcompute.control.explain import explain_step
from shardcompute.control.placement.cost_model import score
from shardcompute.control.placement.parallelism import AUTO, PIPELINE, Parallelism, parse_parallelism
from shardcompute.control.placement.rank_groups import choose_weights, offers_of, seat_ranks, stage_room_bytes
from shardcompute.control.sizes import sizes_of, sums_of
from shardcompute.control.state import Assignment, MeasuredLink, RankPlace, RankSeat
from support.models.plain_model import LAYERS, ranked_model, small_model

GIB = 1 << 30
ONE_S = 1 / 14.0
"""One token on one machine, as `bench tensor` measured it."""
CLASS = "onnx-1.31.0/float32/avx2"
MODEL = ranked_model()
SMALL = small_model()
SPEED = ONE_S / (sum(MODEL.work_bytes) + MODEL.head_bytes)


def machines(nodes: str, **changes: object) -> tuple[NodeCapacity, ...]:
    fields: dict[str, object] = {"rank_class": CLASS, "is_measured": True, **changes}
    return tuple(NodeCapacity(node, 4 * GIB, SPEED, **fields) for node in nodes)  # type: ignore[arg-type]


def links(islands: list[str], near_s: float, far_s: float, rate: float = 1.2e8) -> tuple[MeasuredLink, ...]:
    """Round trips inside each island, and between them and to the driver."""
    home = {node: island for island in islands for node in island}
    return tuple(
        MeasuredLink(a, b, near_s if home.get(a) == home.get(b) else far_s, rate)
        for a, b in combinations(sorted([*home, "driver"]), 2)
    )


def request(islands: list[str], near_s: float, far_s: float = 0.0005, **changes: object) -> Request:
    offers = machines("".join(islands))
    return replace(Request(MODEL, offers, links(islands, near_s, far_s), parallel=AUTO), **changes)


def placed(wanted: Request) -> Placement:
    found = place(wanted)
    assert isinstance(found, Placement), found
    return found


def shape(found: Placement) -> list[tuple[str, ...]]:
    return [stage.members for stage in found.assignments]


def test_near_machines_compute_together_and_far_ones_one_after_the_other() -> None:
    near, far = placed(request(["ab"], 0.0001)), placed(request(["ab"], 0.005))
    assert shape(near) == [("a", "b")]
    assert near.stages[0].exchange == "gather", "tokens stay those of one machine"
    assert sorted(shape(far)) == [("a",), ("b",)]
    assert near.predicted_tokens_per_s_one_stream > 1.2 / ONE_S
    assert far.predicted_tokens_per_s_one_stream <= 1 / ONE_S


@pytest.mark.parametrize(
    ("islands", "far_s", "small", "large"),
    [
        (["a"], 0.0005, [1], [1]),
        (["ab"], 0.0005, [1, 1], [2]),
        (["ab", "c"], 0.02, [1, 1], [2]),
        (["abc"], 0.0005, [1, 1, 1], [3]),
    ],
    ids=["one", "two near", "two near, one far", "three near"],
)
def test_small_models_are_left_alone_and_nobody_makes_a_stream_slower(
    islands: list[str], far_s: float, small: list[int], large: list[int]
) -> None:
    speed = 1 / 46.9 / (sum(SMALL.work_bytes) + SMALL.head_bytes)
    slower = tuple(replace(each, seconds_per_byte=speed) for each in machines("".join(islands)))
    for wanted, expected in (
        (request(islands, 0.0001, far_s, model=SMALL, offers=slower), small),
        (request(islands, 0.0001, far_s), large),
    ):
        found, plain = placed(wanted), placed(replace(wanted, parallel=PIPELINE))
        assert [len(members) for members in shape(found)] == expected
        assert found.predicted_tokens_per_s_one_stream >= plain.predicted_tokens_per_s_one_stream


def test_only_classes_whose_ranks_have_the_bits_of_one_are_taken_together() -> None:
    torch = machines("ab", rank_class="torch-2.13.0/float32/avx2")
    assert all(len(members) == 1 for members in shape(placed(request(["ab"], 0.0001, offers=torch))))
    asked = request(["ab"], 0.0001, offers=torch, parallel=Parallelism(tp=2))
    assert [len(members) for members in shape(placed(asked))] == [2], "whoever asks for it has it"


def test_two_islands_are_two_stages() -> None:
    found = placed(request(["abc", "def"], 0.0001, 0.002))
    assert sorted(map(sorted, shape(found))) == [["a", "b", "c"], ["d", "e", "f"]] or shape(found) in (
        [("a", "b", "c")],
        [("d", "e", "f")],
    )
    tight = tuple(replace(offer, memory_bytes=GIB // 5) for offer in machines("abcdef"))
    found = placed(request(["abc", "def"], 0.0001, 0.002, offers=tight))
    assert sorted(map(sorted, shape(found))) == [["a", "b", "c"], ["d", "e", "f"]]


@pytest.mark.parametrize("unknown", ["links", "speeds", "class"])
def test_what_was_not_measured_computes_alone(unknown: str) -> None:
    known = request(["ab"], 0.0001)
    changed = {
        "links": replace(known, links=tuple(each for each in known.links if each.b == "driver")),
        "speeds": replace(known, offers=machines("ab", is_measured=False)),
        "class": replace(known, offers=machines("ab", rank_class="")),
    }[unknown]
    assert all(len(members) == 1 for members in shape(placed(changed)))


def test_machines_of_two_classes_do_not_compute_a_layer_together() -> None:
    other = machines("b", rank_class="onnx-1.31.0/float32/avx512")
    mixed = request(["ab"], 0.0001, offers=(*machines("a"), *other))
    assert all(len(members) == 1 for members in shape(placed(mixed)))


def test_nobody_is_taken_together_unless_it_is_allowed() -> None:
    for asked in (Parallelism(), Parallelism(pp=2)):
        found = placed(request(["ab"], 0.0001, parallel=asked))
        assert all(len(members) == 1 for members in shape(found))


@pytest.mark.parametrize(
    ("asked", "expected"),
    [("tp=2", 2), ("tp=2,pp=1", 2), ("tp=2,pp=2", 2), ("tp=4", 4), ("tp=3,pp=1", 3)],
)
def test_as_many_ranks_as_were_asked_for(asked: str, expected: int) -> None:
    wanted = request(["abcd"], 0.02, parallel=parse_parallelism(asked))
    found = placed(wanted)
    assert {len(members) for members in shape(found)} == {expected}
    assert wanted.parallel.pp in (0, len(found.stages))
    assert wanted.suits(found.assignments)
    assert found.reasons[0].startswith(f"asked for: {expected} ranks in each ")


def test_who_is_left_out_of_ranks_is_told_why() -> None:
    found = placed(request(["abc"], 0.0001, parallel=parse_parallelism("tp=2")))
    assert [len(members) for members in shape(found)] == [2]
    assert [why for _, why in found.unused] == ["tp=2 was asked for, and it would compute alone"]


def test_a_step_of_ranks_is_told_of_all_of_them() -> None:
    names = {"a": "desk", "b": "lap"}
    alone, ranks = Assignment("a", 0, 4), Assignment("a", 0, 4, (RankSeat("a", 1), RankSeat("b", 1)))
    assert "desk, which does everything: 20.0 ms" in explain_step([(alone, 0.02)], 0.001, names)
    assert "desk + lap, which do everything together: 20.0 ms" in explain_step([(ranks, 0.02)], 0.001, names)


def test_ranks_that_add_up_only_where_somebody_asks() -> None:
    found = placed(request(["ab"], 0.0001, parallel=Parallelism(tp=2, exchange="reduce")))
    assert found.stages[0].exchange == "reduce"


def test_what_cannot_be_had_gives_way() -> None:
    found = placed(request(["ab"], 0.0001, parallel=Parallelism(tp=3)))
    assert all(len(members) == 1 for members in shape(found))
    few = ranked_model(heads=2, kv_heads=1)
    found = placed(request(["abcd"], 0.0001, parallel=Parallelism(tp=4), model=few))
    assert all(len(members) == 1 for members in shape(found))


def test_copies_have_ranks_of_their_own() -> None:
    copies = place_chains(request(["ab", "cd"], 0.0001, 0.02, parallel=Parallelism(tp=2)), 2)
    assert [isinstance(each, Placement) for each in copies] == [True, True]
    members = [each.nodes for each in copies if isinstance(each, Placement)]
    assert not members[0] & members[1]
    assert all(len(each) == 2 for each in members)


def test_every_rank_has_room_for_its_share() -> None:
    offers = tuple(
        replace(offer, memory_bytes=size, seconds_per_byte=speed)
        for offer, size, speed in zip(
            machines("abcd"),
            (GIB // 4, GIB // 3, GIB // 2, GIB // 5),
            (SPEED, 2 * SPEED, SPEED, 4 * SPEED),
            strict=True,
        )
    )
    wanted = request(["abcd"], 0.0001, offers=offers, parallel=Parallelism(tp=2))
    found = placed(wanted)
    rooms = {offer.node: offer.memory_bytes for offer in offers}
    for stage in found.assignments:
        for node in stage.members:
            held = sums_of(MODEL, "", stage.place_of(node))
            assert held.memory_bytes(stage.start, stage.stop) <= rooms[node]


@pytest.mark.parametrize(
    ("times", "weights"),
    [
        ([1, 1], (1, 1)),
        ([1.0, 1.05, 0.95], (1, 1, 1)),
        ([1, 2], (2, 1)),
        ([2, 3], (3, 2)),
        ([1, 40], (16, 1)),
    ],
)
def test_shares_follow_speeds_in_small_numbers(times: list[float], weights: tuple[int, ...]) -> None:
    assert choose_weights(times) == weights


def test_the_quickest_leads() -> None:
    slow, quick = machines("ab")
    seats = seat_ranks([replace(slow, seconds_per_byte=2 * SPEED), quick])
    assert seats == (RankSeat("b", 2), RankSeat("a", 1))


def test_a_group_costs_what_was_measured() -> None:
    """`bench tensor`: 14.0 tokens/s on one rank, 21.8 on two that gather and 25.1 on two that reduce."""
    near = request(["ab"], 0.00003, policy=PlacementPolicy(), links=links(["ab"], 0.00003, 0.00003, 1e9))
    for exchange, measured in (("gather", 21.8), ("reduce", 25.1)):
        stage = Assignment("a", 0, LAYERS, (RankSeat("a", 1), RankSeat("b", 1)), exchange)  # type: ignore[arg-type]
        predicted = score(near, [stage]).one_stream
        assert measured * 0.85 < predicted < measured * 1.1


def test_a_group_that_does_not_pay_costs_what_was_measured() -> None:
    """The same for the default model: 46.9 tokens/s on one rank, 27.5 on two that gather."""
    speed = 1 / 46.9 / (sum(SMALL.work_bytes) + SMALL.head_bytes)
    offers = tuple(replace(each, seconds_per_byte=speed) for each in machines("ab"))
    lines = links(["ab"], 0.00003, 0.00003, 1e9)
    near = request(["ab"], 0.00003, model=SMALL, offers=offers, policy=PlacementPolicy(), links=lines)
    stage = Assignment("a", 0, 30, (RankSeat("a", 2), RankSeat("b", 1)))
    assert 27.5 * 0.85 < score(near, [stage]).one_stream < 27.5 * 1.15


def test_a_stage_whose_ranks_are_cut_off_is_worth_nothing() -> None:
    known = request(["ab"], 0.0001)
    closed = tuple(
        MeasuredLink(link.a, link.b, link.rtt_s, link.bytes_per_s, is_open=link.b == "driver")
        for link in known.links
    )
    stage = Assignment("a", 0, LAYERS, (RankSeat("a", 1), RankSeat("b", 1)))
    assert offers_of(replace(known, links=closed)).find(stage) is None
    assert score(replace(known, links=closed), [stage]).score == 0
    assert all(len(members) == 1 for members in shape(placed(replace(known, links=closed))))


def test_a_table_that_one_machine_leaves_in_its_file_takes_memory_of_ranks() -> None:
    own = sums_of(MODEL, "", RankPlace(0, (1, 1)))
    whole = replace(sizes_of(MODEL).on(""), embedding_bytes=0)
    memory_bytes = 300_000_000
    room_bytes = stage_room_bytes(whole, own, memory_bytes)
    assert room_bytes > memory_bytes, "half of every layer takes half"
    for start in range(LAYERS):
        for stop in range(start + 1, LAYERS + 1):
            if whole.memory_bytes(start, stop) <= room_bytes:
                assert own.memory_bytes(start, stop) <= memory_bytes
