"""Every metric of `/metrics`: its names, kind, labels and meaning. The page about them is made from this table.

Where vLLM has a metric of the same meaning, ours is written out under its name too, so that dashboards work.
`docs/reference/metrics.md` is made by `scripts/metrics_reference.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

MetricKind = Literal["counter", "gauge", "histogram"]
_MODEL = ("model_name",)
_HOP = ("sender", "receiver", "codec")
_STAGE = ("chain", "node")


@dataclass(frozen=True, slots=True)
class MetricRow:
    """A metric as it is documented and written. Every name in `names` has the same samples."""

    names: tuple[str, ...]
    kind: MetricKind
    labels: tuple[str, ...]
    meaning: str


@dataclass(frozen=True, slots=True)
class MetricGroup:
    """Metrics of one source; `where` says which processes have them."""

    title: str
    where: str
    rows: tuple[MetricRow, ...]


def _both(name: str) -> tuple[str, str]:
    return f"shardcompute_{name}", f"vllm:{name}"


HTTP_REQUESTS = MetricRow(
    ("shardcompute_http_requests_total",), "counter", ("path", "method", "status"), "HTTP requests answered."
)
PROMPT_TOKENS = MetricRow(
    _both("prompt_tokens_total"), "counter", _MODEL, "Prompt tokens of generations begun."
)
CACHED_TOKENS = MetricRow(
    ("shardcompute_cached_prompt_tokens_total", "vllm:prefix_cache_hits_total"),
    "counter",
    _MODEL,
    "Prompt tokens that were not computed, because the chain still knew them.",
)
GENERATED_TOKENS = MetricRow(_both("generation_tokens_total"), "counter", _MODEL, "Tokens generated.")
FINISHED = MetricRow(
    ("shardcompute_generations_total",),
    "counter",
    ("model_name", "reason"),
    "Generations ended, by reason: stop, length, cancelled or error.",
)
SUCCEEDED = MetricRow(
    ("vllm:request_success_total",),
    "counter",
    ("model_name", "finished_reason"),
    "Generations that ran to their end.",
)
TRAVERSALS = MetricRow(
    ("shardcompute_traversals_total",),
    "counter",
    _MODEL,
    "Frames that generations took part in after their prompt.",
)
DRAFTED_TOKENS = MetricRow(
    ("shardcompute_drafted_tokens_total", "vllm:spec_decode_num_draft_tokens_total"),
    "counter",
    _MODEL,
    "Tokens that were drafted and verified.",
)
ACCEPTED_TOKENS = MetricRow(
    ("shardcompute_accepted_tokens_total", "vllm:spec_decode_num_accepted_tokens_total"),
    "counter",
    _MODEL,
    "Drafted tokens that were right.",
)
FIRST_TOKEN = MetricRow(
    _both("time_to_first_token_seconds"), "histogram", _MODEL, "From request to first token."
)
BETWEEN_TOKENS = MetricRow(
    _both("inter_token_latency_seconds"), "histogram", _MODEL, "Between one token and the next."
)
WHOLE = MetricRow(_both("e2e_request_latency_seconds"), "histogram", _MODEL, "From request to last token.")
QUEUE = MetricRow(_both("request_queue_time_seconds"), "histogram", _MODEL, "Waiting before the prefill.")
PREFILL = MetricRow(_both("request_prefill_time_seconds"), "histogram", _MODEL, "Computing the prompt.")
DECODE = MetricRow(
    _both("request_decode_time_seconds"), "histogram", _MODEL, "From the first token to the last."
)

RUNNING = MetricRow(_both("num_requests_running"), "gauge", (), "Generations being computed.")
WAITING = MetricRow(_both("num_requests_waiting"), "gauge", (), "Generations waiting.")
KV_USAGE = MetricRow(_both("kv_cache_usage_perc"), "gauge", (), "KV memory in use; 1 is all.")
READY = MetricRow(("shardcompute_ready",), "gauge", (), "1 once a model is loaded.")
VERSION = MetricRow(
    ("shardcompute_build_info",), "gauge", ("version",), "Always 1; the label is the release that runs."
)

KV_USED = MetricRow(
    ("shardcompute_kv_used_tokens",), "gauge", ("chain",), "Tokens of sessions under way that a chain holds."
)
KV_CAPACITY = MetricRow(
    ("shardcompute_kv_capacity_tokens",),
    "gauge",
    ("chain",),
    "Tokens that this driver may keep in a chain's memory.",
)
STAGE_STEPS = MetricRow(
    ("shardcompute_stage_steps_total",), "counter", _STAGE, "Steps that a stage computed."
)
STAGE_COMPUTE = MetricRow(
    ("shardcompute_stage_compute_seconds_total",), "counter", _STAGE, "Time a stage spent computing."
)
STAGE_QUEUE = MetricRow(
    ("shardcompute_stage_queue_seconds_total",), "counter", _STAGE, "Time frames waited at a stage."
)
STAGE_CODEC = MetricRow(
    ("shardcompute_stage_codec_seconds_total",),
    "counter",
    _STAGE,
    "Time a stage spent packing and unpacking activations.",
)
STAGE_EXCHANGE = MetricRow(
    ("shardcompute_stage_exchange_seconds_total",),
    "counter",
    _STAGE,
    "Of its computing time, what the tensor ranks of a stage were exchanging or waiting for each other.",
)
STAGE_SLOWEST = MetricRow(
    ("shardcompute_stage_slowest_rank",),
    "gauge",
    (*_STAGE, "rank"),
    "1 for the node for which the other tensor ranks of a stage have waited most of late.",
)
WIRE_FRAMES = MetricRow(
    ("shardcompute_wire_frames_total",), "counter", _HOP, "Frames of activations between nodes."
)
WIRE_BYTES = MetricRow(
    ("shardcompute_wire_bytes_total",), "counter", _HOP, "Bytes of activations between nodes."
)
ROUTER = MetricRow(
    ("shardcompute_router",),
    "gauge",
    ("chain", "what"),
    "What the router of drafts has measured: times of the ring, acceptance and share of rounds by drafter.",
)

NODES = MetricRow(("shardcompute_nodes",), "gauge", ("status",), "Machines of the cluster, by status.")
NODE_MEMORY = MetricRow(
    ("shardcompute_node_memory_bytes",),
    "gauge",
    ("node", "name"),
    "All that a machine may take (`--max-memory`).",
)
NODE_USED = MetricRow(
    ("shardcompute_node_used_bytes",),
    "gauge",
    ("node", "name"),
    "Memory that a machine has set aside: its process, held weights, scratch and KV reserved.",
)
NODE_PARTS = MetricRow(
    ("shardcompute_node_memory_part_bytes",),
    "gauge",
    ("node", "name", "part"),
    "A machine's memory by what it is for: process, held_weights, scratch and kv_reserved are set aside, kv_used is "
    "what conversations fill of the KV reserved, resident what its process takes now.",
)
NODE_DEVICE = MetricRow(
    ("shardcompute_node_device_memory_bytes",),
    "gauge",
    ("node", "name", "device", "backend", "label"),
    "Memory that the device has on which a machine computes.",
)
NODE_UNUSED_DEVICES = MetricRow(
    ("shardcompute_node_unused_devices",),
    "gauge",
    ("node", "name"),
    "GPUs of a machine that cannot be used.",
)
NODE_WEIGHTS_SPEED = MetricRow(
    ("shardcompute_node_weights_bytes_per_second",),
    "gauge",
    ("node", "name", "source"),
    "How much of any model's weights a machine reads for one token, with its device and backend; `source` is `probe` "
    "where that was measured, `guess` where it could not be.",
)
NODE_LAYER_SECONDS = MetricRow(
    ("shardcompute_node_layer_seconds",),
    "gauge",
    ("node", "name", "model_name", "kind", "source"),
    "Seconds of an average layer of a model on a machine: for one row (`decode`), for one row each of eight requests "
    "(`batch`), for each token of a prompt (`prefill`); `source` is `load` or, corrected by steps of late, `service`.",
)
NODE_MEASURED_AT = MetricRow(
    ("shardcompute_node_measured_timestamp_seconds",),
    "gauge",
    ("node", "name", "model_name"),
    "When a machine measured a model, or told that its steps take longer or less long, in seconds since 1970.",
)
NODES_LOST = MetricRow(
    ("shardcompute_nodes_lost_total",), "counter", (), "Times that a machine was given up as lost."
)
CHAINS = MetricRow(("shardcompute_chains",), "gauge", ("model_name", "status"), "Chains, by status.")
CHAINS_WANTED = MetricRow(
    ("shardcompute_chains_wanted",), "gauge", _MODEL, "Chains that a model should have."
)
FAILOVERS = MetricRow(
    ("shardcompute_chain_failovers_total",),
    "counter",
    _MODEL,
    "Times that a chain in use lost a stage or link and had to be repaired.",
)
REPLANS = MetricRow(
    ("shardcompute_chain_replans_total",),
    "counter",
    _MODEL,
    "Times that a chain got a new shape, for a repair or for a better placement.",
)
LINK_RTT = MetricRow(
    ("shardcompute_link_round_trip_seconds",),
    "gauge",
    ("a", "b"),
    "Round trip between two nodes, as measured.",
)
LINKS_OPEN = MetricRow(
    ("shardcompute_link_open",), "gauge", ("a", "b"), "1 where two nodes can reach each other, otherwise 0."
)
LINK_RUNG = MetricRow(
    ("shardcompute_link_rung",),
    "gauge",
    ("a", "b", "rung"),
    "1 for the way on which two nodes reach each other: local, direct, callback, punched or relayed.",
)
DRAFTERS = MetricRow(
    ("shardcompute_drafters",),
    "gauge",
    ("chain", "drafter", "state"),
    "1 for what guesses tokens for a chain: at work, loading, or missing though its model has it.",
)
WEIGHTS_SENT = MetricRow(
    ("shardcompute_weights_sent_bytes_total",),
    "counter",
    ("receiver",),
    "Weights that this machine sent to a node. What nodes fetch from each other is not in it.",
)
UNRECORDED = MetricRow(
    ("shardcompute_journal_unrecorded",),
    "gauge",
    (),
    "Changes of the cluster that could not be written to the coordinator's disk yet.",
)
CANARIES = MetricRow(
    ("shardcompute_canaries_total",),
    "counter",
    ("node", "name"),
    "Canaries whose answers a machine had a part in, and which were compared with known ones (`--canaries`).",
)
CANARIES_DIFFERED = MetricRow(
    ("shardcompute_canaries_differed_total",),
    "counter",
    ("node", "name"),
    "Of these, the ones that were not answered as known.",
)
NODE_DRIFT = MetricRow(
    ("shardcompute_node_drift",),
    "gauge",
    ("node", "name"),
    "Share of canaries' tokens behind the first that differed, where a machine had a part; with a half-life of a week.",
)
CHAINS_DRIFTING = MetricRow(
    ("shardcompute_chains_drifting",),
    "gauge",
    (),
    "Chains of which at least two of the last four canaries were not answered as known.",
)

GROUPS: tuple[MetricGroup, ...] = (
    MetricGroup(
        "Requests and tokens",
        "Every process with an HTTP API: `up`, `up --local`, `coordinator` and `driver`, each for its own requests.",
        (
            HTTP_REQUESTS,
            PROMPT_TOKENS,
            CACHED_TOKENS,
            GENERATED_TOKENS,
            FINISHED,
            SUCCEEDED,
            FIRST_TOKEN,
            BETWEEN_TOKENS,
            WHOLE,
            QUEUE,
            PREFILL,
            DECODE,
            RUNNING,
            WAITING,
            KV_USAGE,
            READY,
            VERSION,
        ),
    ),
    MetricGroup("Speculation", "The same processes.", (TRAVERSALS, DRAFTED_TOKENS, ACCEPTED_TOKENS, ROUTER)),
    MetricGroup(
        "Chains at work",
        "Processes that drive chains of workers: `up`, `coordinator` and `driver`, each for the frames that it sent.",
        (
            KV_USED,
            KV_CAPACITY,
            STAGE_STEPS,
            STAGE_COMPUTE,
            STAGE_QUEUE,
            STAGE_CODEC,
            STAGE_EXCHANGE,
            STAGE_SLOWEST,
            WIRE_FRAMES,
            WIRE_BYTES,
        ),
    ),
    MetricGroup(
        "The cluster",
        "The first machine alone: `up` and `coordinator`.",
        (
            NODES,
            NODE_MEMORY,
            NODE_USED,
            NODE_PARTS,
            NODE_WEIGHTS_SPEED,
            NODE_LAYER_SECONDS,
            NODE_MEASURED_AT,
            NODE_DEVICE,
            NODE_UNUSED_DEVICES,
            NODES_LOST,
            CHAINS,
            CHAINS_WANTED,
            FAILOVERS,
            REPLANS,
            LINK_RTT,
            LINKS_OPEN,
            LINK_RUNG,
            DRAFTERS,
            WEIGHTS_SENT,
            UNRECORDED,
            CANARIES,
            CANARIES_DIFFERED,
            NODE_DRIFT,
            CHAINS_DRIFTING,
        ),
    ),
)


def all_rows() -> tuple[MetricRow, ...]:
    return tuple(row for group in GROUPS for row in group.rows)
