"""The table of metrics is what `/metrics` writes, and Prometheus can read it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import parser

from shardcompute.api import create_app
from shardcompute.api.metrics.table import all_rows
from shardcompute.control import events as happened
from shardcompute.core.generation import Delta, Timings, TokenChoice
from shardcompute.core.settings import load_settings
from shardcompute.node.admin.admin import ClusterAdmin
from shardcompute.node.cluster.canaries.record import CanaryNotes
from shardcompute.node.service import HopTraffic, KvUse, ServiceLoad, StageWork
from shardcompute.trust.canaries import DriftEstimate, observe_canary
from support.api.promtool import assert_sound, needs_promtool
from support.swarm.fake_cluster import H200, NOW_S, serving_cluster


@pytest.fixture
def text(service: Any, call: Any, tmp_path: Any) -> str:
    """Everything that there is to say, said."""
    service.script = [
        Delta("a", (TokenChoice(1),)),
        Delta("b", (TokenChoice(2),), finish="stop", timings=Timings(cached_tokens=2, drafted_tokens=4)),
    ]
    service.load = lambda: ServiceLoad(
        running=1,
        waiting=2,
        kv_used_fraction=0.5,
        traffic=[HopTraffic("a", "b", "exact", 2, 9)],
        routers={"m#1": {"ring_s": 0.25}},
        stages=[StageWork("m#1", "a", 3, 0.25, 0.5, 0.125, 0.25, "b")],
        kv=[KvUse("m#1", 16, 64)],
    )
    cluster = serving_cluster(1000, 1000)
    cluster.sent_bytes = {"b": 7}
    cluster.join("c", **H200, probed_at_s=1e9)
    measured = happened.NodeMeasured(
        node="c",
        incarnation=1,
        model="m",
        layer_s=0.5,
        prefill_layer_s=0.25,
        is_served=True,
        measured_at_s=2e9,
    )
    cluster.coordinator.post(measured)
    drift = observe_canary(observe_canary(DriftEstimate(), 1.0, 0.0), 0.5, 0.0)
    notes = CanaryNotes(b"secret", machines={"c": drift})
    cluster.canaries = SimpleNamespace(notes=notes, warnings=lambda: ("m#1 has drifted",))
    settings = load_settings({"HOME": str(tmp_path)})
    with ClusterAdmin(cluster, settings, clock=lambda: NOW_S) as admin:  # type: ignore[arg-type]
        first = next(iter(cluster.coordinator.state.nodes.values()))
        cluster.coordinator.post(happened.LinkMeasured("head", first.id, 0.01, 1e6))
        cluster.coordinator.post(happened.NodeLost(first.id, first.incarnation, "silent", NOW_S))
        app = create_app(service, api_keys=["observe key"], admin=admin)
        headers = {"authorization": "Bearer key"}
        call(app, "POST", "/v1/completions", json={"prompt": "hi"}, headers=headers)
        answer: str = call(app, "GET", "/metrics", headers=headers).text
    return answer


def _families(text: str) -> dict[str, Any]:
    """By the name that HELP has: the parser takes `_total` off counters."""
    found = parser.text_string_to_metric_families(text)
    return {f.name + ("_total" if f.type == "counter" else ""): f for f in found}


def test_every_metric_is_in_the_table_and_is_written(text: str) -> None:
    families = _families(text)
    table = {name: row for row in all_rows() for name in row.names}
    assert families.keys() == table.keys()
    for name, row in table.items():
        assert families[name].type == row.kind, name
        assert families[name].documentation == row.meaning, name
        assert families[name].samples, name
        for sample in families[name].samples:
            assert sample.labels.keys() - {"le"} == set(row.labels), name


def test_values_of_canaries(text: str) -> None:
    families = _families(text)

    def values(name: str) -> list[float]:
        return [sample.value for sample in families[name].samples]

    assert values("shardcompute_canaries_total") == [2.0]
    assert values("shardcompute_canaries_differed_total") == [1.0]
    assert values("shardcompute_node_drift") == [0.25]
    assert values("shardcompute_chains_drifting") == [1.0]


def test_nothing_is_written_twice(text: str) -> None:
    samples = [line.rpartition(" ")[0] for line in text.splitlines() if not line.startswith("#")]
    assert len(samples) == len(set(samples))


def test_values_of_chains_and_the_cluster(text: str) -> None:
    lines = text.splitlines()
    assert 'shardcompute_stage_compute_seconds_total{chain="m#1",node="a"} 0.5' in lines
    assert 'shardcompute_stage_queue_seconds_total{chain="m#1",node="a"} 0.25' in lines
    assert 'shardcompute_kv_used_tokens{chain="m#1"} 16.0' in lines
    assert 'shardcompute_kv_capacity_tokens{chain="m#1"} 64.0' in lines
    assert 'shardcompute_cached_prompt_tokens_total{model_name="org/tiny"} 2.0' in lines
    assert 'shardcompute_weights_sent_bytes_total{receiver="b"} 7.0' in lines
    assert 'shardcompute_nodes{status="lost"} 1.0' in lines
    assert 'shardcompute_nodes{status="draining"} 0.0' in lines
    assert "shardcompute_nodes_lost_total 1.0" in lines
    labels = 'backend="torch",device="cuda:0",label="NVIDIA H200",name="C",node="c"'
    assert f"shardcompute_node_device_memory_bytes{{{labels}}} 1.5032385536e+11" in lines
    assert 'shardcompute_node_unused_devices{name="C",node="c"} 1.0' in lines
    assert 'shardcompute_node_weights_bytes_per_second{name="C",node="c",source="probe"} 1.0' in lines
    assert 'shardcompute_node_weights_bytes_per_second{name="B",node="b",source="guess"} 1.0' in lines
    of_layers = (
        'shardcompute_node_layer_seconds{{kind="{}",model_name="m",name="C",node="c",source="service"}} {}'
    )
    assert of_layers.format("decode", 0.5) in lines
    assert of_layers.format("prefill", 0.25) in lines
    assert 'shardcompute_node_measured_timestamp_seconds{model_name="m",name="C",node="c"} 2e+09' in lines


def test_names_follow_the_customs() -> None:
    for row in all_rows():
        assert all(name.endswith("_total") == (row.kind == "counter") for name in row.names), row
        assert row.meaning.endswith("."), row
        assert any(name.startswith(("shardcompute_", "vllm:")) for name in row.names)


@needs_promtool
def test_promtool_accepts_it(text: str) -> None:
    assert_sound(text)
