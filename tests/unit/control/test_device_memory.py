"""A machine whose memory ran out offers less: other layers are planned there, or others take them, at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shardcompute.control import actions as to_do
from shardcompute.control import events as happened
from shardcompute.control.sizes import memory_of
from shardcompute.control.state import Assignment


def ran_out(cluster: Any, node: str, memory_bytes: int) -> None:
    """With its stage of the only chain."""
    [stage] = [stage for stage in cluster.state.chains["m#1"].stages if stage.node == node]
    life = cluster.state.nodes[node].incarnation
    place = (node, life, "m#1", "m", stage.start, stage.stop)
    cluster.tell(happened.ShardFailed(*place, "memory ran out", cluster.now_s, memory_bytes))


def test_layers_move_to_others_without_a_wait(serving: Callable[..., Any]) -> None:
    cluster = serving(500, 500)
    assert len(cluster.shape()) == 2
    cluster.join("c", 500)
    first = cluster.shape()[0][0]
    before = cluster.state.nodes[first].memory_bytes
    ran_out(cluster, first, 100)
    assert cluster.state.nodes[first].memory_bytes == 100 < before
    assert cluster.state.nodes[first].memory_reason == "memory ran out"
    cluster.settle()
    chain = cluster.state.chains["m#1"]
    assert chain.status == "ready"
    assert first not in chain.nodes


def test_the_machine_goes_on_with_fewer_layers(serving: Callable[..., Any], model: Any) -> None:
    cluster = serving(600, 600)
    first, start, stop = cluster.shape()[0]
    size = memory_of(cluster.state, model, Assignment(first, start, stop))
    ran_out(cluster, first, size * 3 // 4)
    cluster.settle()
    assert cluster.state.chains["m#1"].status == "ready"
    [(_, start, stop)] = [each for each in cluster.shape() if each[0] == first]
    assert memory_of(cluster.state, model, Assignment(first, start, stop)) <= size * 3 // 4


def test_the_same_layers_are_never_planned_there_again(serving: Callable[..., Any], model: Any) -> None:
    """Even where the node believes that they should have fitted."""
    cluster = serving(600, 600)
    before = cluster.shape()
    first = before[0][0]
    ran_out(cluster, first, cluster.state.nodes[first].memory_bytes)
    cluster.settle()
    assert cluster.state.chains["m#1"].status == "ready"
    assert [each for each in cluster.shape() if each[0] == first] != [before[0]]


def test_one_that_fails_again_and_again_is_left_alone(serving: Callable[..., Any]) -> None:
    cluster = serving(1000)
    for _ in range(cluster.state.health.memory_failures):
        ran_out(cluster, "a", 1000)
        assert not cluster.state.nodes["a"].is_refusing("m", cluster.now_s)
    ran_out(cluster, "a", 1000)
    assert cluster.state.nodes["a"].is_refusing("m", cluster.now_s)
    actions = cluster.settle()
    assert cluster.state.chains["m#1"].status == "broken"
    assert not [action for action in actions if isinstance(action, to_do.LoadShard)]


def test_what_was_yet_to_be_loaded_beside_it_is_planned_anew(cluster: Any, model: Any) -> None:
    """A chain that waits for room which is not there any more would wait for ever."""
    cluster.join("a", 1500)
    cluster.tell(happened.ModelRequested(model))
    cluster.settle()
    other = type(model)(**{name: getattr(model, name) for name in model.__struct_fields__} | {"name": "n"})
    stages = (Assignment("a", 0, 6),)
    cluster.tell(happened.ModelRequested(other), happened.ChainPlanned("n#1", "n", stages, "", 0.0))
    ran_out(cluster, "a", 700)
    assert cluster.state.chains["n#1"].is_interrupted
    cluster.join("b", 1000)
    cluster.settle()
    assert {chain.status for chain in cluster.state.chains.values()} == {"ready"}


def test_a_standby_that_does_not_fit_any_more_is_let_go(serving: Callable[..., Any]) -> None:
    cluster = serving(500, 500)
    cluster.join("c", 500, is_standby=True)
    cluster.settle()
    [standby, *_] = cluster.state.chains["m#1"].standbys
    life = cluster.state.nodes[standby.node].incarnation
    place = (standby.node, life, "m#1", "m", standby.start, standby.stop)
    cluster.tell(happened.ShardFailed(*place, "memory ran out", 0.0, 60))
    assert cluster.state.chains["m#1"].status == "ready", "the chain serves on"
    cluster.settle()
    assert standby.node not in {each.node for each in cluster.state.chains["m#1"].standbys}


def regained(cluster: Any, node: str, memory_bytes: int, *, is_all: bool = True) -> None:
    life = cluster.state.nodes[node].incarnation
    cluster.tell(happened.MemoryRegained(node, life, memory_bytes, is_all))


def test_memory_that_is_offered_again_is_used_again(serving: Callable[..., Any]) -> None:
    """One machine holds all, two others hold it together and more slowly: the plan changes there and back."""
    cluster = serving(1000)
    assert [node for node, *_ in cluster.shape()] == ["a"]
    for other in ("b", "c"):
        cluster.join(other, 500, seconds_per_byte=4.0)
    ran_out(cluster, "a", 100)
    cluster.settle()
    assert cluster.state.chains["m#1"].status == "ready"
    assert [node for node, *_ in cluster.shape()] == ["b", "c"]
    regained(cluster, "a", 1000)
    assert (cluster.state.nodes["a"].memory_bytes, cluster.state.nodes["a"].memory_reason) == (1000, "")
    cluster.settle()
    assert [node for node, *_ in cluster.shape()] == ["a"]
    assert cluster.state.chains["m#1"].status == "ready"


def test_a_chain_without_room_is_served_again(serving: Callable[..., Any]) -> None:
    cluster = serving(1000)
    ran_out(cluster, "a", 100)
    cluster.settle()
    assert cluster.state.chains["m#1"].status == "broken"
    regained(cluster, "a", 1000)
    cluster.settle()
    assert cluster.state.chains["m#1"].status == "ready"


def test_a_part_of_it_leaves_the_reason_and_old_news_changes_nothing(serving: Callable[..., Any]) -> None:
    cluster = serving(1000, 1000)
    ran_out(cluster, cluster.shape()[0][0], 100)
    node = cluster.state.nodes["a"]
    regained(cluster, "a", 300, is_all=False)
    assert (cluster.state.nodes["a"].memory_bytes, cluster.state.nodes["a"].memory_reason) == (
        300,
        "memory ran out",
    )
    before = cluster.state
    cluster.tell(happened.MemoryRegained("a", node.incarnation - 1, 900, True))
    cluster.tell(happened.MemoryRegained("nobody", 1, 900, True))
    cluster.tell(happened.MemoryRegained("a", node.incarnation, 200, False))
    assert cluster.state == before


def test_a_device_that_lies_moves_a_serving_chain_only_while_that_promises_ever_more(
    serving: Callable[..., Any],
) -> None:
    """It regains and runs out for ever; others hold the model and serve it at half the speed."""
    cluster = serving(1000)
    for other in ("b", "c"):
        cluster.join(other, 500, seconds_per_byte=2.0)
    moves = 0
    for _ in range(12):
        if "a" in [node for node, *_ in cluster.shape()]:
            moves += 1
            ran_out(cluster, "a", 100)
            cluster.settle()
        regained(cluster, "a", 1000)
        cluster.settle()
        assert cluster.state.chains["m#1"].status == "ready"
    assert 1 < moves <= 4
