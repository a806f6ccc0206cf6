"""Counters, gauges and histograms in Prometheus' text form, and the ones that we keep.

Where vLLM has a metric of the same meaning, ours is written out under its name too, so that dashboards work.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from shardcompute.core.generation import Delta
from shardcompute.node.service import HopTraffic, Service

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_SECONDS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


class Metric(Protocol):
    def lines(self) -> list[str]:
        """HELP, TYPE and one line per sample, for each name of the metric."""
        ...


class Counter:
    """A sum that only grows, one per combination of label values."""

    def __init__(self, names: Sequence[str], text: str, labels: Sequence[str] = ()) -> None:
        self._names, self._text, self._labels = names, text, labels
        self._sums: dict[tuple[str, ...], float] = {}

    def add(self, amount: float, *values: str) -> None:
        self._sums[values] = self._sums.get(values, 0.0) + amount

    def lines(self) -> list[str]:
        sums = self._sums or ({} if self._labels else {(): 0.0})
        samples = [(_labelled(self._labels, values), total) for values, total in sorted(sums.items())]
        lines: list[str] = []
        for name in self._names:
            lines += _header(name, self._text, "counter")
            lines += [f"{name}{labels} {_number(total)}" for labels, total in samples]
        return lines


class Gauge:
    """A value as it is now."""

    def __init__(self, names: Sequence[str], text: str, value: float) -> None:
        self._names, self._text, self._value = names, text, value

    def lines(self) -> list[str]:
        value = _number(self._value)
        return [
            line for name in self._names for line in (*_header(name, self._text, "gauge"), f"{name} {value}")
        ]


class Gauges:
    """Values as they are now, one per combination of label values."""

    def __init__(self, name: str, text: str, labels: Sequence[str]) -> None:
        self._name, self._text, self._labels = name, text, labels
        self._values: dict[tuple[str, ...], float] = {}

    def set(self, value: float, *values: str) -> None:
        self._values[values] = value

    def lines(self) -> list[str]:
        samples = [
            f"{self._name}{_labelled(self._labels, values)} {_number(value)}"
            for values, value in sorted(self._values.items())
        ]
        return [*_header(self._name, self._text, "gauge"), *samples]


class Histogram:
    """How often a duration fell under each bound, one per combination of label values."""

    def __init__(
        self,
        names: Sequence[str],
        text: str,
        labels: Sequence[str] = (),
        bounds: Sequence[float] = _SECONDS,
    ) -> None:
        self._names, self._text, self._labels, self._bounds = names, text, labels, bounds
        self._counts: dict[tuple[str, ...], list[int]] = {}
        self._sums: dict[tuple[str, ...], float] = {}

    def observe(self, value: float, *values: str) -> None:
        counts = self._counts.setdefault(values, [0] * (len(self._bounds) + 1))
        counts[bisect_left(self._bounds, value)] += 1
        self._sums[values] = self._sums.get(values, 0.0) + value

    def lines(self) -> list[str]:
        lines: list[str] = []
        for name in self._names:
            lines += _header(name, self._text, "histogram")
            for values, counts in sorted(self._counts.items()):
                below = 0
                for bound, count in zip((*self._bounds, math.inf), counts, strict=True):
                    below += count
                    labels = _labelled((*self._labels, "le"), (*values, _number(bound)))
                    lines.append(f"{name}_bucket{labels} {below}")
                labels = _labelled(self._labels, values)
                lines.append(f"{name}_sum{labels} {_number(self._sums[values])}")
                lines.append(f"{name}_count{labels} {below}")
        return lines


class GenerationMetrics:
    """What the API counts of requests and generations."""

    def __init__(self) -> None:
        model = ("model_name",)
        self.http_requests = Counter(
            ("shardcompute_http_requests_total",), "HTTP requests answered.", ("path", "method", "status")
        )
        self.prompt_tokens = _counter("prompt_tokens_total", "Prompt tokens of generations begun.", model)
        self.generated_tokens = _counter("generation_tokens_total", "Tokens generated.", model)
        self.finished = Counter(
            ("shardcompute_generations_total",), "Generations ended, by reason.", ("model_name", "reason")
        )
        self.succeeded = Counter(
            ("vllm:request_success_total",),
            "Generations that ran to their end.",
            ("model_name", "finished_reason"),
        )
        self.traversals = Counter(
            ("shardcompute_traversals_total",),
            "Frames that generations took part in after their prompt.",
            model,
        )
        self.drafted_tokens = Counter(
            ("shardcompute_drafted_tokens_total", "vllm:spec_decode_num_draft_tokens_total"),
            "Tokens that were drafted and verified.",
            model,
        )
        self.accepted_tokens = Counter(
            ("shardcompute_accepted_tokens_total", "vllm:spec_decode_num_accepted_tokens_total"),
            "Drafted tokens that were right.",
            model,
        )
        self.first_token = _histogram("time_to_first_token_seconds", "From request to first token.")
        self.between_tokens = _histogram("inter_token_latency_seconds", "Between one token and the next.")
        self.whole = _histogram("e2e_request_latency_seconds", "From request to last token.")
        self.queue = _histogram("request_queue_time_seconds", "Waiting before the prefill.")
        self.prefill = _histogram("request_prefill_time_seconds", "Computing the prompt.")
        self.decode = _histogram("request_decode_time_seconds", "From the first token to the last.")

    def watch(self, model: str, clock: Callable[[], float]) -> Watch:
        return Watch(self, model, clock)

    def render(self, service: Service) -> str:
        load = service.load()
        metrics: list[Metric] = [
            *(metric for metric in vars(self).values()),
            Gauge(_both("num_requests_running"), "Generations being computed.", load.running),
            Gauge(_both("num_requests_waiting"), "Generations waiting.", load.waiting),
            Gauge(_both("kv_cache_usage_perc"), "KV memory in use; 1 is all.", load.kv_used_fraction),
            Gauge(("shardcompute_ready",), "1 once a model is loaded.", float(service.is_ready())),
            *_wire_metrics(load.traffic),
            _router_metrics(load.routers),
        ]
        return "\n".join(line for metric in metrics for line in metric.lines()) + "\n"


class Watch:
    """Measures one generation, from its request to its end."""

    def __init__(self, metrics: GenerationMetrics, model: str, clock: Callable[[], float]) -> None:
        self._metrics, self._model, self._clock = metrics, model, clock
        self._begun = clock()
        self._latest: float | None = None

    def saw(self, delta: Delta) -> None:
        if delta.tokens:
            now = self._clock()
            if self._latest is None:
                self._metrics.first_token.observe(now - self._begun, self._model)
            else:
                # Tokens that arrive together share the time since the last ones.
                each_s = (now - self._latest) / len(delta.tokens)
                for _ in delta.tokens:
                    self._metrics.between_tokens.observe(each_s, self._model)
            self._latest = now
            self._metrics.generated_tokens.add(len(delta.tokens), self._model)
        if delta.timings is not None:
            self._metrics.queue.observe(delta.timings.queue_s, self._model)
            self._metrics.prefill.observe(delta.timings.prefill_s, self._model)
            self._metrics.decode.observe(delta.timings.decode_s, self._model)
            self._metrics.traversals.add(delta.timings.traversals, self._model)
            self._metrics.drafted_tokens.add(delta.timings.drafted_tokens, self._model)
            self._metrics.accepted_tokens.add(delta.timings.accepted_tokens, self._model)

    def ended(self, reason: str, *, prompt_tokens: int) -> None:
        self._metrics.finished.add(1, self._model, reason)
        if self._latest is not None:
            self._metrics.prompt_tokens.add(prompt_tokens, self._model)
        if reason in ("stop", "length"):
            self._metrics.whole.observe(self._clock() - self._begun, self._model)
            self._metrics.succeeded.add(1, self._model, reason)


def _wire_metrics(traffic: Sequence[HopTraffic]) -> tuple[Counter, Counter]:
    labels = ("sender", "receiver", "codec")
    frames = Counter(("shardcompute_wire_frames_total",), "Frames of activations between nodes.", labels)
    size = Counter(("shardcompute_wire_bytes_total",), "Bytes of activations between nodes.", labels)
    for hop in traffic:
        names = (hop.sender, hop.receiver, hop.codec)
        frames.add(hop.frames, *names)
        size.add(hop.size_bytes, *names)
    return frames, size


def _router_metrics(routers: Mapping[str, Mapping[str, float]]) -> Gauges:
    gauges = Gauges(
        "shardcompute_router",
        "What the router of drafts has measured: times of the ring, acceptance and share of rounds by drafter.",
        ("chain", "what"),
    )
    for chain, known in routers.items():
        for what, value in known.items():
            gauges.set(value, chain, what)
    return gauges


def _both(name: str) -> tuple[str, str]:
    return f"shardcompute_{name}", f"vllm:{name}"


def _counter(name: str, text: str, labels: Sequence[str]) -> Counter:
    return Counter(_both(name), text, labels)


def _histogram(name: str, text: str) -> Histogram:
    return Histogram(_both(name), text, ("model_name",))


def _header(name: str, text: str, kind: str) -> list[str]:
    return [f"# HELP {name} {text}", f"# TYPE {name} {kind}"]


def _labelled(labels: Sequence[str], values: Sequence[str]) -> str:
    if not labels:
        return ""
    pairs = zip(labels, values, strict=True)
    return "{" + ",".join(f'{label}="{_escaped(value)}"' for label, value in pairs) + "}"


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def _number(value: float) -> str:
    return "+Inf" if value == math.inf else repr(int(value) if value == int(value) else value)
