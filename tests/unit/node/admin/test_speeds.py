"""What was measured on machines, as people see it: in `nodes` and `plan`, on the page, and when memory ran out."""

from __future__ import annotations

import time
from typing import Any

import pytest
from msgspec.structs import replace

from shardcompute.cli.cluster.text import describe_speed, describe_speeds
from shardcompute.control import events as happened
from shardcompute.control.placement.request import speed_source
from shardcompute.control.sizes import shape_of
from shardcompute.node.admin.dry_run import plan_model
from shardcompute.node.admin.view_builder import view_nodes
from shardcompute.node.admin.views import NodeView
from support.swarm.fake_cluster import MODEL, NOW_S, FakeCluster, serving_cluster

YEARS_AGO_S = 1e9


@pytest.fixture
def cluster() -> FakeCluster:
    return serving_cluster(500, 500)


def measure(cluster: FakeCluster, node: str, **what: Any) -> None:
    life = cluster.coordinator.state.nodes[node].incarnation
    fields = {"model": MODEL.name, "layer_s": 0.002, "shape": shape_of(MODEL), **what}
    cluster.coordinator.post(happened.NodeMeasured(node=node, incarnation=life, **fields))


def view(cluster: FakeCluster, node: str) -> NodeView:
    [found] = [each for each in view_nodes(cluster.coordinator.state, NOW_S) if each.id == node]
    return found


def test_a_machine_that_could_not_be_probed_says_that_it_is_guessed(cluster: FakeCluster) -> None:
    node = view(cluster, "a")
    assert (node.weights_bytes_per_s, node.probed_at_s, node.speeds) == (1.0, 0.0, ())
    assert describe_speed(node) == "speed not measured, guessed"


def test_a_probe_is_shown_before_any_model_was_measured(cluster: FakeCluster) -> None:
    cluster.join("c", seconds_per_byte=1 / (4 << 40), overhead_s=4e-5, probed_at_s=YEARS_AGO_S)
    assert describe_speed(view(cluster, "c")) == "4096.0 GiB/s of weights, 40.0 µs a frame, probed 2001-09-09"


def test_what_was_measured_with_a_model_and_how(cluster: FakeCluster) -> None:
    measure(cluster, "a", batch_layer_s=0.003, prefill_layer_s=0.0005, measured_at_s=YEARS_AGO_S)
    [speed] = view(cluster, "a").speeds
    assert (speed.model, speed.layer_count, speed.source) == (MODEL.name, 6, "load")
    assert (speed.layer_s, speed.batch_layer_s, speed.prefill_layer_s) == (0.002, 0.003, 0.0005)
    assert describe_speed(view(cluster, "a")) == (
        "2.0 ms a layer of org/tiny, prompts at 333 tok/s through all 6, measured when loaded 2001-09-09"
    )
    now_s = time.time()
    measure(cluster, "a", layer_s=0.006, is_served=True, measured_at_s=now_s)
    told = describe_speed(view(cluster, "a"))
    assert told.startswith("6.0 ms a layer of org/tiny")
    assert told.endswith(f"measured in service {time.strftime('%H:%M', time.localtime(now_s))}")


def test_workers_that_are_there_have_a_line_each(cluster: FakeCluster) -> None:
    cluster.join("c")
    cluster.join("d", role="driver", memory_bytes=0, session_namespace=9)
    cluster.coordinator.post(happened.NodeLost("c", 1, "died", NOW_S))
    nodes = view_nodes(cluster.coordinator.state, NOW_S)
    assert [line.split(":")[0] for line in describe_speeds(nodes)] == ["A", "B"]


def test_a_plan_says_how_the_speed_of_each_machine_is_known(cluster: FakeCluster) -> None:
    cluster.join("b", 500, probed_at_s=YEARS_AGO_S, prefill_seconds_per_byte=1e-3)
    measure(cluster, "a", prefill_layer_s=0.1)
    planned = plan_model(cluster.coordinator.state, MODEL, 1, NOW_S)
    [chain] = planned.chains
    assert {stage.node: stage.speed_source for stage in chain.stages} == {"a": "measured", "b": "probed"}
    assert "a token (measured)" in planned.text
    assert "a token (probed)" in planned.text
    assert chain.predicted_first_token_s is not None
    assert chain.predicted_first_token_s > 100
    assert "after a prompt of 1,000 tokens the first token comes in" in planned.text
    measure(cluster, "a", is_served=True)
    node, twin = cluster.coordinator.state.nodes["a"], replace(MODEL, name="org/tuned")
    assert speed_source(node, twin) == "measured in service with org/tiny"


def test_a_plan_promises_no_first_token_of_machines_that_never_saw_a_prompt(cluster: FakeCluster) -> None:
    planned = plan_model(cluster.coordinator.state, MODEL, 1, NOW_S)
    assert planned.chains[0].predicted_first_token_s is None
    assert "first token" not in planned.text
    assert "a token (guessed)" in planned.text


def test_a_machine_whose_memory_ran_out_says_so(cluster: FakeCluster) -> None:
    life = cluster.coordinator.state.nodes["a"].incarnation
    failed = happened.ShardFailed("a", life, "org/tiny#1", MODEL.name, 0, 3, "memory ran out", NOW_S, 200)
    cluster.coordinator.post(failed)
    node = view(cluster, "a")
    assert (node.memory_bytes, node.memory_reason) == (200, "memory ran out")
