"""What the coordinator believes about the cluster: one frozen value, changed only by `apply(state, event)`.

Tokens and sessions never enter it. Mappings inside are never mutated; a change copies them. Times are seconds
of one clock that comes in with events. All of it can be written as JSON or msgpack by msgspec.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import combinations, pairwise
from typing import Literal

from msgspec import Struct

from shardcompute.backends.footprint import ADAPTING_HOLDERS
from shardcompute.control.placement.parallelism import PIPELINE, Parallelism
from shardcompute.control.policy import HealthPolicy, PlacementPolicy
from shardcompute.control.watch.estimates import DecayedEstimate
from shardcompute.core.kv_types import DEFAULT_KV_TYPE, KvType
from shardcompute.models.spec import ModelSpec
from shardcompute.models.tensor_share import Exchange
from shardcompute.trust.pools import PoolMember, PoolPolicy
from shardcompute.trust.reputation import NEW
from shardcompute.weights.held import HeldSizes

NodeRole = Literal["worker", "driver"]
NodeStatus = Literal["joining", "ready", "suspected", "lost", "draining", "resting", "quarantined", "gone"]
ChainStatus = Literal["planned", "loading", "ready", "moving", "recovering", "broken", "retired"]
"""`moving`: changed over to another shape by our own decision; `recovering`: by need."""

_MOST_DOUBLINGS = 32
COORDINATOR = "coordinator"
"""Who reports a control link that broke, see `LinkBroken`."""


class Holding(Struct, frozen=True):
    """Layers whose bytes a node can serve or load without fetching (with embedding and head at the ends)."""

    model: str
    start: int
    stop: int


class HeldDraftHead(Struct, frozen=True):
    """How a chain's last stage stands with the draft head of its model: it takes so many bytes and drafts or, where
    `problem` says why, it does not. Neither: it is being loaded."""

    chain: str
    size_bytes: int = 0
    problem: str = ""


class RankPlace(Struct, frozen=True):
    """A machine's part in a stage that several compute together: which rank it is, by which weights the work is shared
    out among all ranks, and how they exchange."""

    rank: int
    weights: tuple[int, ...]
    exchange: Exchange = "gather"


ShardPlace = tuple[str, int, int, RankPlace | None]
"""(chain, first layer, layer behind the last, which share of them; None: all of them)"""


class Shard(Struct, frozen=True):
    """What a worker holds in memory for one chain: layers, or a tensor rank's share of them."""

    chain: str
    model: str
    start: int
    stop: int
    size_bytes: int
    tensor: RankPlace | None = None

    @property
    def place(self) -> ShardPlace:
        return self.chain, self.start, self.stop, self.tensor


class Loading(Struct, frozen=True):
    """How far a load has come; for people to see."""

    chain: str
    start: int
    stop: int
    fraction: float
    tensor: RankPlace | None = None

    @property
    def place(self) -> ShardPlace:
        return self.chain, self.start, self.stop, self.tensor


class Refusal(Struct, frozen=True):
    """A node failed to load a model and is left alone with it for a while."""

    model: str
    reason: str
    failures: int
    until_s: float


class LayerShape(Struct, frozen=True):
    """What a layer's time depends on besides the machine: width, bytes read for one row, weight form."""

    hidden: int
    work_bytes: int
    form: str

    def is_like(self, other: LayerShape) -> bool:
        """Sizes of forms that are still to be made are estimates."""
        is_close = abs(self.work_bytes - other.work_bytes) <= 0.1 * max(self.work_bytes, other.work_bytes)
        return is_close and (self.hidden, self.form) == (other.hidden, other.form)


class LayerTime(Struct, frozen=True):
    """Measured seconds for one average layer of a model, one row: the median of the newest samples or, where the model
    is served, what its steps take of late."""

    model: str
    seconds: float
    samples: tuple[float, ...] = ()
    shape: LayerShape | None = None
    batch_s: float | None = None
    """For one row each of eight sessions at once."""
    prefill_s: float | None = None
    """For each row of a prompt."""
    loaded_s: float = 0.0
    """Of `seconds`, as it was measured when the model was loaded."""
    is_served: bool = False
    """It is what steps in service take."""
    measured_at_s: float = 0.0
    """When, in seconds since 1970 by the node's clock; 0: it does not say."""


class GroupTime(Struct, frozen=True):
    """What an average layer took in service where these machines computed it together, exchanges and all."""

    model: str
    members: tuple[str, ...]
    """By rank."""
    exchange: Exchange
    seconds: float
    shape: LayerShape | None = None


class StageTime(Struct, frozen=True):
    """What steps in service take of late on a node, for the layers that it holds for a chain; each estimate is of an
    average layer, for one row. What placement believes follows once they have drifted (`drift`)."""

    chain: str
    model: str
    start: int
    stop: int
    loaded_s: float
    """As it was measured when the layers were loaded."""
    decode: DecayedEstimate | None = None
    prefill: DecayedEstimate | None = None
    """For each row of a prompt."""
    shape: LayerShape | None = None
    batch_factor: float = 0.0
    """How much longer than one row one row each of eight sessions takes; 0: nobody knows."""
    is_group: bool = False
    """It is what a whole group of ranks takes, of which the node is one."""
    measured_at_s: float = 0.0


class UnusedDevice(Struct, frozen=True):
    """A GPU of a node's machine that cannot be used, and the line that would change that."""

    device: str
    label: str
    problem: str
    fix: str
    memory_bytes: int = 0
    """What it has in all; 0: it does not say."""


class AlternativeBackend(Struct, frozen=True):
    """What else may compute on a node's device, where a model asks for it, and what its layers cost to hold then."""

    backend: str
    holding: str
    exactness: str


class NodeDescription(Struct, frozen=True, kw_only=True):
    """What a node says of itself when it joins."""

    name: str
    role: NodeRole
    address: str
    device: str
    memory_bytes: int
    """What it offers, on its device."""
    threads: int
    version: str
    incarnation: int
    memory_reason: str = ""
    """Why it offers less memory than it was given; empty where it does not."""
    seconds_per_byte: float | None = None
    overhead_s: float = 0.0
    prefill_seconds_per_byte: float | None = None
    """For each row of a prompt."""
    probed_at_s: float = 0.0
    """When these three were measured, in seconds since 1970; 0: they are guessed."""
    remembered: tuple[LayerTime, ...] = ()
    """What it measured before with models of these shapes."""
    cached: tuple[Holding, ...] = ()
    shards: tuple[Shard, ...] = ()
    is_standby: bool = False
    codecs: tuple[str, ...] = ("exact",)
    """In which forms it can read activations."""
    session_namespace: int = 0
    """The namespace in which its driver numbers sessions, another one in each of its processes. A worker that has
    one can host a driver; 0: it cannot."""
    api_url: str = ""
    """Of a driver: where it answers clients."""
    backend: str = "onnx"
    """What computes on its device."""
    device_label: str = ""
    """What people call the device, such as NVIDIA H200."""
    device_bytes: int = 0
    """The memory that its device has in all, of which it offers `memory_bytes`; 0: it does not say."""
    device_remark: str = ""
    """What the device said of its memory that cannot be, and what counts instead."""
    unused_devices: tuple[UnusedDevice, ...] = ()
    """GPUs of its machine that cannot be used; told by one node of a machine."""
    exactness: str = ""
    """The class of its results (see `backends.exactness`); "": it does not say."""
    fallback: str = ""
    """The class of its results with models of other families, which `transformers` runs; "": it has none."""
    holding: str = ""
    """What holds its layers (see `backends.footprint`), by which their memory is counted."""
    alternatives: tuple[AlternativeBackend, ...] = ()
    process_bytes: int = 0
    """Of `memory_bytes`, what its process takes before it holds any layer."""
    rest_reason: str = ""
    """Why its owner does not let it work now, such as a battery; "": it may. It stays in the cluster."""
    is_at_rest: bool = False
    """It works no more for that reason; before, it does what others have not taken over yet."""
    stated_watts: float = 0.0
    """What its owner says that it draws at work; 0: they do not say."""
    seed_bytes: int = 0
    """What its disk has room for of weights that it keeps for others; 0: it keeps none."""
    price_per_hour: float | None = None
    """What an hour of it costs, electricity and all; None: what it draws is all that it costs."""


class Node(NodeDescription, frozen=True, kw_only=True):
    id: str
    status: NodeStatus
    last_seen_s: float
    lease_until_s: float
    is_draining: bool = False
    kv_used_bytes: int = 0
    """What conversations fill of the KV memory that it has reserved."""
    resident_bytes: int = 0
    """What its process takes of the machine's memory, everything counted; 0: it does not say."""
    draft_heads: tuple[HeldDraftHead, ...] = ()
    """Of the chains whose last layers it has."""
    measured_watts: float = 0.0
    """What it draws while it computes, as its counters say; 0: nobody knows."""
    idle_watts: float = 0.0
    seeded_bytes: int = 0
    """What others got of its weights since its process began."""
    seed: Holding | None = None
    """What it is to keep on its disk for others, because no chain has a use for it."""
    seed_problem: str = ""
    """Why it could not fetch that, and when it may be asked again."""
    seed_after_s: float = 0.0
    accusers: tuple[str, ...] = ()
    status_reason: str = ""
    layer_times: tuple[LayerTime, ...] = ()
    group_times: tuple[GroupTime, ...] = ()
    """Of groups that it leads, or has led."""
    stage_times: tuple[StageTime, ...] = ()
    """Of the layers with which it serves now."""
    probes: tuple[float, ...] = ()
    """The newest samples of `seconds_per_byte`, which is their median."""
    loading: tuple[Loading, ...] = ()
    refusals: tuple[Refusal, ...] = ()
    reputation: float = NEW
    """What its audits have earned it, from 0 to 1."""
    audits: int = 0
    audits_failed: int = 0
    """Of these, so many were held against it."""
    attested: str = ""
    """Which evidence of its hardware was verified when it joined; "": none."""
    quarantine: str = ""
    """Why it computes nothing for others until an operator pardons it; "": it may."""
    is_on_probation: bool = False
    """It came without a token and has no record yet (`trust.pools`)."""

    @property
    def room_bytes(self) -> int:
        """What it offers to layers."""
        return max(0, self.memory_bytes - self.process_bytes)

    @property
    def watts(self) -> float:
        """What it draws at work, as its owner says, else as it measured; 0: nobody knows."""
        return self.stated_watts or self.measured_watts

    @property
    def is_live(self) -> bool:
        return self.status not in ("lost", "gone")

    @property
    def is_answering(self) -> bool:
        return self.status in ("ready", "draining", "resting", "quarantined")

    @property
    def can_work(self) -> bool:
        return self.role == "worker"

    @property
    def can_drive(self) -> bool:
        return self.role == "driver"

    @property
    def can_host(self) -> bool:
        """Whether it can run a chain's driver beside its layers."""
        return self.can_work and self.session_namespace > 0 and not self.is_on_probation

    def alternative(self, backend: str) -> AlternativeBackend | None:
        """What computes a model here that asks for this backend; None: the node's own does."""
        return next((each for each in self.alternatives if each.backend == backend), None)

    def holding_of(self, model: Model) -> str:
        """What holds layers of this model here."""
        other = self.alternative(model.backend)
        return self.holding if other is None else other.holding

    def exactness_of(self, model: Model) -> str:
        """The class of results with this model, keys and values aside."""
        if model.runner:
            return self.fallback
        other = self.alternative(model.backend)
        return self.exactness if other is None else other.exactness

    def runs_as_chosen(self, model: Model) -> bool:
        """Whether its CPU computes a model by the backend that was chosen for it. GPUs are of classes of their own."""
        if not model.backend or self.device != "cpu" or self.backend == model.backend:
            return True
        return self.alternative(model.backend) is not None

    def is_refusing(self, model: str, now_s: float) -> bool:
        return any(refusal.model == model and now_s < refusal.until_s for refusal in self.refusals)

    def can_run(self, model: Model) -> bool:
        """Whether it has what computes the model."""
        if model.adapters and self.holding_of(model) not in ADAPTING_HOLDERS:
            return False
        return not model.runner or bool(self.fallback)

    def has_shard(self, chain: str, start: int, stop: int, tensor: RankPlace | None = None) -> bool:
        return any(held.place == (chain, start, stop, tensor) for held in self.shards)


class MeasuredLink(Struct, frozen=True):
    """What was measured between two nodes, `a < b`. A link that is not open cannot carry a chain."""

    a: str
    b: str
    rtt_s: float
    bytes_per_s: float
    is_open: bool = True
    closed_by: str = ""
    """Of a closed link: the end that could not reach the other, and is to try again."""
    probe_at_s: float = 0.0
    """Of a closed link: when it is to be tried next."""
    samples: tuple[tuple[float, float], ...] = ()
    """The newest of `rtt_s` and `bytes_per_s`, which are their medians."""
    rung: str = "direct"
    """The way on which it was measured last (see `LinkMeasured`), and why a better one failed."""
    remark: str = ""


class LinkBreaks(Struct, frozen=True):
    """How often the link between two nodes, `a < b`, interrupted a chain without having carried one in between."""

    a: str
    b: str
    count: int
    reporter: str


class TensorTerms(Struct, frozen=True):
    """By what tensor ranks cut a model: its widths and heads (`spec` without what does not matter for that), which of
    its layers are sparse, and the columns of a quantised block."""

    spec: ModelSpec
    sparse: tuple[bool, ...]
    block: int = 1


class Model(Struct, frozen=True, kw_only=True):
    """The sizes of a model in the form in which it will be served."""

    name: str
    layer_bytes: tuple[int, ...]
    embedding_bytes: int
    head_bytes: int
    kv_bytes_per_token_and_layer: int
    kv_tokens: int
    """For how many tokens a chain keeps KV memory."""
    kv_type: KvType = DEFAULT_KV_TYPE
    """What every CPU stage of it rounds keys and values to."""
    backend: str = ""
    """What computes it on CPUs whose owners left that open, the same on all of them; "": each one's own."""
    backend_reason: str = ""
    hidden: int
    context_length: int
    weight_form: str
    is_head_tied: bool = False
    """Embedding and head are one table, held once where one stage has both."""
    work_bytes: tuple[int, ...] = ()
    """Weights read for one row by each layer, where that differs from all of them (experts)."""
    shard_overhead_bytes: int = 0
    runner: str = ""
    """What alone can run it: `transformers`; "": every backend of ours."""
    is_whole: bool = False
    """Its layers cannot be on several machines."""
    adapters: str = ""
    """What tells the adapters beside it from others, which not every backend adds; "": there are none."""
    held: tuple[HeldSizes, ...] = ()
    """What it takes in memory, by who holds it; the sizes above are those of the files that travel."""
    tensor: TensorTerms | None = None
    """None: tensor ranks cannot cut it."""
    sees: bool = False
    """It takes pictures, which tensor ranks do not."""

    @property
    def layer_count(self) -> int:
        return len(self.layer_bytes)


class RequestedModel(Struct, frozen=True):
    model: Model
    chain_count: int
    is_wanted: bool = True
    has_draft_model: bool = False
    """A small model drafts for it in the coordinator's process, and nowhere else."""
    parallel: Parallelism = PIPELINE
    """How a person asked for it to be cut."""
    is_kept: bool = False
    """A person wants its layouts to stay as they are: only what fails, or is to be emptied, is replaced."""
    extra_chains: int = 0
    """Beyond `chain_count`, because so many ask (see `watch.copies`)."""
    leaving_chain: str = ""
    """The one that takes nobody new, because fewer do."""
    copies_reason: str = ""
    copies_s: float = 0.0
    """When that last changed."""

    @property
    def wanted_chains(self) -> int:
        return self.chain_count + self.extra_chains if self.is_wanted else 0


class Demand(Struct, frozen=True):
    """How many answers of a model run or wait, as the coordinator's own driver last saw it."""

    sessions: dict[str, int] = {}
    """By chain."""
    seen_s: float = 0.0
    crowded_s: float = 0.0
    """Since when there are more than the copies serve well; 0: there are not."""
    calm_s: float = 0.0
    """Since when one copy fewer would do, by far; 0: it would not."""

    @property
    def total(self) -> int:
        return sum(self.sessions.values())

    def is_crowded_for(self, seconds: float, now_s: float) -> bool:
        return self.crowded_s > 0 and now_s - self.crowded_s >= seconds

    def is_calm_for(self, seconds: float, now_s: float) -> bool:
        return self.calm_s > 0 and now_s - self.calm_s >= seconds


class RankSeat(Struct, frozen=True):
    """A machine of a stage that several compute together, and its part of the work beside the others'."""

    node: str
    weight: int


class Assignment(Struct, frozen=True):
    """Layers `[start, stop)` on one node or, where there are `ranks`, on several that compute each layer together: by
    rank, of which the first is `node`, which leads."""

    node: str
    start: int
    stop: int
    ranks: tuple[RankSeat, ...] = ()
    exchange: Exchange = "gather"

    @property
    def members(self) -> tuple[str, ...]:
        """All its nodes, by rank."""
        return tuple(seat.node for seat in self.ranks) or (self.node,)

    def place_of(self, node: str) -> RankPlace | None:
        """Which share of the layers is this node's; None: all of them, where it is the only one."""
        for rank, seat in enumerate(self.ranks):
            if seat.node == node:
                return RankPlace(rank, tuple(each.weight for each in self.ranks), self.exchange)
        return None

    @property
    def is_sound(self) -> bool:
        """Whether the ranks are several, each with some of the work, and led by `node`."""
        if not self.ranks:
            return True
        is_led = len(self.ranks) > 1 and self.ranks[0].node == self.node
        return is_led and all(seat.weight > 0 for seat in self.ranks)


class MoveTarget(Struct, frozen=True):
    """A layout to which a chain is moving: once all shards of it are loaded, it is used."""

    stages: tuple[Assignment, ...]
    reason: str
    is_urgent: bool = False
    """Somebody asked for it, or for what makes it necessary: no gain is expected of it."""
    has_kv: bool = False
    """Its machines were sent what sessions hold of the layers that they take over, as far as that can be."""


class Unrest(Struct, frozen=True):
    """How often something has moved for gain since the machines or models last changed, and when last for any reason.

    Each such move doubles what the next one has to promise and how long it has to wait, so that noise can move nothing
    more than a few times, whatever is measured.
    """

    moves: int = 0
    since_s: float = 0.0
    left: tuple[tuple[str, ...], ...] = ()
    """The machines, sorted, of layouts that were left for better ones meanwhile, or tried in vain: back to the same
    machines would be a move that undoes another."""

    def factor(self, policy: PlacementPolicy, now_s: float) -> float:
        """By how much more than a first move the next one has to gain, and to wait."""
        is_forgotten = now_s - self.since_s >= policy.forgotten_after_s
        return 1.0 if is_forgotten else 2.0 ** min(self.moves, _MOST_DOUBLINGS)

    def has_settled(self, policy: PlacementPolicy, now_s: float) -> bool:
        return now_s - self.since_s >= policy.least_lifetime_s * self.factor(policy, now_s)

    def after_move(self, policy: PlacementPolicy, now_s: float, stages: Iterable[Assignment] = ()) -> Unrest:
        """One more for gain, away from these stages; those that are forgotten are not counted."""
        known = Unrest() if now_s - self.since_s >= policy.forgotten_after_s else self
        return Unrest(known.moves + 1, now_s, (*known.left, _machines(stages)))

    def has_left(self, policy: PlacementPolicy, now_s: float, stages: Iterable[Assignment]) -> bool:
        """Whether these machines were given up for others since anything changed."""
        is_forgotten = now_s - self.since_s >= policy.forgotten_after_s
        return not is_forgotten and _machines(stages) in self.left


def _machines(stages: Iterable[Assignment]) -> tuple[str, ...]:
    """Those that compute together as one."""
    return tuple(sorted("+".join(sorted(stage.members)) for stage in stages))


class RingTime(Struct, frozen=True):
    """What steps of a chain take of late, as one of its drivers sees them, in one epoch."""

    epoch: int
    driver: str = ""
    """Whose ring it is, where that is a driver on a machine of its own."""
    step: DecayedEstimate | None = None
    """A step that decodes, once round: stages and lines, without waiting in queues."""
    wire: DecayedEstimate | None = None
    """Of that, the lines between."""
    usual_wire_s: float = 0.0
    """What the lines took when they were last believed in; 0: not known yet."""
    doubted_s: float = 0.0
    """When they were last doubted."""
    doubtful: tuple[tuple[str, str], ...] = ()
    """Links of it that are to be measured anew, because all of them together take clearly longer, or less long."""


class Move(Struct, frozen=True):
    """A move of a serving chain, and what came of it. Times are those of a step of one row or a few."""

    number: int
    chain: str
    model: str
    reason: str
    """What, why, and what is expected of it."""
    planned_s: float
    is_urgent: bool = False
    expected_before_s: float = 0.0
    expected_after_s: float = 0.0
    """By the prediction that it was planned with; 0: nothing was expected."""
    measured_before_s: float = 0.0
    measured_after_s: float = 0.0
    """0: nobody has asked for anything."""
    made_epoch: int = 0
    """The epoch that began with it; 0: it has not been made, yet or at all."""
    outcome: str = ""
    """What came of it; "" as long as that is open."""


class AuditShard(Struct, frozen=True):
    """Layers that a node holds for an audit, beside those of all chains."""

    node: str
    start: int
    stop: int


class Attachment(Struct, frozen=True):
    """A driver that uses a chain: with sessions of this namespace, and KV for `kv_tokens` of them together.

    Of another epoch than the chain's it waits to be connected anew; what stages hold of its sessions may be there.
    """

    driver: str
    session_namespace: int
    epoch: int
    kv_tokens: int


class Chain(Struct, frozen=True, kw_only=True):
    id: str
    model: str
    epoch: int
    stages: tuple[Assignment, ...]
    standbys: tuple[Assignment, ...] = ()
    status: ChainStatus = "planned"
    is_interrupted: bool = False
    """This epoch can no longer work; the chain needs a new shape."""
    connected_epoch: int = 0
    fenced_epoch: int = 0
    reason: str = ""
    missing_bytes: int = 0
    target: MoveTarget | None = None
    found: tuple[Assignment, ...] = ()
    """The best layout that a search in the background has found for it; perhaps of no use any more."""
    search_at_s: float = 0.0
    """When to search again."""
    last_move: str = ""
    """The last change of its layout in a sentence: why, from what to what, for which gain."""
    unrest: Unrest = Unrest()
    lived: tuple[float, ...] = ()
    """For how many seconds its last layouts were used, newest last."""
    ring: RingTime | None = None
    driver_unrest: Unrest = Unrest()
    drivers: tuple[Attachment, ...] = ()
    driver_host: str = ""
    """The worker that hosts the chain's driver; "": it sits with the coordinator."""
    avoided: tuple[str, ...] = ()
    """Workers that were to host it in this shape, and could not."""
    host_failures: tuple[str, ...] = ()
    """Workers that failed to host it, once for each time in a row."""
    used_stages: tuple[Assignment, ...] = ()
    """The shape that its drivers have last used, with whose sessions the next one may go on. Nothing after a restart:
    the sessions of the coordinator's own driver ended with its process, and what stages hold of them must be freed."""
    lost: tuple[str, ...] = ()
    """Nodes whose stage was lost since its drivers last used it."""
    is_released: bool = False
    """Of a retired chain: all drivers were told that it will not come back."""

    @property
    def is_live(self) -> bool:
        return self.status != "retired"

    @property
    def nodes(self) -> tuple[str, ...]:
        """The path of a row: of stages with ranks, those that lead."""
        return tuple(stage.node for stage in self.stages)

    @property
    def members(self) -> tuple[str, ...]:
        """Everybody who computes."""
        return tuple(node for stage in self.stages for node in stage.members)

    @property
    def claims(self) -> tuple[Assignment, ...]:
        return self.stages + self.standbys

    @property
    def epoch_to_fence(self) -> int:
        """Frames of this and earlier epochs must not be answered any more."""
        return self.epoch if self.is_interrupted or not self.is_live else self.epoch - 1


class ClusterState(Struct, frozen=True, kw_only=True):
    driver: str = "driver"
    """The node id under which the links of the driver are measured."""
    health: HealthPolicy = HealthPolicy()
    placing: PlacementPolicy = PlacementPolicy()
    pooling: PoolPolicy = PoolPolicy()
    nodes: dict[str, Node] = {}
    links: dict[str, dict[str, MeasuredLink]] = {}
    models: dict[str, RequestedModel] = {}
    chains: dict[str, Chain] = {}
    chains_planned: int = 0
    link_breaks: tuple[LinkBreaks, ...] = ()
    """Of links that are in trouble now; a restart begins anew."""
    moves: tuple[Move, ...] = ()
    """The last ones, oldest first."""
    moves_planned: int = 0
    demand: dict[str, Demand] = {}
    """By model; a restart begins anew."""
    audits: dict[str, AuditShard] = {}
    """Those under way, by the name of the chain that they look like; a restart ends them."""
    pool: dict[str, PoolMember] = {}
    """Nodes that came without a token, also those that are not here any more."""

    def link(self, a: str, b: str) -> MeasuredLink | None:
        first, second = sorted((a, b))
        return self.links.get(first, {}).get(second)

    def live_chains(self, model: str | None = None) -> list[Chain]:
        """Chains that are not retired, by id, of one model or of all."""
        chains = (self.chains[id] for id in sorted(self.chains))
        return [chain for chain in chains if chain.is_live and model in (None, chain.model)]


def covers(stages: tuple[Assignment, ...], layer_count: int) -> bool:
    """True when the stages follow each other over exactly `[0, layer_count)`, and no node has a part in two."""
    edge = 0
    for stage in stages:
        if stage.start != edge or stage.stop <= stage.start or not stage.is_sound:
            return False
        edge = stage.stop
    members = [node for stage in stages for node in stage.members]
    return edge == layer_count and len(set(members)) == len(members) > 0


def new_stages(before: Sequence[Assignment], after: Sequence[Assignment]) -> frozenset[int] | None:
    """The places of a new shape whose machines must be told what they missed; None: everything must be computed again.

    If the layers are cut as before and only machines changed, every stage that stayed goes on with its KV. Two new
    stages side by side cannot be told: whoever could tell the second is new, too.
    """
    if [(s.start, s.stop) for s in before] != [(s.start, s.stop) for s in after] or not before:
        return None
    # Of ranks that are others, or have other shares, none can go on with what it holds.
    pairs = enumerate(zip(before, after, strict=True))
    new = frozenset(index for index, (old, now) in pairs if old != now)
    return None if any(index - 1 in new for index in new) else new


def place_on(chain: Chain, assignment: Assignment, node: str) -> ShardPlace:
    """What a member of a stage is to hold."""
    return chain.id, assignment.start, assignment.stop, assignment.place_of(node)


def holds(state: ClusterState, chain: Chain, assignment: Assignment, node_id: str) -> bool:
    """Whether a member of a stage has its part of it in memory."""
    node = state.nodes.get(node_id)
    return node is not None and node.is_live and node.has_shard(*place_on(chain, assignment, node_id))


def is_loaded(state: ClusterState, chain: Chain, assignment: Assignment) -> bool:
    """Whether every member has its part."""
    return all(holds(state, chain, assignment, node) for node in assignment.members)


def loaded_fraction(state: ClusterState, chain: Chain, assignment: Assignment) -> float:
    """How much of a stage's layers is there."""
    fractions = [_fraction_on(state, chain, assignment, node) for node in assignment.members]
    return sum(fractions) / len(fractions)


def _fraction_on(state: ClusterState, chain: Chain, assignment: Assignment, node_id: str) -> float:
    if holds(state, chain, assignment, node_id):
        return 1.0
    node, place = state.nodes.get(node_id), place_on(chain, assignment, node_id)
    loads = () if node is None else node.loading
    return next((each.fraction for each in loads if each.place == place), 0.0)


def is_waiting(state: ClusterState, stages: Iterable[Assignment]) -> bool:
    """A node in doubt will be either back or lost in a moment; until then moving bytes is premature."""
    members = (node for stage in stages for node in stage.members)
    return any(state.nodes[node].status in ("suspected", "joining") for node in members)


def loaded_standbys(state: ClusterState, chain: Chain) -> list[Assignment]:
    return [standby for standby in chain.standbys if is_loaded(state, chain, standby)]


def hops(state: ClusterState, chain: Chain) -> list[tuple[str, str]]:
    """The links a chain uses: from the driver round to the driver, and between the ranks of a stage."""
    ring = [state.driver, *chain.nodes, state.driver]
    inner = [pair for stage in chain.stages for pair in combinations(stage.members, 2)]
    return [*((a, b) for a, b in pairwise(ring) if a != b), *inner]
