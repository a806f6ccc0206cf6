"""What happened, in the past tense: the only things that change the cluster's state.

`apply` (see `transitions`) takes any of these in any order. Those for which `is_journalled` says yes are
written down with `encode_event`; replaying them gives back the state, after which `CoordinatorStarted` says
that the clock and all links are new. Events about a node carry the incarnation they speak of, so that news
of a former life is ignored.
"""

from __future__ import annotations

import msgspec
from msgspec import Struct

from shardcompute.control.placement.parallelism import Parallelism
from shardcompute.control.state import (
    Assignment,
    ClusterState,
    HeldDraftHead,
    Holding,
    LayerShape,
    Model,
    NodeDescription,
    RankPlace,
    ShardPlace,
)
from shardcompute.trust.reputation import Finding


class CoordinatorStarted(Struct, frozen=True, tag=True):
    """The coordinator is back: machines must show themselves and chains must be connected anew."""

    now_s: float


class LeasesRenewed(Struct, frozen=True, tag=True):
    """The coordinator could hear nobody for a while, through no fault of theirs: all have time to show themselves."""

    now_s: float


class StateRemembered(Struct, frozen=True, tag=True):
    """All that was believed at some moment, in place of the events that led there."""

    state: ClusterState


class NodeJoined(NodeDescription, frozen=True, tag=True, kw_only=True):
    """A node dialled in. `incarnation` comes from `next_incarnation`; `shards` are those it has in memory."""

    node: str
    now_s: float
    attested: str = ""
    """What the coordinator has verified of its hardware; what a node says of that itself does not count."""


class NodeSeen(Struct, frozen=True, tag=True):
    """A heartbeat, with what the node's process takes of its machine's memory (0: it does not say), what conversations
    take of its KV memory, how it stands with draft heads, what its machine draws (0: nobody knows), and how many bytes
    of weights others got from it."""

    node: str
    incarnation: int
    now_s: float
    resident_bytes: int = 0
    kv_used_bytes: int = 0
    draft_heads: tuple[HeldDraftHead, ...] = ()
    busy_watts: float = 0.0
    idle_watts: float = 0.0
    seeded_bytes: int = 0


class NodesSeen(Struct, frozen=True, tag=True):
    """Heartbeats of many nodes, in the order in which they came: the same as one after the other, for the price of
    one change."""

    seen: tuple[NodeSeen, ...]


class NodeMeasured(Struct, frozen=True, tag=True, kw_only=True):
    """Seconds to read a byte of weights for one row and per frame; or seconds per average layer of `model`."""

    node: str
    incarnation: int
    seconds_per_byte: float | None = None
    overhead_s: float | None = None
    model: str | None = None
    layer_s: float | None = None
    shape: LayerShape | None = None
    batch_layer_s: float | None = None
    prefill_layer_s: float | None = None
    is_served: bool = False
    """What steps in service take of late, by many of them: it replaces what was measured before."""
    measured_at_s: float = 0.0
    chain: str = ""
    """Where it is what the node's whole group of ranks takes for a layer of this chain, not the node alone."""


class StageTimed(Struct, frozen=True, tag=True, kw_only=True):
    """Many steps in service, of a node's layers for a chain: what an average layer took, as a median of them. What is
    believed changes where several agree (see `drift`)."""

    node: str
    incarnation: int
    chain: str
    model: str
    start: int
    stop: int
    loaded_s: float
    layer_s: float | None = None
    batch_layer_s: float | None = None
    prefill_layer_s: float | None = None
    shape: LayerShape | None = None
    is_group: bool = False
    """It is what the node's whole group of ranks took."""
    measured_at_s: float = 0.0
    now_s: float = 0.0


class RingTimed(Struct, frozen=True, tag=True):
    """Many steps of a chain, as its driver saw them come back: what one took without waiting, and the lines' part of
    that."""

    chain: str
    epoch: int
    step_s: float
    wire_s: float
    now_s: float
    driver: str = ""
    """A driver on a machine of its own that saw them; "": the one that sits with the coordinator, or on a worker."""


class LinkMeasured(Struct, frozen=True, tag=True):
    a: str
    b: str
    rtt_s: float
    bytes_per_s: float
    is_open: bool = True
    rung: str = "direct"
    """The way on which it goes."""
    remark: str = ""
    """Why a better way failed."""


class LinkBroken(Struct, frozen=True, tag=True):
    """`reporter` lost its link to `node`; the reporter of a control link is `COORDINATOR`."""

    reporter: str
    node: str
    now_s: float


class LinkClosed(Struct, frozen=True, tag=True):
    """`reporter` could not reach `node` again and again: nothing is planned across this link until a probe finds it
    open."""

    reporter: str
    node: str
    now_s: float


class LinkProbed(Struct, frozen=True, tag=True):
    """Somebody has tried a closed link; if that got through, `LinkMeasured` came before."""

    a: str
    b: str
    now_s: float


class NodeSuspected(Struct, frozen=True, tag=True):
    node: str
    incarnation: int
    reason: str
    now_s: float


class NodeLost(Struct, frozen=True, tag=True):
    node: str
    incarnation: int
    reason: str
    now_s: float


class NodeDrained(Struct, frozen=True, tag=True):
    """Somebody asked that this node be emptied."""

    node: str


class NodeRested(Struct, frozen=True, tag=True):
    """A node's owner does not let it work now, for this reason, or ("") lets it work again. Others take over what it
    does; `is_at_rest`: it has stopped, whether or not they did."""

    node: str
    incarnation: int
    reason: str
    is_at_rest: bool = False


class AuditBegun(Struct, frozen=True, tag=True):
    """A node is to load layers for an audit, as those of a chain of this name."""

    chain: str
    node: str
    start: int
    stop: int


class AuditEnded(Struct, frozen=True, tag=True):
    chain: str


class AuditSettled(Struct, frozen=True, tag=True):
    """What an audit of an answer found of one node, and why."""

    node: str
    finding: Finding
    reason: str
    receipt: str
    now_s: float
    windows: int = 0
    """Of 32 rows, that were computed again."""
    at_s: float = 0.0
    """In seconds since 1970, by which records of strangers are judged."""


class StrangerAdmitted(Struct, frozen=True, tag=True):
    """A node was let in without a token: it is on probation, if nothing else is known of it."""

    node: str
    network: str
    at_s: float


class NodePardoned(Struct, frozen=True, tag=True):
    """An operator lets a node work again: it begins anew, as one of which nothing is known."""

    node: str


class NodeLeft(Struct, frozen=True, tag=True):
    """A node said goodbye."""

    node: str
    incarnation: int


class ModelRequested(Struct, frozen=True, tag=True):
    model: Model
    chain_count: int = 1
    has_draft_model: bool = False
    parallel: Parallelism | None = None
    """How a person asked for it to be cut; None: as before."""


class ModelDropped(Struct, frozen=True, tag=True):
    model: str


class LayoutKept(Struct, frozen=True, tag=True):
    """Somebody wants the layouts of a model's chains to stay as they are, or no longer does."""

    model: str
    is_kept: bool


class CopiesWanted(Struct, frozen=True, tag=True):
    """So many copies of a model more than were asked for, and which of them takes nobody new."""

    model: str
    extra_chains: int
    leaving: str
    reason: str
    now_s: float


class DemandSeen(Struct, frozen=True, tag=True):
    """How many answers of each of a model's chains run or wait."""

    model: str
    sessions: dict[str, int]
    now_s: float


class ChainPlanned(Struct, frozen=True, tag=True):
    chain: str
    model: str
    stages: tuple[Assignment, ...]
    reason: str = ""
    now_s: float = 0.0


class ChainReshaped(Struct, frozen=True, tag=True):
    """The chain has a new shape and epoch: a standby promoted, a stage replaced, a re-split, a reconnection."""

    chain: str
    epoch: int
    stages: tuple[Assignment, ...]
    reason: str = ""
    now_s: float = 0.0


class MovePlanned(Struct, frozen=True, tag=True):
    """The chain goes on as it is while the shards of these stages are loaded; then it is reshaped to them. `is_urgent`:
    not for gain, but because somebody asked for it."""

    chain: str
    epoch: int
    stages: tuple[Assignment, ...]
    reason: str
    is_urgent: bool
    now_s: float
    expected_before_s: float = 0.0
    expected_after_s: float = 0.0
    """A token of one stream by what is believed of machines and lines, as it is and as it will be."""
    measured_s: float = 0.0
    """A step as it was measured of late; 0: nobody has asked for anything."""


class MoveJudged(Struct, frozen=True, tag=True):
    """What came of a move."""

    number: int
    outcome: str
    measured_s: float = 0.0


class LayoutFound(Struct, frozen=True, tag=True):
    """A search in the background has found nothing better than these stages (none: nothing at all)."""

    chain: str
    epoch: int
    stages: tuple[Assignment, ...]
    now_s: float


class KvCopied(Struct, frozen=True, tag=True):
    """The machines of these stages, to which the chain is moving, were sent what sessions hold, or will not be."""

    chain: str
    epoch: int
    stages: tuple[Assignment, ...]


class MoveDropped(Struct, frozen=True, tag=True):
    """The planned move does not come about: the chain stays as it is."""

    chain: str
    epoch: int
    reason: str
    now_s: float


class StandbysChosen(Struct, frozen=True, tag=True):
    chain: str
    epoch: int
    standbys: tuple[Assignment, ...]
    reason: str = ""


class ShardProgressed(Struct, frozen=True, tag=True):
    node: str
    incarnation: int
    chain: str
    start: int
    stop: int
    fraction: float
    tensor: RankPlace | None = None
    """Which share of the layers; None: all of them."""


class ShardLoaded(Struct, frozen=True, tag=True):
    node: str
    incarnation: int
    chain: str
    model: str
    start: int
    stop: int
    size_bytes: int
    tensor: RankPlace | None = None
    """Which share of the layers; None: all of them."""


class ShardFailed(Struct, frozen=True, tag=True):
    node: str
    incarnation: int
    chain: str
    model: str
    start: int
    stop: int
    reason: str
    now_s: float
    memory_bytes: int | None = None
    """Where memory ran out: what the node offers from now on."""
    tensor: RankPlace | None = None
    """Which share of the layers; None: all of them."""


class MemoryRegained(Struct, frozen=True, tag=True):
    """A node whose memory ran out has had more of it free for a while, and offers that again."""

    node: str
    incarnation: int
    memory_bytes: int
    is_all: bool
    """It is what the node was given."""


class StageStalled(Struct, frozen=True, tag=True):
    """A stage of a chain is stuck: its machine is there, and what it computes does not end."""

    node: str
    incarnation: int
    chain: str
    reason: str
    now_s: float


class ShardUnloaded(Struct, frozen=True, tag=True):
    node: str
    incarnation: int
    chain: str
    start: int
    stop: int
    tensor: RankPlace | None = None
    """Which share of the layers; None: all of them."""


class SeedChosen(Struct, frozen=True, tag=True):
    """A node that no chain needs is to keep these layers on its disk for others; None: it need not any more."""

    node: str
    incarnation: int
    seed: Holding | None


class WeightsSeeded(Struct, frozen=True, tag=True):
    """A node has these layers on its disk."""

    node: str
    incarnation: int
    model: str
    start: int
    stop: int


class SeedingFailed(Struct, frozen=True, tag=True):
    """A node could not fetch what it was to seed."""

    node: str
    incarnation: int
    reason: str
    now_s: float


def place_in(event: ShardProgressed | ShardLoaded | ShardFailed | ShardUnloaded) -> ShardPlace:
    """Of which shard an event tells."""
    return event.chain, event.start, event.stop, event.tensor


class ChainConnected(Struct, frozen=True, tag=True):
    """All links of this epoch are open; its stages keep KV for `kv_tokens` of the coordinator's own driver (0: its
    share as of now)."""

    chain: str
    epoch: int
    kv_tokens: int = 0


class ChainReady(Struct, frozen=True, tag=True):
    """The coordinator's own driver uses this epoch."""

    chain: str
    epoch: int


class DriverAttached(Struct, frozen=True, tag=True):
    """A driver uses this epoch, or has another share of its memory."""

    chain: str
    epoch: int
    driver: str
    session_namespace: int
    kv_tokens: int


class DriverDetached(Struct, frozen=True, tag=True):
    """No stage holds anything of these sessions any more, nor takes their frames."""

    chain: str
    driver: str
    session_namespace: int


class DriverPlaced(Struct, frozen=True, tag=True):
    """The chain's driver is to sit on this worker from now on, or ("") with the coordinator."""

    chain: str
    node: str
    reason: str = ""
    now_s: float = 0.0


class DriverHostFailed(Struct, frozen=True, tag=True):
    """This worker could not host the chain's driver, whose sessions would have had this namespace; after some times
    in a row it is not asked any more."""

    chain: str
    node: str
    session_namespace: int


class ChainFenced(Struct, frozen=True, tag=True):
    """The driver and all reachable workers drop frames of this epoch and earlier ones."""

    chain: str
    epoch: int


class ChainBroken(Struct, frozen=True, tag=True):
    """No shape works with the machines there are; the chain waits for more."""

    chain: str
    epoch: int
    missing_bytes: int
    reason: str


class ChainRetired(Struct, frozen=True, tag=True):
    chain: str
    reason: str


class ChainReleased(Struct, frozen=True, tag=True):
    """All drivers were told that a retired chain will not come back."""

    chain: str


Event = (
    CoordinatorStarted
    | StateRemembered
    | NodeJoined
    | NodeSeen
    | NodesSeen
    | NodeMeasured
    | StageTimed
    | RingTimed
    | LinkMeasured
    | LinkBroken
    | LinkClosed
    | LinkProbed
    | NodeSuspected
    | NodeLost
    | NodeDrained
    | NodeRested
    | NodeLeft
    | AuditBegun
    | AuditEnded
    | AuditSettled
    | StrangerAdmitted
    | NodePardoned
    | ModelRequested
    | ModelDropped
    | LayoutKept
    | CopiesWanted
    | DemandSeen
    | ChainPlanned
    | ChainReshaped
    | MovePlanned
    | LayoutFound
    | KvCopied
    | MoveDropped
    | MoveJudged
    | StandbysChosen
    | ShardProgressed
    | ShardLoaded
    | ShardFailed
    | MemoryRegained
    | LeasesRenewed
    | StageStalled
    | ShardUnloaded
    | SeedChosen
    | WeightsSeeded
    | SeedingFailed
    | ChainConnected
    | ChainReady
    | DriverAttached
    | DriverDetached
    | ChainFenced
    | ChainBroken
    | ChainRetired
    | ChainReleased
    | DriverPlaced
    | DriverHostFailed
)

# Seeds are chosen anew after a restart.
# Suspicion is undone by heartbeats, which are not written down, so neither is suspicion. Drivers are attached anew
# after a restart, when all chains are connected anew, told again of chains that are retired, and closed links probed.
_FLEETING = (
    AuditBegun,
    AuditEnded,
    LeasesRenewed,
    LayoutFound,
    KvCopied,
    NodeSeen,
    NodesSeen,
    NodeSuspected,
    ShardProgressed,
    SeedChosen,
    SeedingFailed,
    StageTimed,
    RingTimed,
    DemandSeen,
    LinkProbed,
    DriverAttached,
    DriverDetached,
    DriverHostFailed,
    ChainReleased,
)


def is_journalled(event: Event) -> bool:
    return not isinstance(event, _FLEETING)


def encode_event(event: Event) -> bytes:
    """One line of JSON."""
    return msgspec.json.encode(event)


def decode_event(line: bytes) -> Event:
    """Raises ValueError (msgspec's errors are such) or RecursionError when the line is not an event."""
    event: Event = msgspec.json.decode(line, type=Event)
    return event
