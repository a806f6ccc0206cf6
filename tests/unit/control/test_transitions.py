from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from shardcompute.control import ClusterState, Model, apply, decode_event, encode_event, is_journalled
from shardcompute.control import events as happened
from shardcompute.control.state import Assignment, Holding, Shard


def test_news_of_a_former_life_is_ignored(cluster: Any) -> None:
    cluster.join("a")
    cluster.join("a")
    assert cluster.state.nodes["a"].incarnation == 2
    for stale in (
        happened.NodeLost("a", 1, "died", 0.0),
        happened.NodeLeft("a", 1),
        happened.ShardLoaded("a", 1, "m#1", "m", 0, 2, 9),
        happened.NodeMeasured(node="a", incarnation=1, seconds_per_byte=9.0),
    ):
        assert apply(cluster.state, stale) == cluster.state
    cluster.join("a", incarnation=1, memory_bytes=7)
    assert cluster.state.nodes["a"].memory_bytes == 1000


def test_a_node_is_ready_once_it_was_measured_and_stays_so(cluster: Any) -> None:
    cluster.join("a", seconds_per_byte=None)
    assert cluster.state.nodes["a"].status == "joining"
    cluster.tell(happened.NodeMeasured(node="a", incarnation=1, seconds_per_byte=2.0, overhead_s=0.1))
    assert cluster.state.nodes["a"].status == "ready"
    cluster.join("a", seconds_per_byte=None)
    assert (cluster.state.nodes["a"].status, cluster.state.nodes["a"].seconds_per_byte) == ("ready", 2.0)


def test_losing_a_stage_interrupts_its_chain(serving: Callable[..., Any]) -> None:
    cluster = serving(500, 500)
    cluster.lose("b")
    chain = cluster.state.chains["m#1"]
    assert (chain.status, chain.is_interrupted, chain.epoch_to_fence) == ("recovering", True, 1)
    assert cluster.state.nodes["b"].shards == ()


def test_a_chain_remembers_who_was_lost_until_it_serves_again(serving: Callable[..., Any]) -> None:
    cluster = serving(500, 500, 500, 500)
    nodes = cluster.state.chains["m#1"].nodes
    for node in nodes[:2]:
        cluster.lose(node)
    assert cluster.state.chains["m#1"].lost == nodes[:2]
    cluster.settle()
    assert (cluster.state.chains["m#1"].status, cluster.state.chains["m#1"].lost) == ("ready", ())


def test_a_node_that_comes_back_with_its_shard_interrupts_nothing(serving: Callable[..., Any]) -> None:
    cluster = serving(500, 500)
    shards = cluster.state.nodes["a"].shards
    cluster.join("a", 500, shards=shards)
    assert cluster.state.chains["m#1"].status == "ready"
    cluster.join("a", 500)
    assert cluster.state.chains["m#1"].is_interrupted


def test_less_memory_than_claimed_interrupts(serving: Callable[..., Any]) -> None:
    cluster = serving(500, 500)
    cluster.join("a", 10, shards=cluster.state.nodes["a"].shards)
    assert cluster.state.chains["m#1"].is_interrupted


@pytest.mark.parametrize("pair", [("a", "b"), ("driver", "a"), ("b", "driver")])
def test_a_broken_link_interrupts_the_chain_that_uses_it(
    serving: Callable[..., Any], pair: tuple[str, str]
) -> None:
    cluster = serving(500, 500, 10)
    first, last = (stage[0] for stage in cluster.shape())
    named = {"a": first, "b": last, "driver": "driver"}
    cluster.tell(happened.LinkBroken("c", first, 0.0))
    assert not cluster.state.chains["m#1"].is_interrupted
    cluster.tell(happened.LinkMeasured(named[pair[0]], named[pair[1]], 0.1, 1.0, is_open=False))
    assert cluster.state.chains["m#1"].is_interrupted


def test_a_restart_doubts_everything_but_forgets_nothing(serving: Callable[..., Any]) -> None:
    cluster = serving(500, 500)
    cluster.tell(happened.CoordinatorStarted(70.0))
    node, chain = cluster.state.nodes["a"], cluster.state.chains["m#1"]
    assert (node.status, node.lease_until_s) == ("suspected", 80.0)
    assert node.shards
    assert (chain.status, chain.is_interrupted) == ("recovering", True)


def test_each_failure_doubles_the_wait_and_success_ends_it(cluster: Any) -> None:
    cluster.join("a")
    failed = happened.ShardFailed("a", 1, "m#1", "m", 0, 2, "no disk", 0.0)
    cluster.tell(failed, failed)
    [refusal] = cluster.state.nodes["a"].refusals
    assert (refusal.failures, refusal.until_s) == (2, 60.0)
    assert cluster.state.nodes["a"].is_refusing("m", 59.0)
    assert not cluster.state.nodes["a"].is_refusing("m", 60.0)
    cluster.tell(happened.ShardLoaded("a", 1, "m#1", "m", 0, 2, 9))
    assert cluster.state.nodes["a"].refusals == ()


def test_cached_ranges_merge(cluster: Any) -> None:
    cluster.join("a", cached=(Holding("m", 0, 2), Holding("n", 0, 9)))
    cluster.tell(happened.ShardLoaded("a", 1, "m#1", "m", 2, 4, 9))
    assert cluster.state.nodes["a"].cached == (Holding("m", 0, 4), Holding("n", 0, 9))


def test_a_model_in_another_form_retires_the_old_chains(serving: Callable[..., Any], model: Model) -> None:
    cluster = serving(1000)
    cluster.tell(happened.ModelRequested(replace(model, weight_form="int4", layer_bytes=(50,) * 6)))
    assert cluster.state.chains["m#1"].status == "retired"
    cluster.settle()
    assert list(cluster.state.chains) == ["m#2"]
    assert {shard.chain for shard in cluster.state.nodes["a"].shards} == {"m#2"}


def test_shapes_with_holes_overlaps_or_strangers_are_refused(cluster: Any, model: Model) -> None:
    cluster.join("a")
    cluster.join("b")
    cluster.tell(happened.ModelRequested(model))
    for stages in (
        (),
        (Assignment("a", 0, 5),),
        (Assignment("a", 0, 3), Assignment("b", 4, 6)),
        (Assignment("a", 0, 4), Assignment("b", 3, 6)),
        (Assignment("a", 0, 3), Assignment("a", 3, 6)),
        (Assignment("stranger", 0, 6),),
    ):
        cluster.tell(happened.ChainPlanned("m#1", "m", stages))
        assert cluster.state.chains == {}


def test_stages_push_out_standbys(serving: Callable[..., Any], model: Model) -> None:
    cluster = serving(1000)
    cluster.join("b", 1000)
    cluster.settle()
    [stage], [standby] = cluster.state.chains["m#1"].stages, cluster.state.chains["m#1"].standbys
    other = replace(model, name="n")
    cluster.tell(happened.ModelRequested(other))
    cluster.tell(happened.ChainPlanned("n#2", "n", (Assignment(standby.node, 0, 6),)))
    assert cluster.state.chains["m#1"].standbys == ()
    assert cluster.state.chains["m#1"].stages == (stage,)


def test_events_and_state_survive_the_journal(serving: Callable[..., Any]) -> None:
    cluster = serving(500, 500, 500)
    joined = happened.NodeJoined(
        node="z",
        name="Z",
        role="worker",
        address="tcp://z",
        device="cuda",
        memory_bytes=1,
        threads=1,
        version="1",
        incarnation=1,
        now_s=0.5,
        shards=(Shard("m#1", "m", 0, 2, 3),),
    )
    assert decode_event(encode_event(joined)) == joined
    encoded = msgspec.msgpack.encode(cluster.state)
    assert msgspec.msgpack.decode(encoded, type=ClusterState) == cluster.state
    assert not is_journalled(happened.NodeSeen("a", 1, 0.0))
    assert is_journalled(joined)


def test_a_node_on_another_device_is_measured_anew(serving: Callable[..., Any]) -> None:
    cluster = serving(1000)
    cluster.tell(
        happened.NodeMeasured(node="a", incarnation=1, model="m", layer_s=2.0),
        happened.ShardFailed("a", 1, "x#9", "x", 0, 1, "no room", cluster.now_s),
    )
    cluster.join("a", seconds_per_byte=3.0)
    same = cluster.state.nodes["a"]
    assert (len(same.probes), len(same.layer_times), len(same.refusals)) == (2, 1, 1)
    cluster.join("a", seconds_per_byte=1e-3, device="cuda:0", backend="torch", device_label="NVIDIA H200")
    moved = cluster.state.nodes["a"]
    assert (moved.seconds_per_byte, moved.layer_times, moved.refusals) == (1e-3, (), ())


def test_a_line_that_is_no_event_is_refused() -> None:
    with pytest.raises(msgspec.DecodeError):
        decode_event(b'{"type": "NodeExploded"}')


def test_a_new_shape_must_be_of_the_very_next_epoch(serving: Callable[..., Any]) -> None:
    cluster = serving(500, 500)
    stages = cluster.state.chains["m#1"].stages
    for epoch in (0, 1, 3):
        stale = happened.ChainReshaped("m#1", epoch, stages)
        assert apply(cluster.state, stale) == cluster.state
    cluster.tell(happened.ChainReshaped("m#1", 2, stages))
    assert cluster.state.chains["m#1"].epoch == 2
