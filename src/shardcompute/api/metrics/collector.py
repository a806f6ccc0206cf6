"""Prometheus collector: the requests and generations that the API counts, and the service and cluster as they are now.

Every metric is one of `table`, written under each of its names. There is no global registry: each application counts
for itself, and what is as it is now is read when `/metrics` is asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from prometheus_client import Counter, Histogram, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from shardcompute.api.metrics import table
from shardcompute.api.metrics.table import MetricRow
from shardcompute.core.generation import Delta
from shardcompute.node.service import Service, ServiceLoad
from shardcompute.version import VERSION

if TYPE_CHECKING:
    from shardcompute.node.admin.incidents import ClusterHealth
    from shardcompute.node.admin.views import NodeView

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_SECONDS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
Values = Mapping[tuple[str, ...], float]
"""By the values of a metric's labels."""


class GenerationMetrics:
    """What the API counts of requests and generations. Methods may be called from any thread."""

    def __init__(self) -> None:
        self._counted: list[tuple[MetricRow, Counter | Histogram]] = []
        self.http_requests = self._counter(table.HTTP_REQUESTS)
        self.prompt_tokens = self._counter(table.PROMPT_TOKENS)
        self.cached_tokens = self._counter(table.CACHED_TOKENS)
        self.generated_tokens = self._counter(table.GENERATED_TOKENS)
        self.finished = self._counter(table.FINISHED)
        self.succeeded = self._counter(table.SUCCEEDED)
        self.traversals = self._counter(table.TRAVERSALS)
        self.drafted_tokens = self._counter(table.DRAFTED_TOKENS)
        self.accepted_tokens = self._counter(table.ACCEPTED_TOKENS)
        self.first_token = self._histogram(table.FIRST_TOKEN)
        self.between_tokens = self._histogram(table.BETWEEN_TOKENS)
        self.whole = self._histogram(table.WHOLE)
        self.queue = self._histogram(table.QUEUE)
        self.prefill = self._histogram(table.PREFILL)
        self.decode = self._histogram(table.DECODE)

    def time(self, model: str, clock: Callable[[], float]) -> GenerationTimer:
        return GenerationTimer(self, model, clock)

    def snapshot(self, service: Service, cluster: ClusterHealth | None = None) -> MetricsSnapshot:
        return MetricsSnapshot(self._counted, service.load(), service.is_ready(), cluster)

    def _counter(self, row: MetricRow) -> Counter:
        counter = Counter(row.names[0], row.meaning, row.labels, registry=None)
        self._counted.append((row, counter))
        return counter

    def _histogram(self, row: MetricRow) -> Histogram:
        histogram = Histogram(row.names[0], row.meaning, row.labels, registry=None, buckets=_SECONDS)
        self._counted.append((row, histogram))
        return histogram


_COUNT_S = 0.25
"""So long tokens may wait to be counted."""


class GenerationTimer:
    """Measures one generation, from its request to its end."""

    def __init__(self, metrics: GenerationMetrics, model: str, clock: Callable[[], float]) -> None:
        self._metrics, self._model, self._clock = metrics, model, clock
        self._begun = clock()
        self._latest: float | None = None
        self._generated: Counter | None = None
        self._between: Histogram | None = None
        self._uncounted: list[tuple[int, float]] = []
        """How many tokens came together since they were counted last, and how long each took."""
        self._tokens = 0
        self._counted_s = self._begun

    def _count(self, now: float) -> None:
        """Every counter has a lock: all that came in a while is counted together."""
        self._counted_s = now
        if self._generated is None or self._between is None:
            return
        self._generated.inc(self._tokens)
        for tokens, each_s in self._uncounted:
            for _ in range(tokens):
                self._between.observe(each_s)
        self._tokens = 0
        self._uncounted.clear()

    def saw(self, delta: Delta) -> None:
        if delta.tokens:
            now = self._clock()
            if self._latest is None or self._generated is None or self._between is None:
                # Looked up once, as these count every token.
                self._generated = self._metrics.generated_tokens.labels(self._model)
                self._between = self._metrics.between_tokens.labels(self._model)
                self._metrics.first_token.labels(self._model).observe(now - self._begun)
            else:
                # Tokens that arrive together share the time since the last ones.
                self._uncounted.append((len(delta.tokens), (now - self._latest) / len(delta.tokens)))
            self._latest = now
            self._tokens += len(delta.tokens)
            if delta.finish is not None or now - self._counted_s > _COUNT_S:
                self._count(now)
        if delta.timings is not None:
            self._metrics.queue.labels(self._model).observe(delta.timings.queue_s)
            self._metrics.prefill.labels(self._model).observe(delta.timings.prefill_s)
            self._metrics.decode.labels(self._model).observe(delta.timings.decode_s)
            self._metrics.cached_tokens.labels(self._model).inc(delta.timings.cached_tokens)
            self._metrics.traversals.labels(self._model).inc(delta.timings.traversals)
            self._metrics.drafted_tokens.labels(self._model).inc(delta.timings.drafted_tokens)
            self._metrics.accepted_tokens.labels(self._model).inc(delta.timings.accepted_tokens)

    def ended(self, reason: str, *, prompt_tokens: int) -> None:
        self._count(self._latest or self._begun)
        self._metrics.finished.labels(self._model, reason).inc()
        if self._latest is not None:
            self._metrics.prompt_tokens.labels(self._model).inc(prompt_tokens)
        if reason in ("stop", "length"):
            self._metrics.whole.labels(self._model).observe(self._clock() - self._begun)
            self._metrics.succeeded.labels(self._model, reason).inc()


class MetricsSnapshot(Collector):
    """Everything that one scrape is told."""

    def __init__(
        self,
        counted: Iterable[tuple[MetricRow, Counter | Histogram]],
        load: ServiceLoad,
        is_ready: bool,
        cluster: ClusterHealth | None,
    ) -> None:
        self._counted = counted
        self._now: list[tuple[MetricRow, Values]] = [
            (table.RUNNING, {(): load.running}),
            (table.WAITING, {(): load.waiting}),
            (table.KV_USAGE, {(): load.kv_used_fraction}),
            (table.READY, {(): is_ready}),
            (table.VERSION, {(VERSION,): 1}),
            *_work(load),
            *([] if cluster is None else _health(cluster)),
        ]

    def collect(self) -> Iterator[Metric]:
        for row, metric in self._counted:
            yield from _counted_families(row, metric)
        for row, values in self._now:
            yield from _families(row, values)

    def render(self) -> bytes:
        """In Prometheus' text form. Takes milliseconds where there are many series."""
        return generate_latest(self)


def _counted_families(row: MetricRow, metric: Counter | Histogram) -> Iterator[Metric]:
    """The metric under each of its names, without the times of creation that the library adds."""
    [family] = metric.collect()
    for name in row.names:
        renamed = Metric(_stem(name), row.meaning, row.kind)
        for sample in family.samples:
            suffix = sample.name.removeprefix(family.name)
            if suffix != "_created":
                renamed.add_sample(_stem(name) + suffix, sample.labels, sample.value)
        yield renamed


def _families(row: MetricRow, values: Values) -> Iterator[Metric]:
    for name in row.names:
        family = Metric(_stem(name), row.meaning, row.kind)
        for labels, value in sorted(values.items()):
            family.add_sample(name, dict(zip(row.labels, labels, strict=True)), value)
        yield family


def _stem(name: str) -> str:
    """A family's name, to which the library adds the suffix of counters itself."""
    return name.removesuffix("_total")


def _work(load: ServiceLoad) -> Iterator[tuple[MetricRow, Values]]:
    hops = {(hop.sender, hop.receiver, hop.codec): hop for hop in load.traffic}
    yield table.WIRE_FRAMES, {labels: hop.frames for labels, hop in hops.items()}
    yield table.WIRE_BYTES, {labels: hop.size_bytes for labels, hop in hops.items()}
    stages = {(stage.chain, stage.node): stage for stage in load.stages}
    yield table.STAGE_STEPS, {labels: stage.steps for labels, stage in stages.items()}
    yield table.STAGE_COMPUTE, {labels: stage.compute_s for labels, stage in stages.items()}
    yield table.STAGE_QUEUE, {labels: stage.queue_s for labels, stage in stages.items()}
    yield table.STAGE_CODEC, {labels: stage.codec_s for labels, stage in stages.items()}
    yield table.STAGE_EXCHANGE, {labels: stage.exchange_s for labels, stage in stages.items()}
    slowest = [(stage.chain, stage.node, stage.slowest) for stage in load.stages if stage.slowest]
    yield table.STAGE_SLOWEST, dict.fromkeys(slowest, 1)
    yield table.KV_USED, {(kv.chain,): kv.used_tokens for kv in load.kv}
    yield table.KV_CAPACITY, {(kv.chain,): kv.capacity_tokens for kv in load.kv}
    routers = load.routers.items()
    yield table.ROUTER, {(chain, what): value for chain, known in routers for what, value in known.items()}


def _memory_parts(node: NodeView) -> Iterator[tuple[str, int]]:
    yield "process", node.process_bytes
    yield "held_weights", node.parts.held_weights_bytes
    yield "scratch", node.parts.scratch_bytes
    yield "kv_reserved", node.parts.kv_reserved_bytes
    yield "kv_used", node.kv_used_bytes
    yield "resident", node.resident_bytes


def _drifts(cluster: ClusterHealth) -> Iterator[tuple[MetricRow, Values]]:
    found = {
        (node.id, node.name): cluster.drifts[node.id] for node in cluster.nodes if node.id in cluster.drifts
    }
    yield table.CANARIES, {labels: drift.canaries for labels, drift in found.items()}
    yield table.CANARIES_DIFFERED, {labels: drift.differed for labels, drift in found.items()}
    yield table.NODE_DRIFT, {labels: drift.level for labels, drift in found.items()}
    yield table.CHAINS_DRIFTING, {(): cluster.drifting_chains}


def _health(cluster: ClusterHealth) -> Iterator[tuple[MetricRow, Values]]:
    yield table.NODES, _by_name(cluster.nodes_by_status)
    yield table.NODE_MEMORY, {(node.id, node.name): node.memory_bytes for node in cluster.nodes}
    yield table.NODE_USED, {(node.id, node.name): node.used_bytes for node in cluster.nodes}
    yield (
        table.NODE_PARTS,
        {(node.id, node.name, part): size for node in cluster.nodes for part, size in _memory_parts(node)},
    )
    yield (
        table.NODE_DEVICE,
        {
            (node.id, node.name, node.device, node.backend, node.device_label): node.device_bytes
            for node in cluster.nodes
        },
    )
    yield (
        table.NODE_UNUSED_DEVICES,
        {(node.id, node.name): len(node.unused_devices) for node in cluster.nodes},
    )
    yield from _speeds(cluster)
    yield table.NODES_LOST, {(): cluster.incidents.lost_nodes}
    chains = cluster.chains_by_status.items()
    yield table.CHAINS, {(model, status): count for (model, status), count in chains}
    yield table.CHAINS_WANTED, _by_name(cluster.wanted_chains)
    yield table.FAILOVERS, _by_name(cluster.incidents.failovers)
    yield table.REPLANS, _by_name(cluster.incidents.replans)
    yield table.LINK_RTT, {(link.a, link.b): link.rtt_s for link in cluster.links if link.is_open}
    yield table.LINKS_OPEN, {(link.a, link.b): link.is_open for link in cluster.links}
    yield table.LINK_RUNG, {(link.a, link.b, link.rung): 1 for link in cluster.links if link.is_open}
    yield from _drifts(cluster)
    yield table.DRAFTERS, {(*labels, state): 1 for labels, state in cluster.drafters.items()}
    yield table.WEIGHTS_SENT, _by_name(cluster.weights_sent_bytes)
    yield table.UNRECORDED, {(): cluster.unrecorded}


def _speeds(cluster: ClusterHealth) -> Iterator[tuple[MetricRow, Values]]:
    yield (
        table.NODE_WEIGHTS_SPEED,
        {
            (node.id, node.name, "probe" if node.probed_at_s else "guess"): node.weights_bytes_per_s
            for node in cluster.nodes
            if node.weights_bytes_per_s
        },
    )
    seconds: dict[tuple[str, ...], float] = {}
    measured_at: dict[tuple[str, ...], float] = {}
    for node in cluster.nodes:
        for speed in node.speeds:
            kinds = {"decode": speed.layer_s, "batch": speed.batch_layer_s, "prefill": speed.prefill_layer_s}
            for kind, value in kinds.items():
                if value is not None:
                    seconds[node.id, node.name, speed.model, kind, speed.source] = value
            measured_at[node.id, node.name, speed.model] = speed.measured_at_s
    yield table.NODE_LAYER_SECONDS, seconds
    yield table.NODE_MEASURED_AT, measured_at


def _by_name(counts: Mapping[str, float]) -> Values:
    return {(name,): count for name, count in counts.items()}
