"""What rank groups do in service corrects what was predicted of them: one that disappoints is given up."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import pytest
from msgspec.structs import replace

from shardcompute.control import PlacementPolicy
from shardcompute.control import events as happened
from shardcompute.control.explain import explain_exactness
from shardcompute.control.placement.cost_model import score
from shardcompute.control.placement.parallelism import AUTO, PIPELINE, Parallelism
from shardcompute.control.placement.request import placement_request
from shardcompute.control.sizes import shape_of
from support.models.plain_model import LAYERS, ranked_model
from support.swarm.noisy_cluster import Machine, NoisyCluster

MODEL = ranked_model()
GIB = 1 << 30
LAYER_S = 1 / 14 / (LAYERS + 1.3)


def grow(cluster: Any, nodes: str, rtt_s: float = 0.0001) -> None:
    """Machines that were measured with the model, and the links between all."""
    policy = PlacementPolicy(least_lifetime_s=0.0)
    cluster.state = cluster.state.__class__(placing=policy)
    for node in nodes:
        cluster.join(node, 4 * GIB, seconds_per_byte=1e-10, exactness="onnx-1.31.0/float32/avx2")
        cluster.tell(
            happened.NodeMeasured(node=node, incarnation=1, model="m", layer_s=LAYER_S, shape=shape_of(MODEL))
        )
    for a, b in combinations(sorted([*nodes, "driver"]), 2):
        cluster.tell(happened.LinkMeasured(a, b, rtt_s, 1.2e8))


def ask(cluster: Any, parallel: Parallelism) -> None:
    cluster.tell(happened.ModelRequested(MODEL, parallel=parallel))
    cluster.settle()


def serve_group(cluster: Any, layer_s: float) -> None:
    """Its leader tells what a layer takes all of them."""
    [chain] = cluster.state.live_chains()
    leader = chain.stages[0].node
    cluster.tell(
        happened.NodeMeasured(
            node=leader,
            incarnation=1,
            model="m",
            layer_s=layer_s,
            shape=shape_of(MODEL),
            is_served=True,
            chain=chain.id,
        )
    )


def members(cluster: Any) -> list[tuple[str, ...]]:
    [chain] = cluster.state.live_chains()
    return [stage.members for stage in chain.stages]


def test_a_group_that_disappoints_is_given_up_and_not_tried_again(cluster: Any) -> None:
    grow(cluster, "ab")
    ask(cluster, AUTO)
    assert members(cluster) == [("a", "b")]
    times = {node.id: node.layer_times for node in cluster.state.nodes.values()}
    serve_group(cluster, 3 * LAYER_S)
    assert {node.id: node.layer_times for node in cluster.state.nodes.values()} == times, (
        "what a group takes says nothing of a machine alone"
    )
    cluster.settle()
    assert all(len(each) == 1 for each in members(cluster))
    assert "better: from A + B (0–21) to" in cluster.state.live_chains()[0].last_move
    for _ in range(3):
        cluster.now_s += 1000
        cluster.settle()
        assert all(len(each) == 1 for each in members(cluster))


@pytest.mark.parametrize("measured", [0.4, 0.7])
def test_one_that_keeps_its_promise_stays(cluster: Any, measured: float) -> None:
    grow(cluster, "ab")
    ask(cluster, AUTO)
    serve_group(cluster, measured * LAYER_S)
    cluster.settle()
    assert members(cluster) == [("a", "b")]
    [chain] = cluster.state.live_chains()
    request = placement_request(cluster.state, MODEL, cluster.now_s, chain=chain)
    work = LAYERS + 1.27
    assert score(request, chain.stages).one_stream == pytest.approx(1 / (measured * LAYER_S * work), rel=0.05)


def test_others_are_expected_to_disappoint_as_well(cluster: Any) -> None:
    """Two islands alike: nobody moves from one that is slow to one that only promises."""
    grow(cluster, "abcd")
    ask(cluster, AUTO)
    before = members(cluster)
    assert any(len(each) > 1 for each in before)
    serve_group(cluster, 4 * LAYER_S)
    cluster.settle()
    assert all(len(each) == 1 for each in members(cluster))


@pytest.mark.parametrize(("exchange", "told"), [("gather", ""), ("reduce", "ranks add up here")])
def test_what_ranks_promise_is_told(cluster: Any, exchange: Any, told: str) -> None:
    grow(cluster, "ab")
    ask(cluster, Parallelism(tp=2, exchange=exchange))
    [chain] = cluster.state.live_chains()
    words = explain_exactness(cluster.state, chain.stages, MODEL)
    assert "the same tokens whatever the split" in words
    assert words.partition("; ")[2].startswith(told)
    assert bool(words.partition("; ")[2]) == bool(told)


def test_ranks_that_were_asked_for_stay_however_slow(cluster: Any) -> None:
    grow(cluster, "ab")
    ask(cluster, Parallelism(tp=2))
    serve_group(cluster, 5 * LAYER_S)
    cluster.settle()
    assert members(cluster) == [("a", "b")]
    ask(cluster, PIPELINE)
    cluster.now_s += 100
    cluster.settle()
    assert all(len(each) == 1 for each in members(cluster)), "until somebody asks for something else"


def test_a_lost_rank_is_replaced_at_once_and_its_place_taken_again_later(cluster: Any) -> None:
    grow(cluster, "ab")
    ask(cluster, Parallelism(tp=2))
    cluster.lose("b")
    cluster.settle()
    assert members(cluster) == [("a",)]
    cluster.join("b", 4 * GIB, seconds_per_byte=1e-10, exactness="onnx-1.31.0/float32/avx2")
    cluster.tell(happened.LinkMeasured("a", "b", 0.0001, 1.2e8))
    cluster.now_s += 100
    cluster.settle()
    assert members(cluster) == [("a", "b")]
    assert cluster.state.live_chains()[0].last_move.startswith("2 ranks in each stage were asked for: from ")


def test_stages_of_ranks_drain_like_any(cluster: Any) -> None:
    grow(cluster, "abc")
    ask(cluster, Parallelism(tp=2, pp=1))
    used = members(cluster)[0]
    cluster.tell(happened.NodeDrained(used[1]))
    cluster.settle()
    assert used[1] not in {node for each in members(cluster) for node in each}


def test_machines_begin_to_compute_together_once_they_know_how_near_they_are(cluster: Any) -> None:
    """And return to what they were, once, if nothing comes of it."""
    grow(cluster, "ab")
    cluster.state = replace(cluster.state, links={})
    ask(cluster, AUTO)
    assert members(cluster) == [("a",), ("b",)]
    for a, b in combinations(["a", "b", "driver"], 2):
        cluster.tell(happened.LinkMeasured(a, b, 0.0001, 1.2e8))
    cluster.now_s += 100
    cluster.settle()
    assert members(cluster) == [("a", "b")], "though it gains less than a quarter"
    serve_group(cluster, 2 * LAYER_S)
    cluster.now_s += 1000
    cluster.settle()
    assert members(cluster) == [("a",), ("b",)]
    for _ in range(3):
        cluster.now_s += 1000
        cluster.settle()
        assert members(cluster) == [("a",), ("b",)]


@pytest.mark.parametrize(("rtt_s", "seed"), [(0.0001, 0), (0.0004, 1), (0.0004, 2)])
def test_noise_does_not_make_machines_meet_and_part(rtt_s: float, seed: int) -> None:
    """Where it is all the same whether they compute together, every measurement may say something else."""
    machines = {name: Machine(4 * GIB, 9e-11, rtt_s) for name in "abc"}
    noisy = NoisyCluster(machines, seed=seed, model=MODEL)
    noisy.request(parallel=AUTO)
    noisy.run(3600, 20, remeasured_s=120)
    assert noisy.counts["MovePlanned"] <= 4
    assert noisy.counts["ChainReshaped"] <= noisy.counts["MovePlanned"]
