from __future__ import annotations

from itertools import count
from typing import Any

from prometheus_client import parser

from shardcompute.api import create_app
from shardcompute.core.errors import QueueFullError
from shardcompute.node.service import HopTraffic, ServiceLoad


def samples(text: str) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """By name and labels, as Prometheus reads them."""
    families = parser.text_string_to_metric_families(text)
    return {(s.name, frozenset(s.labels.items())): s.value for family in families for s in family.samples}


def key(name: str, **labels: str) -> tuple[str, frozenset[tuple[str, str]]]:
    return name, frozenset(labels.items())


def test_a_generation_is_counted_under_both_names(service: Any, call: Any, fakes: Any) -> None:
    ticks = count()
    app = create_app(service, clock=lambda: float(next(ticks)))
    call(app, "POST", "/v1/completions", json={"prompt": "hi"})
    response = call(app, "GET", "/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    told = samples(response.text)
    for prefix in ("shardcompute_", "vllm:"):
        for name, value in {
            "prompt_tokens_total": 3,
            "generation_tokens_total": 5,
            # The clock ticks once per reading: begun 0, first tokens 1, second tokens 2, ended 3.
            "time_to_first_token_seconds_sum": 1,
            "inter_token_latency_seconds_count": 2,
            "inter_token_latency_seconds_sum": 1,
            "e2e_request_latency_seconds_sum": 3,
            "request_queue_time_seconds_sum": 0.5,
        }.items():
            assert told[key(f"{prefix}{name}", model_name="org/tiny")] == value, name
        assert told[key(f"{prefix}num_requests_running")] == 2
        assert told[key(f"{prefix}num_requests_waiting")] == 3
        assert told[key(f"{prefix}kv_cache_usage_perc")] == 0.25
    assert told[key("vllm:request_success_total", model_name="org/tiny", finished_reason="stop")] == 1
    assert told[key("shardcompute_generations_total", model_name="org/tiny", reason="stop")] == 1
    asked = key("shardcompute_http_requests_total", path="/v1/completions", method="POST", status="200")
    assert told[asked] == 1
    assert told[key("shardcompute_ready")] == 1


def test_durations_are_counted_below_each_bound(service: Any, call: Any) -> None:
    ticks = count()
    app = create_app(service, clock=lambda: float(next(ticks)))
    call(app, "POST", "/v1/completions", json={"prompt": "hi"})
    told = samples(call(app, "GET", "/metrics").text)
    counts = {
        float(dict(labels)["le"]): value
        for (name, labels), value in told.items()
        if name == "vllm:e2e_request_latency_seconds_bucket"
    }
    assert {bound for bound, value in counts.items() if value} == {5, 10, 30, 60, 120, 300, 600, float("inf")}
    assert {bound for bound, value in counts.items() if not value} == {
        *(0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
        *(1, 2.5),
    }


def test_applications_count_for_themselves(service: Any, fakes: Any, call: Any) -> None:
    one, other = create_app(service), create_app(fakes.FakeService())
    call(one, "POST", "/v1/completions", json={"prompt": "hi"})
    generated = key("shardcompute_generation_tokens_total", model_name="org/tiny")
    assert samples(call(one, "GET", "/metrics").text)[generated] == 5
    assert generated not in samples(call(other, "GET", "/metrics").text)


def test_failures_are_counted_and_unknown_paths_share_a_label(service: Any, app: Any, call: Any) -> None:
    service.script = [QueueFullError("full")]
    call(app, "POST", "/v1/completions", json={"prompt": "hi"})
    call(app, "GET", "/a")
    call(app, "WEIRD", "/b")
    told = samples(call(app, "GET", "/metrics").text)
    assert told[key("shardcompute_generations_total", model_name="org/tiny", reason="error")] == 1
    http = "shardcompute_http_requests_total"
    assert told[key(http, path="/v1/completions", method="POST", status="429")] == 1
    assert told[key(http, path="other", method="GET", status="404")] == 1
    assert told[key(http, path="other", method="other", status="404")] == 1
    assert key("shardcompute_prompt_tokens_total", model_name="org/tiny") not in told


def test_label_values_are_escaped(service: Any, app: Any, call: Any) -> None:
    odd = 'x"\\\n'
    traffic = (HopTraffic(odd, "b", "int8", 2, 1188),)
    service.load = lambda: ServiceLoad(running=0, waiting=0, kv_used_fraction=0.0, traffic=traffic)
    told = samples(call(app, "GET", "/metrics").text)
    assert told[key("shardcompute_wire_frames_total", sender=odd, receiver="b", codec="int8")] == 2


def test_traffic_between_nodes_is_told_by_codec(service: Any, app: Any, call: Any) -> None:
    traffic = (HopTraffic("a", "b", "int8", 2, 1188), HopTraffic("a", "b", "exact", 1, 2304))
    service.load = lambda: ServiceLoad(running=0, waiting=0, kv_used_fraction=0.0, traffic=traffic)
    told = samples(call(app, "GET", "/metrics").text)
    for codec, frames, size in (("int8", 2, 1188), ("exact", 1, 2304)):
        hop = {"sender": "a", "receiver": "b", "codec": codec}
        assert told[key("shardcompute_wire_bytes_total", **hop)] == size
        assert told[key("shardcompute_wire_frames_total", **hop)] == frames
