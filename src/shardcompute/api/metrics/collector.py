"""What `/metrics` says: requests and generations that we count, and the service and cluster as they are now."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from shardcompute.api.metrics import table
from shardcompute.api.metrics.kinds import Counter, Gauge, Gauges, Histogram, Metric
from shardcompute.api.metrics.table import MetricRow
from shardcompute.core.generation import Delta
from shardcompute.node.service import Service, ServiceLoad
from shardcompute.version import VERSION

if TYPE_CHECKING:
    from shardcompute.node.admin.incidents import ClusterHealth

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class GenerationMetrics:
    """What the API counts of requests and generations."""

    def __init__(self) -> None:
        self.http_requests = _counter(table.HTTP_REQUESTS)
        self.prompt_tokens = _counter(table.PROMPT_TOKENS)
        self.cached_tokens = _counter(table.CACHED_TOKENS)
        self.generated_tokens = _counter(table.GENERATED_TOKENS)
        self.finished = _counter(table.FINISHED)
        self.succeeded = _counter(table.SUCCEEDED)
        self.traversals = _counter(table.TRAVERSALS)
        self.drafted_tokens = _counter(table.DRAFTED_TOKENS)
        self.accepted_tokens = _counter(table.ACCEPTED_TOKENS)
        self.first_token = _histogram(table.FIRST_TOKEN)
        self.between_tokens = _histogram(table.BETWEEN_TOKENS)
        self.whole = _histogram(table.WHOLE)
        self.queue = _histogram(table.QUEUE)
        self.prefill = _histogram(table.PREFILL)
        self.decode = _histogram(table.DECODE)

    def watch(self, model: str, clock: Callable[[], float]) -> GenerationTimer:
        return GenerationTimer(self, model, clock)

    def render(self, service: Service, cluster: ClusterHealth | None = None) -> str:
        load = service.load()
        version = _gauges(table.VERSION)
        version.set(1, VERSION)
        metrics: list[Metric] = [
            *(metric for metric in vars(self).values()),
            _gauge(table.RUNNING, load.running),
            _gauge(table.WAITING, load.waiting),
            _gauge(table.KV_USAGE, load.kv_used_fraction),
            _gauge(table.READY, float(service.is_ready())),
            version,
            *_work_metrics(load),
            *([] if cluster is None else _cluster_metrics(cluster)),
        ]
        return "\n".join(line for metric in metrics for line in metric.lines()) + "\n"


class GenerationTimer:
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
            self._metrics.cached_tokens.add(delta.timings.cached_tokens, self._model)
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


def _work_metrics(load: ServiceLoad) -> list[Metric]:
    frames, size = _counter(table.WIRE_FRAMES), _counter(table.WIRE_BYTES)
    for hop in load.traffic:
        names = (hop.sender, hop.receiver, hop.codec)
        frames.add(hop.frames, *names)
        size.add(hop.size_bytes, *names)
    steps, compute = _counter(table.STAGE_STEPS), _counter(table.STAGE_COMPUTE)
    queue, codec = _counter(table.STAGE_QUEUE), _counter(table.STAGE_CODEC)
    for stage in load.stages:
        place = (stage.chain, stage.node)
        steps.add(stage.steps, *place)
        compute.add(stage.compute_s, *place)
        queue.add(stage.queue_s, *place)
        codec.add(stage.codec_s, *place)
    used, capacity = _gauges(table.KV_USED), _gauges(table.KV_CAPACITY)
    for kv in load.kv:
        used.set(kv.used_tokens, kv.chain)
        capacity.set(kv.capacity_tokens, kv.chain)
    router = _gauges(table.ROUTER)
    for chain, known in load.routers.items():
        for what, value in known.items():
            router.set(value, chain, what)
    return [frames, size, steps, compute, queue, codec, used, capacity, router]


def _cluster_metrics(cluster: ClusterHealth) -> list[Metric]:
    nodes, memory, weights = _gauges(table.NODES), _gauges(table.NODE_MEMORY), _gauges(table.NODE_USED)
    for status, count in cluster.nodes_by_status.items():
        nodes.set(count, status)
    for node in cluster.nodes:
        memory.set(node.memory_bytes, node.id, node.name)
        weights.set(node.used_bytes, node.id, node.name)
    chains, wanted = _gauges(table.CHAINS), _gauges(table.CHAINS_WANTED)
    for (model, status), count in cluster.chains_by_status.items():
        chains.set(count, model, status)
    for model, count in cluster.wanted_chains.items():
        wanted.set(count, model)
    round_trip, is_open = _gauges(table.LINK_RTT), _gauges(table.LINKS_OPEN)
    for link in cluster.links:
        if link.is_open:
            round_trip.set(link.rtt_s, link.a, link.b)
        is_open.set(float(link.is_open), link.a, link.b)
    lost, failovers, replans = _counter(table.NODES_LOST), _counter(table.FAILOVERS), _counter(table.REPLANS)
    lost.add(cluster.incidents.lost_nodes)
    sent = _counter(table.WEIGHTS_SENT)
    for counter, counts in (
        (failovers, cluster.incidents.failovers),
        (replans, cluster.incidents.replans),
        (sent, cluster.weights_sent_bytes),
    ):
        for name, count in counts.items():
            counter.add(count, name)
    return [nodes, memory, weights, lost, chains, wanted, failovers, replans, round_trip, is_open, sent]


def _counter(row: MetricRow) -> Counter:
    return Counter(row.names, row.meaning, row.labels)


def _histogram(row: MetricRow) -> Histogram:
    return Histogram(row.names, row.meaning, row.labels)


def _gauge(row: MetricRow, value: float) -> Gauge:
    return Gauge(row.names, row.meaning, value)


def _gauges(row: MetricRow) -> Gauges:
    (name,) = row.names
    return Gauges(name, row.meaning, row.labels)
