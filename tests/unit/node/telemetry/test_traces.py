"""Traces of generations, as a collector would get them."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from shardcompute.core.errors import CapacityError, UsageError
from shardcompute.core.generation import Delta, GenerationRequest, Timings, TokenChoice
from shardcompute.core.settings import load_settings
from shardcompute.node.telemetry.request_log import RequestLog
from shardcompute.node.telemetry.traces import SpanWriter, tracing
from shardcompute.wire import StageTiming

sdk = pytest.importorskip("opentelemetry.sdk.trace", reason="the extra otel is not installed")


@pytest.fixture
def exporter() -> Any:
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    return InMemorySpanExporter()


@pytest.fixture
def log(exporter: Any) -> RequestLog:
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor

    provider = sdk.TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    steps = [StageTiming("a", 0.25, 0.5, 0.125), StageTiming("b", 0.0, 1.0, 0.0)]
    log = RequestLog(stage_times=lambda chain: steps, clock=lambda: 7.0, wall_clock=lambda: 100.0)
    log.listen(SpanWriter(provider.get_tracer("test")))
    return log


def test_a_generation_is_a_span_with_its_parts(log: RequestLog, exporter: Any) -> None:
    with log.open("m", "m#1", GenerationRequest((0,) * 4, 1)) as entry:
        entry.session = 5
        timings = Timings(0.5, 1.5, 2.0, 4, 1, cached_tokens=3)
        entry.saw(Delta("a", (TokenChoice(1),), finish="length", timings=timings))
    queue, prefill, decode, whole = exporter.get_finished_spans()
    assert [span.name for span in (queue, prefill, decode, whole)] == [
        "queue",
        "prefill",
        "decode",
        "generate",
    ]
    assert {span.parent.span_id for span in (queue, prefill, decode)} == {whole.context.span_id}
    seconds = [(span.start_time / 1e9, span.end_time / 1e9) for span in (queue, prefill, decode)]
    assert seconds == [(100.0, 100.5), (100.5, 102.0), (102.0, 104.0)]
    assert whole.attributes["shardcompute.request"] == entry.id
    assert whole.attributes["shardcompute.session"] == "5"
    assert whole.attributes["shardcompute.cached_tokens"] == 3
    stages = [event.attributes for event in decode.events]
    assert [stage["shardcompute.node"] for stage in stages] == ["a", "b"]
    assert stages[0]["shardcompute.compute_s"] == 0.5


def test_a_failure_is_marked(log: RequestLog, exporter: Any) -> None:
    with pytest.raises(CapacityError), log.open("m", "m#1", GenerationRequest((0,) * 4, 1)):
        raise CapacityError("no room")
    (span,) = exporter.get_finished_spans()
    assert (span.status.status_code.name, span.status.description) == ("ERROR", "no room")


def test_it_is_off_unless_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with tracing(load_settings({"HOME": "/"}), RequestLog()):
        pass


def test_without_the_extra_the_user_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    wanted = load_settings({"HOME": "/", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://localhost:4318/"})
    with pytest.raises(UsageError, match="not installed"), tracing(wanted, RequestLog()):
        pass
