from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import replace

from shardcompute.control import Model, Record, next_actions, report_models
from shardcompute.control import actions as to_do
from shardcompute.control import events as happened
from shardcompute.control.state import Assignment


def kinds(actions: list[Any]) -> list[str]:
    return [kind(each.event if isinstance(each, Record) else each) for each in actions]


def kind(action: Any) -> str:
    is_standby = isinstance(action, to_do.LoadShard) and action.is_standby
    return "LoadStandby" if is_standby else type(action).__name__


def test_from_a_request_to_a_serving_chain(cluster: Any, model: Model) -> None:
    cluster.join("a", 500)
    cluster.join("b", 500)
    cluster.tell(happened.ModelRequested(model))
    first = next_actions(cluster.state, 0.0)
    assert kinds(first) == ["ChainPlanned", "LoadShard", "LoadShard"]
    assert next_actions(cluster.state, 0.0) == first
    done = cluster.settle()
    assert kinds(done) == ["ChainPlanned", "LoadShard", "LoadShard", "ConnectChain", "ActivateChain"]
    assert [(start, stop) for _, start, stop in cluster.shape()] == [(0, 3), (3, 6)]
    connect = done[3]
    assert [stage.address for stage in connect.stages] == [
        f"tcp://{node}:1" for node, _, _ in cluster.shape()
    ]
    [report] = report_models(cluster.state, 0.0)
    assert (report.status, report.missing_bytes) == ("serving", 0)


def test_a_model_too_large_waits_for_a_machine(cluster: Any, model: Model) -> None:
    cluster.join("a", 500)
    cluster.tell(happened.ModelRequested(model))
    [action] = next_actions(cluster.state, 0.0)
    assert isinstance(action, to_do.ReportUnservable)
    # Layers 4 and 5 with KV and head are left over.
    assert action.missing_bytes == 270
    assert report_models(cluster.state, 0.0)[0].status == "unservable"
    cluster.join("b", action.missing_bytes)
    cluster.settle()
    assert report_models(cluster.state, 0.0)[0].status == "serving"


def test_a_dead_stage_is_replaced_by_its_standby_without_loading(serving: Callable[..., Any]) -> None:
    cluster = serving(500, 500)
    cluster.join("c", 500)
    cluster.settle()
    chain = cluster.state.chains["m#1"]
    assert [standby.node for standby in chain.standbys] == ["c"]
    covered = chain.standbys[0]
    dead = next(s.node for s in chain.stages if (s.start, s.stop) == (covered.start, covered.stop))
    cluster.lose(dead)
    done = cluster.settle()
    assert kinds(done) == ["ChainReshaped", "FenceChain", "ConnectChain", "ActivateChain"]
    assert done[1].epoch == 1
    assert cluster.state.chains["m#1"].epoch == 2
    assert cluster.state.chains["m#1"].status == "ready"


def test_a_dead_stage_without_replacement_breaks_the_chain_until_somebody_comes(
    serving: Callable[..., Any],
) -> None:
    cluster = serving(500, 500)
    cluster.lose("b")
    assert kinds(cluster.settle()) == ["ChainBroken", "FenceChain", "ReportUnservable"]
    [report] = next_actions(cluster.state, 0.0)
    assert isinstance(report, to_do.ReportUnservable)
    assert report.missing_bytes > 0
    assert len(cluster.state.nodes["a"].shards) == 1
    cluster.join("d", 500)
    done = cluster.settle()
    assert kinds(done) == ["ChainReshaped", "LoadShard", "ReportProgress", "ConnectChain", "ActivateChain"]
    assert done[1].node == "d"


def test_drivers_hear_how_far_what_they_wait_for_is(serving: Callable[..., Any]) -> None:
    cluster = serving(500, 500)
    lost = cluster.shape()[1]
    cluster.lose(lost[0])
    cluster.settle()
    cluster.join("d", 500)

    def reports() -> list[to_do.ReportProgress]:
        actions = next_actions(cluster.state, 0.0)
        cluster.tell(*(each.event for each in actions if isinstance(each, Record)))
        return [each for each in actions if isinstance(each, to_do.ReportProgress)]

    [begun] = reports()
    assert (begun.drivers, begun.chain, begun.fraction) == ((cluster.state.driver,), "m#1", 0.5)
    life = cluster.state.nodes["d"].incarnation
    cluster.tell(happened.ShardProgressed("d", life, "m#1", *lost[1:], 0.5))
    [later] = reports()
    assert (later.epoch, later.fraction) == (begun.epoch, 0.75)
    assert later.waits_for == f"D has 50% of layers {lost[1]} to {lost[2] - 1}"
    cluster.settle()
    assert reports() == []


def test_a_chain_that_nobody_can_load_says_who_failed(serving: Callable[..., Any]) -> None:
    cluster = serving(1000)
    cluster.failing.add("a")
    cluster.tell(happened.ShardUnloaded("a", 1, "m#1", *cluster.shape()[0][1:]))
    cluster.settle()
    chain = cluster.state.chains["m#1"]
    assert chain.status == "broken"
    assert chain.reason.endswith("more are needed on one machine; A could not load it: no disk")


def test_silence_is_decided_and_repaired_in_one_go(serving: Callable[..., Any]) -> None:
    cluster = serving(500, 500)
    cluster.join("c", 500)
    cluster.settle()
    lost = cluster.shape()[0][0]
    cluster.now_s = 1.2
    for node in set(cluster.state.nodes) - {lost}:
        cluster.tell(happened.NodeSeen(node, 1, 0.6), happened.NodeSeen(node, 1, 1.2))
    assert kinds(next_actions(cluster.state, 1.2)) == ["NodeSuspected"]
    assert kinds(next_actions(cluster.state, 1.8))[:3] == ["NodeSuspected", "NodeLost", "ChainReshaped"]


def test_nothing_moves_while_a_node_is_only_suspected(serving: Callable[..., Any]) -> None:
    cluster = serving(500, 500, 500)
    node = cluster.shape()[0][0]
    cluster.tell(happened.NodeSuspected(node, 1, "no heartbeat", 0.0))
    assert next_actions(cluster.state, 0.0) == []


def test_a_broken_link_is_connected_anew(serving: Callable[..., Any]) -> None:
    cluster = serving(500, 500)
    cluster.tell(happened.LinkBroken("a", "b", 0.0))
    assert kinds(cluster.settle()) == ["ChainReshaped", "FenceChain", "ConnectChain", "ActivateChain"]


def test_a_draining_node_is_replaced_before_it_stops_serving(serving: Callable[..., Any]) -> None:
    cluster = serving(500, 500)
    cluster.tell(happened.NodeDrained("a"))
    assert next_actions(cluster.state, 0.0) == []
    cluster.join("c", 500)
    done = cluster.settle()
    assert kinds(done) == [
        "MovePlanned",
        "StandbysChosen",
        "LoadStandby",
        "CopyKv",
        "ChainReshaped",
        "FenceChain",
        "ConnectChain",
        "UnloadShard",
        "ActivateChain",
        "ReleaseNode",
    ]
    assert cluster.state.nodes["a"].status == "gone"
    assert {node for node, _, _ in cluster.shape()} == {"b", "c"}


def test_a_faster_machine_takes_over_once_it_is_loaded(serving: Callable[..., Any]) -> None:
    cluster = serving(1000)
    cluster.join("b", 1000, seconds_per_byte=0.1)
    done = kinds(cluster.settle())
    assert done.index("LoadStandby") < done.index("ChainReshaped") < done.index("ConnectChain")
    assert cluster.shape() == [("b", 0, 6)]
    assert cluster.state.chains["m#1"].standbys == (Assignment("a", 0, 6),)


def test_a_machine_that_is_hardly_better_changes_nothing(serving: Callable[..., Any]) -> None:
    cluster = serving(2000)
    cluster.join("b", 2000, seconds_per_byte=0.9)
    done = kinds(cluster.settle())
    assert "ChainReshaped" not in done
    assert cluster.shape() == [("a", 0, 6)]


def test_a_dropped_model_is_fenced_then_unloaded_then_forgotten(serving: Callable[..., Any]) -> None:
    cluster = serving(500, 500)
    cluster.tell(happened.ModelDropped("m"))
    assert kinds(next_actions(cluster.state, 0.0)) == ["ChainRetired", "RetireChain", "FenceChain"]
    assert kinds(cluster.settle()) == [
        "ChainRetired",
        "RetireChain",
        "FenceChain",
        "UnloadShard",
        "UnloadShard",
    ]
    assert cluster.state.chains == {}
    assert cluster.state.models == {}


def test_a_node_that_cannot_load_is_avoided_and_tried_again_later(cluster: Any, model: Model) -> None:
    cluster.join("a", 1000)
    cluster.failing.add("a")
    cluster.tell(happened.ModelRequested(model))
    done = cluster.settle()
    assert kinds(done) == ["ChainPlanned", "LoadShard", "ChainBroken", "FenceChain", "ReportUnservable"]
    cluster.failing.clear()
    cluster.now_s = 29.0
    assert kinds(cluster.settle()) == []
    cluster.now_s = 30.0
    cluster.settle()
    assert cluster.state.chains["m#1"].status == "ready"


def test_peers_that_hold_the_bytes_are_named_as_sources(serving: Callable[..., Any]) -> None:
    cluster = serving(500, 500)
    node, start, stop = cluster.shape()[0]
    cluster.join("c", 500)
    actions = next_actions(cluster.state, 0.0)
    [prepare] = [action for action in actions if kind(action) == "LoadStandby"]
    holder = node if (prepare.start, prepare.stop) == (start, stop) else cluster.shape()[1][0]
    assert prepare.sources == (to_do.Source(holder, f"tcp://{holder}:1", prepare.start, prepare.stop),)


def test_after_a_restart_nodes_that_come_back_with_their_shards_are_only_connected(
    serving: Callable[..., Any],
) -> None:
    cluster = serving(500, 500)
    cluster.now_s = 50.0
    cluster.tell(happened.CoordinatorStarted(50.0))
    assert kinds(next_actions(cluster.state, 51.0)) == ["FenceChain"]
    for node in ("a", "b"):
        cluster.join(node, 500, shards=cluster.state.nodes[node].shards)
    assert kinds(cluster.settle()) == ["ChainReshaped", "FenceChain", "ConnectChain", "ActivateChain"]
    assert cluster.state.chains["m#1"].epoch == 2


def test_chains_of_one_model_have_machines_of_their_own_and_go_when_not_asked_for(
    serving: Callable[..., Any], model: Model
) -> None:
    cluster = serving(1000, 1000, chain_count=2)
    assert [cluster.shape("m#1"), cluster.shape("m#2")] == [[("a", 0, 6)], [("b", 0, 6)]]
    cluster.tell(happened.ModelRequested(model, 1))
    cluster.settle()
    assert list(cluster.state.chains) == ["m#1"]
    assert cluster.state.chains["m#1"].standbys == (Assignment("b", 0, 6),)


def test_a_second_chain_shares_machines_where_there_are_no_others(
    serving: Callable[..., Any], model: Model
) -> None:
    cluster = serving(1600)
    cluster.tell(happened.ModelRequested(model, 2))
    cluster.settle()
    assert cluster.shape("m#1") == cluster.shape("m#2") == [("a", 0, 6)]
    cluster.tell(happened.ModelRequested(model, 3))
    [report] = next_actions(cluster.state, 0.0)
    assert isinstance(report, to_do.ReportUnservable)


def test_a_load_waits_until_there_is_room(serving: Callable[..., Any], model: Model) -> None:
    cluster = serving(800)
    cluster.tell(happened.ModelDropped("m"))
    cluster.tell(happened.ModelRequested(replace(model, name="n")))
    assert "LoadShard" not in kinds(next_actions(cluster.state, 0.0))
    cluster.settle()
    assert cluster.state.chains["n#2"].status == "ready"


def test_a_shard_nobody_asked_for_is_unloaded(cluster: Any) -> None:
    cluster.join("a")
    cluster.tell(happened.ShardLoaded("a", 1, "old#1", "old", 0, 2, 9))
    assert kinds(cluster.settle()) == ["UnloadShard"]
    assert cluster.state.nodes["a"].shards == ()


def test_a_driver_without_memory_gets_no_layers(cluster: Any, model: Model) -> None:
    cluster.join("a", 1000, role="driver")
    cluster.tell(happened.ModelRequested(model))
    told = [action.driver for action in next_actions(cluster.state, 0.0)]
    assert told == ["driver", "a"], "every driver hears that nobody holds the model"


def test_what_may_vary_does_not_make_another_action() -> None:
    load = to_do.LoadShard(
        node="a", incarnation=1, chain="m#1", model="m", start=0, stop=2, size_bytes=9, sources=()
    )
    again = replace(load, sources=(to_do.Source("b", "x", 0, 2),), is_standby=True)
    reborn = replace(load, incarnation=2)
    assert to_do.identity(load) == to_do.identity(again) != to_do.identity(reborn)
    report = to_do.ReportUnservable("driver", 0, "m", 5, ("in these words",))
    assert to_do.identity(report) == to_do.identity(replace(report, reasons=("or in others",)))
    assert to_do.identity(report) != to_do.identity(replace(report, session_namespace=3))


def test_a_chain_that_holds_nothing_is_still_fenced_before_it_is_forgotten(
    cluster: Any, model: Model
) -> None:
    cluster.join("a")
    cluster.tell(happened.ModelRequested(model))
    cluster.tell(happened.ChainPlanned("m#1", "m", (Assignment("a", 0, 6),)), happened.ModelDropped("m"))
    assert kinds(cluster.settle()) == ["ChainRetired", "RetireChain", "FenceChain"]
    assert cluster.state.chains == {}


def test_a_draining_node_is_replaced_by_a_spare_where_others_would_have_to_stop(
    serving: Callable[..., Any],
) -> None:
    cluster = serving(400, 400)
    before = cluster.shape()
    # With room for more than the draining one has, for which the other would have to move; too little quicker to take
    # a stage over before.
    cluster.join("c", 600, seconds_per_byte=0.95)
    cluster.settle()
    assert cluster.shape() == before
    cluster.tell(happened.NodeDrained(before[1][0]))
    done = kinds(cluster.settle())
    assert done.index("LoadStandby") < done.index("ChainReshaped")
    assert "LoadShard" not in done
    assert cluster.shape() == [before[0], ("c", before[1][1], before[1][2])]


@pytest.mark.parametrize("speeds", [(1.0, 1.1), (1.1, 1.0)])
def test_a_model_that_is_served_otherwise_stays_where_its_weights_are(
    serving: Callable[..., Any], model: Model, speeds: tuple[float, float]
) -> None:
    """Whatever was measured meanwhile: to fetch it all again for a little speed does not pay."""
    cluster = serving(500, 500)
    before = cluster.shape()
    for node, speed in zip("ab", speeds, strict=True):
        life = cluster.state.nodes[node].incarnation
        for _ in range(20):
            cluster.tell(happened.NodeMeasured(node=node, incarnation=life, seconds_per_byte=speed))
    cluster.tell(happened.ModelRequested(replace(model, context_length=model.context_length - 1)))
    cluster.settle()
    assert cluster.shape("m#2") == before
    assert cluster.state.chains["m#2"].status == "ready"
    assert "m#1" not in cluster.state.chains


def test_a_model_that_is_served_otherwise_moves_where_that_pays(
    serving: Callable[..., Any], model: Model
) -> None:
    cluster = serving(500, 500)
    cluster.join("c", 1000, seconds_per_byte=1e-3)
    cluster.tell(happened.ModelRequested(replace(model, context_length=model.context_length - 1)))
    cluster.settle()
    assert [node for node, *_ in cluster.shape("m#2")] == ["c"]
