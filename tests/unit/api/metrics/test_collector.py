from __future__ import annotations

from itertools import count
from typing import Any

from shardcompute.api import create_app
from shardcompute.api.metrics.kinds import Counter, Gauge, Histogram
from shardcompute.core.errors import QueueFullError
from shardcompute.node.service import HopTraffic, ServiceLoad


def test_a_counter_sums_by_label_and_escapes() -> None:
    counter = Counter(("a_total", "b:total"), "Help.", ("who",))
    assert counter.lines() == [
        "# HELP a_total Help.",
        "# TYPE a_total counter",
        "# HELP b:total Help.",
        "# TYPE b:total counter",
    ]
    counter.add(1, 'x"\\\n')
    counter.add(1.5, 'x"\\\n')
    lines = counter.lines()
    assert lines[2] == 'a_total{who="x\\"\\\\\\n"} 2.5'
    assert lines[5] == 'b:total{who="x\\"\\\\\\n"} 2.5'


def test_a_counter_without_labels_starts_at_zero() -> None:
    assert Counter(("a_total",), "Help.").lines()[-1] == "a_total 0"


def test_a_gauge_shows_its_value() -> None:
    assert Gauge(("a",), "Help.", 0.25).lines() == ["# HELP a Help.", "# TYPE a gauge", "a 0.25"]


def test_a_histogram_is_cumulative() -> None:
    histogram = Histogram(("a_seconds",), "Help.", ("m",), bounds=(1, 2))
    for value in (0.5, 1.0, 1.5, 9.0):
        histogram.observe(value, "x")
    assert histogram.lines()[2:] == [
        'a_seconds_bucket{m="x",le="1"} 2',
        'a_seconds_bucket{m="x",le="2"} 3',
        'a_seconds_bucket{m="x",le="+Inf"} 4',
        'a_seconds_sum{m="x"} 12',
        'a_seconds_count{m="x"} 4',
    ]


def test_a_generation_is_counted_under_both_names(service: Any, call: Any, fakes: Any) -> None:
    ticks = count()
    app = create_app(service, clock=lambda: float(next(ticks)))
    call(app, "POST", "/v1/completions", json={"prompt": "hi"})
    response = call(app, "GET", "/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    lines = set(response.text.splitlines())
    model = '{model_name="org/tiny"}'
    for prefix in ("shardcompute_", "vllm:"):
        assert f"{prefix}prompt_tokens_total{model} 3" in lines
        assert f"{prefix}generation_tokens_total{model} 5" in lines
        assert f"{prefix}num_requests_running 2" in lines
        assert f"{prefix}num_requests_waiting 3" in lines
        assert f"{prefix}kv_cache_usage_perc 0.25" in lines
        # The clock ticks once per reading: begun 0, first tokens 1, second tokens 2, ended 3.
        assert f"{prefix}time_to_first_token_seconds_sum{model} 1" in lines
        assert f"{prefix}inter_token_latency_seconds_count{model} 2" in lines
        assert f"{prefix}inter_token_latency_seconds_sum{model} 1" in lines
        assert f"{prefix}e2e_request_latency_seconds_sum{model} 3" in lines
        assert f"{prefix}request_queue_time_seconds_sum{model} 0.5" in lines
    assert 'vllm:request_success_total{model_name="org/tiny",finished_reason="stop"} 1' in lines
    assert 'shardcompute_generations_total{model_name="org/tiny",reason="stop"} 1' in lines
    expected = 'shardcompute_http_requests_total{path="/v1/completions",method="POST",status="200"} 1'
    assert expected in lines
    assert "shardcompute_ready 1" in lines


def test_failures_are_counted_and_unknown_paths_share_a_label(service: Any, app: Any, call: Any) -> None:
    service.script = [QueueFullError("full")]
    call(app, "POST", "/v1/completions", json={"prompt": "hi"})
    call(app, "GET", "/a")
    call(app, "WEIRD", "/b")
    text = call(app, "GET", "/metrics").text
    assert 'reason="error"} 1' in text
    assert 'status="429"} 1' in text
    assert '{path="other",method="GET",status="404"} 1' in text
    assert '{path="other",method="other",status="404"} 1' in text
    assert "prompt_tokens_total{" not in text


def test_traffic_between_nodes_is_told_by_codec(service: Any, app: Any, call: Any) -> None:
    traffic = (HopTraffic("a", "b", "int8", 2, 1188), HopTraffic("a", "b", "exact", 1, 2304))
    service.load = lambda: ServiceLoad(running=0, waiting=0, kv_used_fraction=0.0, traffic=traffic)
    lines = call(app, "GET", "/metrics").text.splitlines()
    assert 'shardcompute_wire_bytes_total{sender="a",receiver="b",codec="int8"} 1188' in lines
    assert 'shardcompute_wire_frames_total{sender="a",receiver="b",codec="int8"} 2' in lines
    assert 'shardcompute_wire_bytes_total{sender="a",receiver="b",codec="exact"} 2304' in lines
