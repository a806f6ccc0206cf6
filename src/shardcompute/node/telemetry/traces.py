"""OpenTelemetry traces: one span for each generation, with its queue, prefill and decode within (extra `otel`).

    with tracing(settings, swarm.requests): ...

Off unless OTEL_EXPORTER_OTLP_ENDPOINT names a collector; OTEL_SERVICE_NAME and the like are honoured by the SDK. Spans
are made of what the request log knows once a generation has ended, so that nothing is done while tokens flow. What
each stage spent is told by attributes of the decode span's events, one per stage. No text is ever part of a span.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from shardcompute.core.errors import UsageError
from shardcompute.core.settings import Settings
from shardcompute.node.telemetry.request_log import RequestLog, RequestView

_NANOSECONDS = 1_000_000_000
_TRACES_PATH = "/v1/traces"


@contextmanager
def tracing(settings: Settings, requests: RequestLog) -> Iterator[None]:
    """Send a trace of every generation that ends while the block runs, where settings ask for it.

    Raises UsageError if they do and the extra is not installed.
    """
    if settings.traces_url is None:
        yield
        return
    provider = _open_provider(settings.traces_url)
    requests.listen(SpanWriter(provider.get_tracer("shardcompute")))
    try:
        yield
    finally:
        provider.shutdown()


class SpanWriter:
    """Writes the spans of one generation, with `tracer` (an `opentelemetry.trace.Tracer`)."""

    def __init__(self, tracer: Any) -> None:
        self._tracer = tracer

    def __call__(self, view: RequestView) -> None:
        from opentelemetry.trace import Status, StatusCode, set_span_in_context

        start_s = view.started_at_s
        span = self._tracer.start_span("generate", start_time=_ns(start_s), attributes=attributes_of(view))
        if view.state == "failed":
            span.set_status(Status(StatusCode.ERROR, view.error))
        context = set_span_in_context(span)
        for name, length_s in (
            ("queue", view.queue_s),
            ("prefill", view.prefill_s),
            ("decode", view.decode_s),
        ):
            if length_s is None:
                continue
            part = self._tracer.start_span(name, context=context, start_time=_ns(start_s))
            start_s += length_s
            if name == "decode":
                _add_stages(part, view, start_s)
            part.end(_ns(start_s))
        span.end(_ns(view.started_at_s + view.elapsed_s))


def attributes_of(view: RequestView) -> dict[str, str | int | float]:
    """What a generation's span says; names of OpenTelemetry's conventions where there are some."""
    return {
        "gen_ai.request.model": view.model,
        "gen_ai.usage.input_tokens": view.prompt_tokens,
        "gen_ai.usage.output_tokens": view.generated_tokens,
        "gen_ai.response.finish_reasons": view.finish or view.state,
        "shardcompute.request": view.id,
        "shardcompute.session": view.session,
        "shardcompute.chain": view.chain,
        "shardcompute.cached_tokens": view.cached_tokens,
        "shardcompute.traversals": view.traversals,
        "shardcompute.drafted_tokens": view.drafted_tokens,
        "shardcompute.accepted_tokens": view.accepted_tokens,
    }


def _add_stages(span: Any, view: RequestView, end_s: float) -> None:
    for index, stage in enumerate(view.stages):
        attributes: dict[str, str | int | float] = {
            "shardcompute.stage": index,
            "shardcompute.node": stage.node,
            "shardcompute.steps": stage.steps,
            "shardcompute.queue_s": stage.queue_s,
            "shardcompute.compute_s": stage.compute_s,
            "shardcompute.codec_s": stage.codec_s,
        }
        span.add_event("stage", attributes, timestamp=_ns(end_s))


def _open_provider(url: str) -> Any:
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import OTELResourceDetector, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise UsageError(
            "OTEL_EXPORTER_OTLP_ENDPOINT is set, but OpenTelemetry is not installed",
            hint="pip install 'shardcompute[otel]', or unset the variable",
        ) from error
    # A name in the environment wins over ours.
    named = Resource.create({"service.name": "shardcompute"}).merge(OTELResourceDetector().detect())
    provider = TracerProvider(resource=named)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=f"{url}{_TRACES_PATH}")))
    return provider


def _ns(seconds: float) -> int:
    return int(seconds * _NANOSECONDS)
