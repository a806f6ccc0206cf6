"""Maps of layers: in proportion, within the width, and clear about what slows a chain down."""

from __future__ import annotations

import time
from dataclasses import replace
from itertools import accumulate, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardcompute.cli.cluster.layer_map import block_sizes, bottleneck_of, draw_chain, draw_map
from shardcompute.cli.cluster.text import describe_cluster, describe_nodes, describe_ranks, fit
from shardcompute.node.admin.views import (
    ChainView,
    ClusterView,
    CoordinatorView,
    ModelView,
    RankView,
    StageTimes,
    StageView,
)

from ..cluster_lab import Lab

NAMES = {"a": "laptop", "b": "box", "c": "pi"}


def _chain(*layers: int, slowest: int = 0, bottleneck: str = "") -> ChainView:
    stops = list(accumulate(layers))
    stages = tuple(
        StageView(
            node="abc"[index % 3],
            start=stop - count,
            stop=stop,
            memory_bytes=count << 20,
            fraction=1.0,
            predicted_s=0.02 if index == slowest else 0.01,
        )
        for index, (count, stop) in enumerate(zip(layers, stops, strict=True))
    )
    return ChainView(
        id="org/tiny#1",
        model="org/tiny",
        epoch=1,
        status="ready",
        reason="",
        missing_bytes=0,
        stages=stages,
        bottleneck=bottleneck,
    )


@settings(max_examples=60, deadline=None)
@given(layers=st.lists(st.integers(1, 60), min_size=1, max_size=20), room=st.integers(20, 120))
def test_blocks_fill_the_row_in_proportion(layers: list[int], room: int) -> None:
    sizes = block_sizes(layers, room)
    assert sum(sizes) == room
    assert min(sizes) >= 1
    ordered = sorted(zip(layers, sizes, strict=True))
    assert all(narrow <= wide + 1 for (_, narrow), (_, wide) in pairwise(ordered))


def test_twice_the_layers_are_twice_as_wide() -> None:
    one, two = block_sizes([10, 20], 60)
    assert abs(two - 2 * one) <= 3


@pytest.mark.parametrize(("slowest", "word_is_left"), [(0, False), (2, True)])
def test_the_bottleneck_is_marked_in_the_row_and_in_the_list(slowest: int, word_is_left: bool) -> None:
    name = ["laptop", "box", "pi"][slowest]
    chain = _chain(4, 10, 6, slowest=slowest, bottleneck=f"bottleneck: {name}, 20 ms of 40 ms")
    _, row, below, *listed = draw_chain(chain, NAMES, 80)
    assert f"{slowest + 1} {name}" in row
    first, last = below.index("^"), below.rindex("^")
    assert f"{slowest + 1} {name}" in row[first : last + 1]
    assert set(row[first : last + 1]) - set(f"= {slowest + 1}{name}") == set()
    assert (below.index("bottleneck") < first) is word_is_left
    assert [line.endswith("<- bottleneck") for line in listed[:3]] == [at == slowest for at in range(3)]


def test_machines_that_compute_a_stage_together_stand_below_each_other() -> None:
    chain = _chain(4, 10)
    ranks = tuple(
        RankView(node=node, weight=weight, memory_bytes=1 << 20) for node, weight in (("b", 2), ("c", 1))
    )
    chain = replace(chain, stages=(chain.stages[0], replace(chain.stages[1], ranks=ranks, exchange="gather")))
    _, row, *listed = draw_chain(chain, NAMES, 80)
    assert "2 box + pi" in row
    assert [line.split()[:2] for line in listed[:3]] == [["1", "laptop"], ["2", "box"], ["pi", "4-13"]]
    assert "rank 0, weight 2" in listed[1]
    assert "rank 1, weight 1" in listed[2]


def test_ranks_are_told_with_what_they_wait_for() -> None:
    stage = _chain(4).stages[0]
    ranks = (RankView(node="a", weight=2, memory_bytes=1), RankView(node="b", weight=1, memory_bytes=1))
    times = StageTimes(
        queue_s=0.0, compute_s=0.02, codec_s=0.0, received_bytes=0, exchange_s=0.005, slowest="b"
    )
    [told] = describe_ranks(replace(stage, ranks=ranks, exchange="gather", timing=times), NAMES)
    assert told == (
        "  layers 0-3 are computed together (gather): laptop 2, box 1; "
        "5.0 ms of 20.0 ms a step exchanging, mostly for box"
    )
    assert list(describe_ranks(stage, NAMES)) == []


def test_no_machine_is_blamed_for_the_network() -> None:
    chain = _chain(4, 10, 6, bottleneck="bottleneck: the network, 90 ms a token")
    assert bottleneck_of(chain, NAMES) is None
    drawn = "\n".join(draw_chain(chain, NAMES, 80))
    assert "^" not in drawn
    assert drawn.endswith("  bottleneck: the network, 90 ms a token")


def test_what_is_not_loaded_is_drawn_otherwise() -> None:
    chain = _chain(4, 4)
    half = replace(chain.stages[1], fraction=0.999)
    _, row, *listed = draw_chain(replace(chain, stages=(chain.stages[0], half)), NAMES, 80)
    assert row.count("+") > 20
    assert row.count("=") > 20
    assert "99% loaded" in listed[1]


@pytest.mark.parametrize("width", [40, 80, 120])
@pytest.mark.parametrize("stages", [1, 3, 20])
def test_maps_fit_the_width(lab: Lab, width: int, stages: int) -> None:
    state = lab.admin.state()
    chain = _chain(*[3] * stages, bottleneck="bottleneck: laptop, " + "slow " * 20)
    model: ModelView = replace(state.models[0], layer_count=3 * stages)
    view = replace(state, models=(model,), chains=(chain,))
    drawn = draw_map(view, width)
    assert max(map(len, drawn)) <= width
    rows = [line for line in drawn if line.startswith("  [")]
    assert sum(row.count("|") + 1 for row in rows if row.endswith("]")) == stages


def test_an_empty_cluster_says_what_to_do() -> None:
    nobody = ClusterView(name="home", version="1", url="", driver="head")
    assert draw_map(nobody) == ["no model is served; shardcompute load MODEL adds one"]


def test_status_lists_coordinators_that_share_a_store(lab: Lab) -> None:
    at_s = time.mktime((2025, 3, 4, 5, 6, 7, 0, 0, -1))
    coordinators = (
        CoordinatorView(node="nfirst", status="leads", api_url="http://10.0.0.1:8000", since_s=at_s),
        CoordinatorView(node="nsecond", status="waits", since_s=at_s),
        CoordinatorView(node="nthird", status="away", api_url="http://10.0.0.3:8000"),
    )
    view = replace(lab.admin.state(), coordinators=coordinators)
    assert describe_cluster(view)[2:6] == [
        "coordinators:",
        "  nfirst at http://10.0.0.1:8000 leads since 2025-03-04 05:06:07",
        "  nsecond waits since 2025-03-04 05:06:07",
        "  nthird at http://10.0.0.3:8000 is away",
    ]
    assert "coordinators: 1 leads, 1 waits, 1 is away" in describe_cluster(view, height=6)
    assert not any("coordinators" in line for line in describe_cluster(lab.admin.state()))


def test_status_tells_less_where_there_is_less_room(lab: Lab) -> None:
    state = lab.admin.state()
    chains = tuple(replace(state.chains[0], id=f"org/tiny#{number}") for number in range(1, 6))
    view = replace(state, chains=chains)
    whole = describe_cluster(view, 100)
    for height in (len(whole) - 1, 12, 5, 3, 2):
        lines = describe_cluster(view, 100, height)
        assert len(lines) <= height
        assert lines[0] == whole[0]
    assert sum(line.startswith("  |") for line in describe_cluster(view, 100, len(whole) - 1)) == 5
    assert "org/tiny#5" in "\n".join(describe_cluster(view, 100, 8))
    assert describe_cluster(view, 100, 3)[-1].startswith("org/tiny: serving")
    assert describe_cluster(view, 100, len(whole)) == whole


def test_lists_that_do_not_fit_say_how_much_is_missing() -> None:
    assert fit(["a", "b", "c"], 3) == ["a", "b", "c"]
    assert fit(["a", "b", "c"], 2) == ["a", "… 2 more lines; a higher window or a pipe shows all"]


def test_tables_of_nodes_have_fewer_columns_in_narrow_windows(lab: Lab) -> None:
    nodes = lab.admin.state().nodes
    wide, narrow = describe_nodes(nodes, 100), describe_nodes(nodes, 50)
    assert wide[0].split() == ["NAME", "ID", "STATUS", "DEVICE", "MEMORY", "LAYERS"]
    assert narrow[0].split() == ["NAME", "STATUS", "MEMORY", "LAYERS"]
    assert len(wide) == len(narrow) == 4


def test_gpus_are_named_in_windows_of_any_width(lab: Lab) -> None:
    first, *others = lab.admin.state().nodes
    gpu = replace(
        first, device="cuda:0", device_label="NVIDIA H200", device_bytes=140 << 30, resident_bytes=1 << 30
    )
    for width in (200, 110, 90, 60, 20):
        told = "\n".join(describe_nodes([gpu, *others], width))
        assert "cuda:0 NVIDIA H200, 140.0 GiB" in told
    wide, narrow = describe_nodes([gpu], 200), describe_nodes([gpu], 60)
    assert ", resident 1.0 GiB" in wide[1]
    assert narrow[-1] == f"{gpu.name}: cuda:0 NVIDIA H200, 140.0 GiB"
