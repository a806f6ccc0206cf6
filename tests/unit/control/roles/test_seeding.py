"""Machines that no ring needs: what they seed, when, from whom, and that the ring does not notice."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shardcompute.control import actions as to_do
from shardcompute.control import events as happened
from shardcompute.control import next_actions
from shardcompute.control.placement.place import Placement, place
from shardcompute.control.placement.request import placement_request
from shardcompute.control.roles.seeding import choose_seed, duty_of, told_role
from shardcompute.control.state import Holding
from shardcompute.control.transitions.memorable import memorable

MIB = 1 << 20


def join_weak(cluster: Any, node: str = "w", *, seed_bytes: int = 350, rate: float = 1e7) -> None:
    """Too small for a single layer, and slow."""
    cluster.join(node, 50, seed_bytes=seed_bytes, seconds_per_byte=1000.0)
    cluster.seen()
    cluster.tell(happened.LinkMeasured(cluster.state.driver, node, 0.001, rate))


def seeds(cluster: Any) -> list[to_do.SeedWeights]:
    return [
        each for each in next_actions(cluster.state, cluster.now_s) if isinstance(each, to_do.SeedWeights)
    ]


def begin(cluster: Any) -> to_do.SeedWeights:
    """Decide, and leave what is to be fetched to the test."""
    for action in next_actions(cluster.state, cluster.now_s):
        if not isinstance(action, to_do.SeedWeights):
            cluster.answer(action)
    [action] = seeds(cluster)
    return action


def done(cluster: Any, action: to_do.SeedWeights) -> None:
    cluster.tell(
        happened.WeightsSeeded(action.node, action.incarnation, action.model, action.start, action.stop)
    )


def test_the_ring_is_the_same_with_and_without_a_weak_machine(serving: Callable[..., Any]) -> None:
    cluster = serving(500, 500)
    model = cluster.state.models["m"].model
    before = cluster.state.chains["m#1"].stages
    alone = place(placement_request(cluster.state, model, 0.0, chain=cluster.state.chains["m#1"]))
    join_weak(cluster)
    done(cluster, begin(cluster))
    cluster.settle()
    beside = place(placement_request(cluster.state, model, 0.0, chain=cluster.state.chains["m#1"]))
    assert isinstance(alone, Placement)
    assert isinstance(beside, Placement)
    assert beside.assignments == alone.assignments
    assert (beside.score, beside.predicted_tokens_per_s_many) == (
        alone.score,
        alone.predicted_tokens_per_s_many,
    )
    assert cluster.state.chains["m#1"].stages == before
    assert cluster.state.chains["m#1"].epoch == 1
    assert [node for node, _ in beside.unused] == ["w"]


def test_a_weak_machine_takes_what_its_disk_holds_of_what_is_rarest(serving: Callable[..., Any]) -> None:
    cluster = serving(500, 500)
    join_weak(cluster)
    action = begin(cluster)
    # 50 bytes of embedding and three layers of 100 fit, and so do three others without it.
    assert (action.start, action.stop) == (0, 3)
    assert action.sources == ()  # those who hold it compute
    assert action.bytes_per_s == 2_500_000
    assert "fetches layers 0 to 2" in told_role(cluster.state, cluster.state.nodes["w"])
    done(cluster, action)
    assert seeds(cluster) == []
    assert cluster.state.nodes["w"].cached == (Holding("m", 0, 3),)
    join_weak(cluster, "x")
    second = begin(cluster)
    assert (second.start, second.stop, second.sources) == (3, 6, ())
    done(cluster, second)
    join_weak(cluster, "y", seed_bytes=200)
    third = begin(cluster)
    assert (third.start, third.stop) == (1, 3)
    assert [(each.node, each.start, each.stop) for each in third.sources] == [("w", 1, 3)]


def test_whoever_loads_asks_those_first_who_compute_nothing(serving: Callable[..., Any]) -> None:
    cluster = serving(500, 500)
    join_weak(cluster, seed_bytes=1000)
    done(cluster, begin(cluster))
    stage = cluster.state.chains["m#1"].stages[0]
    cluster.join("n", 500)
    cluster.lose(stage.node)
    loads = [each for each in next_actions(cluster.state, cluster.now_s) if isinstance(each, to_do.LoadShard)]
    [load] = [each for each in loads if each.node == "n"]
    assert [source.node for source in load.sources] == ["w"]


def test_seeding_waits_for_calm_and_ends_with_need(serving: Callable[..., Any]) -> None:
    cluster = serving(500, 500)
    cluster.lose(cluster.state.chains["m#1"].stages[0].node)
    join_weak(cluster)
    cluster.settle()
    assert cluster.state.nodes["w"].seed is None
    cluster.join("n", 500)
    cluster.settle()
    assert cluster.state.nodes["w"].seed is not None
    cluster.tell(happened.ModelDropped("m"))
    cluster.settle()
    assert cluster.state.nodes["w"].seed is None


def test_a_thin_line_or_an_unmeasured_one_seeds_nothing(serving: Callable[..., Any]) -> None:
    cluster = serving(500, 500)
    join_weak(cluster, "thin", rate=1e4)
    cluster.join("unmeasured", 50, seed_bytes=350)
    join_weak(cluster, "small", seed_bytes=99)
    cluster.seen()
    cluster.settle()
    assert [node.seed for node in cluster.state.nodes.values()] == [None] * 5
    assert seeds(cluster) == []


def test_what_could_not_be_fetched_is_tried_again_later(serving: Callable[..., Any]) -> None:
    cluster = serving(500, 500)
    join_weak(cluster)
    action = begin(cluster)
    cluster.tell(happened.SeedingFailed("w", action.incarnation, "the disk is full", cluster.now_s))
    assert told_role(cluster.state, cluster.state.nodes["w"]) == "seeds nothing: the disk is full"
    cluster.settle()
    assert seeds(cluster) == []
    cluster.now_s += 601
    cluster.seen()
    assert begin(cluster) == action
    assert memorable(cluster.state).nodes["w"].seed is None


def test_a_machine_that_stands_by_or_serves_seeds_nothing(serving: Callable[..., Any]) -> None:
    cluster = serving(500, 500)
    cluster.join("s", 500, seed_bytes=1000)
    cluster.tell(happened.LinkMeasured(cluster.state.driver, "s", 0.001, 1e9))
    cluster.settle()
    assert [each.node for each in cluster.state.chains["m#1"].standbys] == ["s"]
    assert cluster.state.nodes["s"].seed is None


def test_a_plan_says_what_those_would_do_whom_it_leaves_out(serving: Callable[..., Any]) -> None:
    cluster = serving(500, 500)
    join_weak(cluster)
    model = cluster.state.models["m"].model
    plan = place(placement_request(cluster.state, model, 0.0, chain=cluster.state.chains["m#1"]))
    assert isinstance(plan, Placement)
    assert duty_of(cluster.state, model, plan, "w") == "would seed layers 0 to 2 to machines that join"
    assert choose_seed(cluster.state, cluster.state.nodes["w"], ["m"]) == Holding("m", 0, 3)
