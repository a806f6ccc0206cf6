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
