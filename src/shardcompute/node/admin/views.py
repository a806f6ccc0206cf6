"""A cluster as people see it: plain values, ready to be written as JSON and read back.

`ClusterView` is everything at one moment. `changes_between` tells two of them apart and `apply_change` puts the
difference back: `apply_change(old, changes_between(old, new)) == new`. Nodes are ordered by name, other collections by
`KEYS`. Nothing
here changes merely because time passes, so an idle cluster has no news. Secrets are in `NewToken` and `NewKey`
alone, which exist for whoever asked for them and are kept nowhere.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from shardcompute.control.cost.tokens import TokenCost
from shardcompute.control.explain import ModelStatus
from shardcompute.control.state import ChainStatus, NodeRole, NodeStatus
from shardcompute.core.kv_types import DEFAULT_KV_TYPE, KvType
from shardcompute.node.admin.drafters import DrafterView
from shardcompute.node.coordinator.shared.presence import CoordinatorStatus
from shardcompute.node.telemetry.history_store import EventView

ServingStatus = ModelStatus | Literal["unloading"]
FetchStatus = Literal["fetching", "failed"]
RECENT_EVENTS = 50
"""How many a view has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryParts:
    """Memory that layers take, by what it is for: `held_weights_bytes` as kernels hold them (which is not what files
    have), `scratch_bytes` for the buffers of a step, `kv_reserved_bytes` for conversations, filled or not."""

    held_weights_bytes: int = 0
    scratch_bytes: int = 0
    kv_reserved_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        return self.held_weights_bytes + self.scratch_bytes + self.kv_reserved_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldLayers:
    """Layers in a node's memory."""

    chain: str
    model: str
    start: int
    stop: int
    size_bytes: int
    parts: MemoryParts = MemoryParts()
    """What these bytes are for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadingLayers:
    """Layers on their way into a node's memory."""

    chain: str
    start: int
    stop: int
    fraction: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedLayers:
    """Layers whose bytes lie on a node's disk."""

    model: str
    start: int
    stop: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadFailure:
    """A model that a node could not load and why."""

    model: str
    reason: str
    failures: int


@dataclass(frozen=True, slots=True, kw_only=True)
class UnusedDeviceView:
    """A GPU of a node's machine that cannot be used; `fix` is the line that would change that."""

    device: str
    label: str
    memory_bytes: int
    problem: str
    fix: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedView:
    """What a node measured with a model: seconds of an average layer."""

    model: str
    layer_s: float
    """For one row, as in decoding."""
    batch_layer_s: float | None = None
    """For one row each of eight sessions at once."""
    prefill_layer_s: float | None = None
    """For each token of a prompt."""
    layer_count: int = 0
    """Of the model, where it is served; 0: it is not."""
    source: Literal["service", "load"] = "load"
    """Steps in service of late, or a measurement when the model was loaded."""
    measured_at_s: float = 0.0
    """In seconds since 1970."""

    @property
    def prefill_tokens_per_s(self) -> float | None:
        """Of a prompt, through all layers of a model that is served."""
        seconds = (self.prefill_layer_s or 0.0) * self.layer_count
        return 1 / seconds if seconds else None


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeView:
    id: str
    name: str
    status: NodeStatus
    status_reason: str
    role: NodeRole
    device: str
    threads: int
    version: str
    address: str
    memory_bytes: int
    """What it offers for layers and their KV, on its device."""
    used_bytes: int
    """Set aside of it: for the process itself, layers, scratch and KV, whether or not it is filled."""
    is_draining: bool
    is_standby: bool
    reputation: float = 1.0
    """What its audits have earned it, from 0 to 1 (`docs/trust.md`)."""
    audits: int = 0
    audits_failed: int = 0
    standing: str = ""
    """Of a machine that came without a token: on probation, promoted or expelled, and why (`docs/pools.md`)."""
    attested: str = ""
    """Which evidence of its hardware was verified when it joined; "": none (`docs/attestation.md`)."""
    rest_reason: str = ""
    """Why its owner does not let it work now; "": it may. Of status `resting`, it does not."""
    layers: tuple[HeldLayers, ...] = ()
    loading: tuple[LoadingLayers, ...] = ()
    cached: tuple[CachedLayers, ...] = ()
    failures: tuple[LoadFailure, ...] = ()
    api_url: str = ""
    """Where a driver answers clients."""
    resident_bytes: int = 0
    """What its process takes of the machine's memory, everything counted; 0: it does not say."""
    process_bytes: int = 0
    """What its process takes before it holds any layer."""
    parts: MemoryParts = MemoryParts()
    """What it has set aside for layers; with `process_bytes` that is `used_bytes`."""
    kv_used_bytes: int = 0
    """Of the KV reserved, what conversations fill now."""
    memory_reason: str = ""
    """Why it offers less memory than it was given; empty where it does not."""
    backend: str = ""
    """What computes on its device: onnx, torch, mlx."""
    device_label: str = ""
    """What people call the device, such as NVIDIA H200."""
    device_bytes: int = 0
    """The memory that the device has in all; 0: it does not say."""
    device_remark: str = ""
    """What the device said of its memory that cannot be, and what counts instead."""
    unused_devices: tuple[UnusedDeviceView, ...] = ()
    """GPUs of its machine that cannot be used, and why."""
    fallback: str = ""
    """The class of its results with models that only `transformers` runs; empty: it cannot."""
    exactness: str = ""
    """The class of its results: stages of one class compute the same bits."""
    watts: float = 0.0
    """What it draws at work, as its owner says or as it measured; 0: nobody knows."""
    idle_watts: float = 0.0
    price_per_hour: float | None = None
    seeded_bytes: int = 0
    """What others got of its weights since its process began."""
    duty: str = ""
    """In words, what it does for the others besides computing, and why: seeding, verifying; "": nothing."""
    weights_bytes_per_s: float = 0.0
    """How much of any model's weights its device reads, with its backend, for one row; 0: it does not say."""
    overhead_s: float = 0.0
    """What every frame takes there, whatever is in it."""
    probed_at_s: float = 0.0
    """When these two were measured, in seconds since 1970; 0: they are guessed."""
    speeds: tuple[SpeedView, ...] = ()
    """With models, those that are served first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkView:
    a: str
    b: str
    rtt_s: float
    bytes_per_s: float
    is_open: bool
    is_local: bool = False
    """Both ends are on one machine, so that no network is measured."""
    rung: str = "direct"
    """The way on which it goes: local, direct, callback, punched or relayed."""
    remark: str = ""
    """Why a better way failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTimes:
    """What a stage did for the newest step."""

    queue_s: float
    compute_s: float
    codec_s: float
    received_bytes: int
    codec: str = ""
    """The form in which activations went to the next stage; the last sends none."""
    sent_bytes: int = 0
    exchange_s: float = 0.0
    """Of a stage with ranks: how much of `compute_s` they were exchanging, or waiting for each other."""
    slowest: str = ""
    """Of such a stage: the node for which the others have waited most of late; "": nobody knows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankView:
    """One of the machines that compute a stage together, by rank; `weight` is its part of the work."""

    node: str
    weight: int
    memory_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StageView:
    """Layers `[start, stop)` of a chain on one node or, with `ranks`, on several that compute them together, of which
    it leads; `fraction` is how much of them is loaded."""

    node: str
    start: int
    stop: int
    memory_bytes: int
    fraction: float
    parts: MemoryParts = MemoryParts()
    predicted_s: float | None = None
    """Of one token, where the chain can be predicted."""
    timing: StageTimes | None = None
    ranks: tuple[RankView, ...] = ()
    exchange: str = ""
    """How ranks put their results together: gather or reduce."""

    @property
    def is_loaded(self) -> bool:
        return self.fraction >= 1.0

    @property
    def members(self) -> tuple[str, ...]:
        return tuple(rank.node for rank in self.ranks) or (self.node,)

    def named(self, names: Mapping[str, str]) -> str:
        """Its machines, such as "desk + lap"."""
        return " + ".join(names.get(node, node) for node in self.members)


@dataclass(frozen=True, slots=True, kw_only=True)
class DriverView:
    """Who sends a chain its work: the coordinator itself, or a node with the role of a driver."""

    node: str
    kv_tokens: int
    """Its share of the chain's KV memory."""
    round_trip_s: float | None = None
    """On the wire, from it through the chain and back; None where a link of that was not measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MoveView:
    """A move of a serving chain, and what came of it. Times are those of a step of one row or a few; 0: not known."""

    number: int
    reason: str
    """What, why, and what is expected of it."""
    outcome: str
    """What came of it; "" as long as that is open."""
    expected_before_s: float = 0.0
    expected_after_s: float = 0.0
    measured_before_s: float = 0.0
    measured_after_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainView:
    id: str
    model: str
    epoch: int
    status: ChainStatus
    reason: str
    missing_bytes: int
    stages: tuple[StageView, ...]
    standbys: tuple[StageView, ...] = ()
    predicted_tokens_per_s_one_stream: float | None = None
    predicted_tokens_per_s_many: float | None = None
    bottleneck: str = ""
    """In words: of the step whose times the stages show, or else as predicted."""
    cost_told: tuple[str, ...] = ()
    """What a million tokens take of energy and money, in words; nothing where nobody has said what machines draw."""
    drivers: tuple[DriverView, ...] = ()
    """The nearest first."""
    driver_host: str = ""
    """The worker that drives it in the coordinator's place; "": the coordinator does."""
    driver_host_reason: str = ""
    """In words, where its driver sits and why."""
    moves: tuple[MoveView, ...] = ()
    """The last ones that were planned, newest first."""
    last_move: str = ""
    """The last change of its layout in a sentence: why, from what to what, for which gain."""
    is_moving: bool = False
    """It serves as it is while the layers of another layout are loaded."""
    exactness: str = ""
    """In words, what its stages' classes promise."""
    is_mixed: bool = False
    """Its stages are of several exactness classes."""
    drafters: tuple[DrafterView, ...] = ()
    """What guesses tokens for it, and what was meant to and does not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelView:
    name: str
    status: ServingStatus
    weight_form: str
    layer_count: int
    context_length: int
    kv_tokens: int
    memory_bytes: int
    """What one chain of it takes, all machines together; of a model without one, what it would take on one machine."""
    ready_chains: int
    wanted_chains: int
    missing_bytes: int
    reasons: tuple[str, ...] = ()
    file_bytes: int = 0
    """What its weights take as files, on disk and when they travel."""
    parts: MemoryParts = MemoryParts()
    """What `memory_bytes` are for."""
    backend: str = ""
    """What computes it on CPUs whose owners left that open; "": each one's own."""
    backend_reason: str = ""
    runner: str = ""
    """What alone can run it: `transformers`; empty: every backend."""
    kv_type: KvType = DEFAULT_KV_TYPE
    """What CPUs round its keys and values to."""
    sees: bool = False
    """Whether it takes images."""
    is_kept: bool = False
    """Its layouts stay as they are: only machines that fail, or are to be emptied, are replaced."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchView:
    """A model that somebody asked for and that is not served yet; `name` is what it will be called then.

    `chains` 0: it is only to be fetched.
    """

    model: str
    name: str
    form: str
    chains: int
    status: FetchStatus
    doing: str = ""
    done_bytes: int = 0
    total_bytes: int | None = None
    error: str = ""
    error_kind: str = ""
    """The name of a failed one's error in `core.errors`."""
    replaces: bool = False
    """Whether others may give way to it."""
    via_coordinator: bool = False
    """Whether a model of the hub is fetched to the coordinator's disk, and sent to workers from there."""
    kv_type: KvType | None = None
    """What CPUs are to round keys and values to; None: as it is served, else what the cluster was started with."""
    adapters: dict[str, str] = field(default_factory=dict)
    """Folders of the adapters that it is to have beside it, by name."""
    parallel: str = ""
    """How it is to be cut, see `control.placement.parallelism`; "": as was asked for before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadView:
    running: int = 0
    waiting: int = 0
    kv_used_fraction: float = 0.0
    tokens_per_s: float = 0.0
    """Generated by all requests together during the last seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CoordinatorView:
    """One of several coordinators that share a store."""

    node: str
    status: CoordinatorStatus
    """It leads, waits to, or is away."""
    api_url: str = ""
    """Where its API is, which answers while it leads; "": nobody knows."""
    since_s: float = 0.0
    """When that began, in seconds since 1970; 0: nobody knows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterView:
    name: str
    version: str
    url: str
    driver: str
    """The node id under which links of the driver are listed."""
    nodes: tuple[NodeView, ...] = ()
    links: tuple[LinkView, ...] = ()
    models: tuple[ModelView, ...] = ()
    chains: tuple[ChainView, ...] = ()
    fetches: tuple[FetchView, ...] = ()
    load: LoadView = field(default_factory=LoadView)
    events: tuple[EventView, ...] = ()
    """The last that happened, oldest first; the history has those before."""
    warnings: tuple[str, ...] = ()
    """What its operator should see to, in words."""
    coordinators: tuple[CoordinatorView, ...] = ()
    """Where several share a store: who leads, then who waits, then who is away."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterChange:
    """What differs from the view before: new and changed items, and by collection the keys of those `gone`."""

    nodes: tuple[NodeView, ...] = ()
    links: tuple[LinkView, ...] = ()
    models: tuple[ModelView, ...] = ()
    chains: tuple[ChainView, ...] = ()
    fetches: tuple[FetchView, ...] = ()
    gone: dict[str, tuple[str, ...]] = field(default_factory=dict)
    load: LoadView | None = None
    events: tuple[EventView, ...] = ()
    """Those after the last that was told before."""
    warnings: tuple[str, ...] | None = None
    coordinators: tuple[CoordinatorView, ...] | None = None
    """All of them, where anything differs."""

    @property
    def is_empty(self) -> bool:
        return self == ClusterChange()


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedStage:
    """A machine's part of a chain. Several with the same layers compute them together, as ranks."""

    node: str
    name: str
    start: int
    stop: int
    memory_bytes: int
    predicted_s: float
    """Of one token through these layers, whoever computes them."""
    rank: int = 0
    """Of those who compute these layers together; the first leads."""
    ranks: int = 1
    weight: int = 1
    """Its part of the work beside the other ranks'."""
    exchange: str = ""
    """How ranks put their results together: gather or reduce."""
    speed_source: str = ""
    """What that is predicted from: measured in service, when it was loaded, probed without a model, or guessed."""
    parts: MemoryParts = MemoryParts()
    process_bytes: int = 0
    """What the machine's process takes besides."""
    used_bytes: int = 0
    """What other models have there."""
    offered_bytes: int = 0
    """All that the machine offers."""
    device: str = ""
    device_label: str = ""
    device_bytes: int = 0
    """What the device has in all; 0: it does not say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOut:
    node: str
    name: str
    why: str
    duty: str = ""
    """What it would do for the others instead; "": nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedAlternative:
    """The best layout of a kind: one machine, pipeline, tensor, or tensor and pipeline."""

    kind: str
    layout: str
    """In words: desk + lap (0-13) → pi (14-29)."""
    machines: int
    predicted_token_s: float
    """Of one token of one stream."""
    predicted_tokens_per_s_one_stream: float
    predicted_tokens_per_s_many: float
    score: float
    is_chosen: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedChain:
    """Where a chain would run; not `is_possible`, what is missing for it."""

    is_possible: bool
    reasons: tuple[str, ...]
    stages: tuple[PlannedStage, ...] = ()
    left_out: tuple[LeftOut, ...] = ()
    predicted_tokens_per_s_one_stream: float = 0.0
    predicted_tokens_per_s_many: float = 0.0
    predicted_first_token_s: float | None = None
    """After a prompt of a thousand tokens; None where not all of its machines have been measured with prompts."""
    gap: float | None = None
    """By how much its worth may be below the best possible: 0.04 says that it is within 4 % of that."""
    most_tokens_per_s_one_stream: float | None = None
    """No layout of these machines gives more, nor more than `most_tokens_per_s_many` for many streams."""
    most_tokens_per_s_many: float | None = None
    bottleneck: str = ""
    missing_bytes: int = 0
    driver_host: str = ""
    """The worker that would drive it; "": the coordinator."""
    driver_host_reason: str = ""
    exactness: str = ""
    """In words, what its stages' classes promise."""
    alternatives: tuple[PlannedAlternative, ...] = ()
    """Of the first chain: what each kind of layout is expected to do."""
    reason_of_choice: str = ""
    """Why the chosen one was."""
    cost: TokenCost | None = None
    """What a million tokens would take of energy and money, as far as that is known."""
    cost_told: tuple[str, ...] = ()
    """The same in words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIfView:
    """What machines that are not there would bring, beside what there is."""

    told: str
    """In one sentence."""
    assumed: str
    """What else was taken to be so of them."""
    is_used: bool
    """Whether the model would run on any of them."""
    before: PlannedChain
    after: PlannedChain
    kv_tokens_before: int
    """For how many tokens of all conversations there is memory."""
    kv_tokens_after: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanView:
    """What loading a model would lead to, in `text` and as values. Nothing has been done."""

    model: str
    form: str
    layer_count: int
    memory_bytes: int
    """What one chain of it takes, all machines together."""
    text: str
    chains: tuple[PlannedChain, ...]
    replaces: tuple[str, ...] = ()
    """Models that would have to give way to it."""
    file_bytes: int = 0
    """What its weights take as files."""
    parts: MemoryParts = MemoryParts()
    """What `memory_bytes` are for."""
    what_if: WhatIfView | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RevokedNode:
    """A node that was thrown out, and the ids of the join tokens that were revoked with it because it knew them."""

    node: NodeView
    revoked_tokens: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenView:
    id: str
    state: str
    roles: tuple[str, ...]
    created_at_s: float
    expires_at_s: float
    max_uses: int | None
    used_by: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class NewPairing:
    """A pairing code, told once: it lets in one machine that is told it within `life_s`."""

    code: str = field(repr=False)
    life_s: float
    join_port: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftHeadView:
    """A draft head that was taken: where it is kept, how many chains draft with it, and why others do not yet."""

    path: str
    in_use: int
    problems: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class NewToken:
    """A join token, told once; `link` opens the page with the line that joins, and `qr` is that link as an SVG. The
    token is in its fragment, which browsers send to nobody. Both are empty where no origin was given."""

    id: str
    token: str = field(repr=False)
    expires_at_s: float
    max_uses: int | None
    link: str = field(default="", repr=False)
    qr: str = field(default="", repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyView:
    """An API key; what bounds it is None where nothing does."""

    id: str
    label: str
    created_at_s: float
    is_revoked: bool
    role: str = "use"
    models: tuple[str, ...] | None = None
    requests_per_minute: int | None = None
    tokens_per_day: int | None = None
    expires_at_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NewKey:
    """An API key, told once."""

    id: str
    key: str = field(repr=False)
    label: str
    role: str = "use"
    expires_at_s: float | None = None


KEYS: Mapping[str, Callable[[Any], str]] = {
    "nodes": lambda node: str(node.id),
    "links": lambda link: f"{link.a} {link.b}",
    "models": lambda model: str(model.name),
    "chains": lambda chain: str(chain.id),
    "fetches": lambda fetch: str(fetch.model),
}
"""By what the items of each collection are known."""


def by_name(node: NodeView) -> tuple[object, ...]:
    """Order of nodes: by name, numbers in it by their value (worker-2 before worker-10), then by id."""
    parts = re.split(r"(\d+)", node.name)
    # Every second part is a number.
    numbered = ((part, 0) if index % 2 == 0 else ("", int(part)) for index, part in enumerate(parts))
    return (*numbered, (node.id, 0))


def _order(name: str) -> Callable[[Any], Any]:
    return by_name if name == "nodes" else KEYS[name]


def changes_between(old: ClusterView, new: ClusterView) -> ClusterChange:
    changed: dict[str, Any] = {}
    gone: dict[str, tuple[str, ...]] = {}
    for name, key in KEYS.items():
        before = {key(item): item for item in getattr(old, name)}
        after = {key(item): item for item in getattr(new, name)}
        changed[name] = tuple(item for id, item in after.items() if before.get(id) != item)
        if before.keys() - after.keys():
            gone[name] = tuple(id for id in before if id not in after)
    last = old.events[-1].number if old.events else 0
    return ClusterChange(
        **changed,
        gone=gone,
        load=None if old.load == new.load else new.load,
        events=tuple(event for event in new.events if event.number > last),
        warnings=None if old.warnings == new.warnings else new.warnings,
        coordinators=None if old.coordinators == new.coordinators else new.coordinators,
    )


def apply_change(view: ClusterView, change: ClusterChange) -> ClusterView:
    fields: dict[str, Any] = {}
    for name, key in KEYS.items():
        items = {key(item): item for item in (*getattr(view, name), *getattr(change, name))}
        for id in change.gone.get(name, ()):
            items.pop(id, None)
        fields[name] = tuple(sorted(items.values(), key=_order(name)))
    events = (*view.events, *change.events)[-RECENT_EVENTS:]
    for name in ("warnings", "coordinators"):
        told = getattr(change, name)
        fields[name] = getattr(view, name) if told is None else told
    return replace(view, **fields, load=change.load or view.load, events=events)
