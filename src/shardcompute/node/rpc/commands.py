"""What the coordinator tells workers and drivers to do. Each is answered when it is done."""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias, TypeVar

import msgspec

from shardcompute.control.state import RankPlace, ShardPlace
from shardcompute.core.errors import LinkError
from shardcompute.core.generation import Speculation
from shardcompute.core.kv_types import DEFAULT_KV_TYPE, KvType
from shardcompute.models.spec import VisionSpec
from shardcompute.node.rpc.session_ids import Resumption

_MOST_ROWS = 1 << 14


class Peer(msgspec.Struct, frozen=True):
    """A node, and where it is reached; without a name, whichever worker is there."""

    node: str
    url: str


class LoadLayers(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Load layers `[start, stop)` of a model, with KV memory for `kv_tokens`, kept as `kv_type`."""

    chain: str
    model: str
    start: int
    stop: int
    kv_tokens: int
    kv_type: KvType = DEFAULT_KV_TYPE
    backend: str = ""
    """What computes them, where the worker leaves that open; "": its own backend."""
    context_length: int
    sources: list[Peer]
    tensor: RankPlace | None = None
    """Which share of them; None: all of them."""

    @property
    def place(self) -> ShardPlace:
        return self.chain, self.start, self.stop, self.tensor


class HoldLayers(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Fetch layers `[start, stop)` of a model to the disk, so many bytes a second at most, for others to fetch."""

    model: str
    start: int
    stop: int
    sources: list[Peer]
    """The last is who serves the model."""
    bytes_per_s: int


class UnloadLayers(msgspec.Struct, frozen=True, tag=True):
    chain: str
    start: int
    stop: int
    tensor: RankPlace | None = None

    @property
    def place(self) -> ShardPlace:
        return self.chain, self.start, self.stop, self.tensor


class TakeDraftHead(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Draft with what is attached to the model now, in the place of what the last stage has drafted with so far.
    Answered when it does, or with why it cannot."""

    chain: str
    start: int
    stop: int
    origin: Peer
    """Who serves the model."""
    tensor: RankPlace | None = None

    @property
    def place(self) -> ShardPlace:
        return self.chain, self.start, self.stop, self.tensor


class Wire(msgspec.Struct, frozen=True):
    """How activations go to the next stage: the cluster's `mode` (see `codec_choice`), the codecs that the next stage
    can read, and what was measured of the link; `bytes_per_s` 0 where nothing was."""

    mode: str = "exact"
    codecs: tuple[str, ...] = ("exact",)
    rtt_s: float = 0.0
    bytes_per_s: float = 0.0


class Connect(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Take part in an epoch of a chain and open the link to whoever comes next.

    `keeps_sessions`: this stage was in the epoch before and goes on with its KV. `replays`: whoever comes next is new
    and gets what this stage has sent before. Frames are taken from `previous_node` (the driver, for the first stage)
    alone. Answered with `Connected`.
    """

    chain: str
    epoch: int
    start: int
    stop: int
    next: Peer
    previous_node: str
    driver: Peer
    session_namespace: int
    kv_tokens: int
    is_last: bool
    keeps_sessions: bool = False
    replays: bool = False
    wire: Wire = Wire()
    tensor: RankPlace | None = None
    """Of a stage that several compute: which rank this node is."""
    ranks: list[Peer] = []
    """All of them, by rank; empty: this node computes the stage alone."""
    kv_copy: int = 0
    """Not 0: this stage is new and goes on with the sessions that it was sent by this copy (`ExpectKv`)."""
    running: list[int] = []
    """Where it replays: the sessions of `session_namespace` that run. What is kept of ended ones is dropped after every
    change of shape, and replaying it would have those wait who are being answered."""

    @property
    def place(self) -> ShardPlace:
        return self.chain, self.start, self.stop, self.tensor


class KvHolder(msgspec.Struct, frozen=True):
    """A node, and layers that it holds or is to hold sessions of."""

    node: Peer
    start: int
    stop: int


class ExpectKv(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Take what these nodes send of the sessions of layers `[start, stop)`, which are loaded here and not in use, until
    `Connect` names the copy. What an earlier copy has brought is dropped. Answered when it can begin."""

    chain: str
    number: int
    start: int
    stop: int
    sources: list[KvHolder]


class SendKv(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Send these nodes what sessions hold of the layers they are to take over, and what is written meanwhile, until
    this epoch is fenced off; then the rest. Answered when little is left to send, or with why nothing will be."""

    chain: str
    epoch: int
    number: int
    targets: list[KvHolder]


class OpenLinks(msgspec.Struct, frozen=True, tag=True):
    """Dial these stages and drivers, to whom frames will go once the chain has moved: answers that wait for the switch
    do not wait for handshakes. Whether it worked shows when they are needed."""

    peers: list[Peer]


class StepLimits(msgspec.Struct, frozen=True):
    """What a chain can do in one step: so many rows, of which so many with logits. `can_continue`: it goes on from
    the tokens that it picks by itself (`core.steps.PICKED`)."""

    max_rows: Annotated[int, msgspec.Meta(ge=1, le=_MOST_ROWS)] = 512
    max_logit_rows: Annotated[int, msgspec.Meta(ge=1, le=_MOST_ROWS)] = 64
    can_continue: bool = False


class Connected(msgspec.Struct, frozen=True):
    """Whether the stage goes on with its sessions; which it holds, and which it replayed to the next, each with how
    many tokens; and what it can do in one step."""

    kept: bool = False
    replayed: dict[int, int] = {}
    held: dict[int, int] = {}
    limits: StepLimits = StepLimits()


class Admit(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Let another driver use this epoch of a chain, with sessions of this namespace, or change its share of the memory.

    Answered with `Connected`: what is held of its sessions.
    """

    chain: str
    epoch: int
    driver: Peer
    session_namespace: int
    kv_tokens: int


class Dismiss(msgspec.Struct, frozen=True, tag=True):
    """A driver is gone: take nothing of these sessions any more and free what they hold."""

    chain: str
    session_namespace: int


class FenceOff(msgspec.Struct, frozen=True, tag=True):
    """Drop frames of this epoch and earlier ones. `forgets`: free what is left of the sessions, too, because others
    go on with them."""

    chain: str
    epoch: int
    forgets: bool = False


class TraceStep(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Say where a driver's step is that `sender` should have sent you. Answered with `StepTraced`, at once, whatever
    is being computed."""

    chain: str
    epoch: int
    session_namespace: int
    sequence: int
    sender: str


StepPlace = Literal["away", "queued", "computing", "sending", "sent", "failed", "dropped"]
"""`away`: it never came. `failed`: the driver was told that it could not be computed. `dropped`: it was not taken, or
could not be sent on."""


class StepTraced(msgspec.Struct, frozen=True):
    """Where a step is, and how the thread that computes is getting on: for how long it has been at what it does now
    (0: it waits for work), how long that may take by what was measured, and how many things it has done."""

    place: StepPlace = "away"
    busy_s: float = 0.0
    limit_s: float = 0.0
    done: int = 0
    unsent: int = 0
    """Frames that wait to go out to whoever comes next."""

    @property
    def is_stuck(self) -> bool:
        return self.busy_s > self.limit_s


class ConfirmMissing(msgspec.Struct, frozen=True, tag=True):
    """To a driver: say whether this step's results are missed still. Answered with an error where they are not."""

    chain: str
    epoch: int
    sequence: int


class Redial(msgspec.Struct, frozen=True, tag=True):
    """End your link to this peer, over which something of the chain got lost: it is reported like any that breaks, and
    dialled anew for the next epoch. `by_driver`: the one over which your driver sends, not your stage."""

    chain: str
    node: str
    by_driver: bool


class ShowRows(msgspec.Struct, frozen=True, tag=True):
    """Show what you have sent of an answer that is over, from this row on, as the stage that begins with layer `start`.
    Answered with `ShownRows`."""

    receipt: str
    start: int
    row: int


class ShownRows(msgspec.Struct, frozen=True, array_like=True):
    """Rows as the next stage has read them, float32, and the form in which they travelled."""

    codec: Annotated[str, msgspec.Meta(max_length=64)]
    width: Annotated[int, msgspec.Meta(ge=1, le=1 << 20)]
    count: Annotated[int, msgspec.Meta(ge=1, le=_MOST_ROWS)]
    content: bytes


class Probe(msgspec.Struct, frozen=True, tag=True):
    """Measure the links to these nodes and report them."""

    peers: list[Peer]


class MeetNode(msgspec.Struct, frozen=True, tag=True):
    """A node wants a link with you and cannot dial you: take part in every way that its offer opens (`reach.offers`).
    Answered with a `MeetAnswer`."""

    caller: str
    offer: bytes


class Leave(msgspec.Struct, frozen=True, tag=True):
    """Nothing of the cluster's is left here: the node may go."""


class OfferedModel(msgspec.Struct, frozen=True, kw_only=True):
    """A model that the cluster serves; its tokenizer travels like its weights (see `weights.tokenizer_pack`)."""

    name: str
    vocab_size: int
    context_length: int
    created_s: int
    digest: str
    size_bytes: int
    speculation: Speculation
    has_draft_head: bool = False
    adapters: tuple[str, ...] = ()
    """Those that every stage of it has beside its weights."""
    vision: VisionSpec | None = None
    """How it sees."""


class Introduce(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """To a driver: all that is served, who may ask for it (a `security.KeyBook`), from whom to get tokenizers, and
    the chains that there are. Of a registration's orders those with higher versions are newer."""

    version: int
    models: list[OfferedModel]
    wanted: list[str]
    """Models to go on with: also those that a coordinator remembers and has not opened again yet."""
    keys: bytes
    origin: Peer
    chains: list[str]


class ShapeChange(msgspec.Struct, frozen=True):
    """Of an epoch against the one in use before it, by the machines' names: whose stages were lost, and who has taken
    over layers. For people to see."""

    lost: tuple[str, ...] = ()
    taken_over_by: tuple[str, ...] = ()


UNCHANGED = ShapeChange()


class Attach(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """To a driver: use this epoch of a chain, whose stages expect you. `resumption` is what they still know of your
    sessions; None: nothing, they are computed again."""

    chain: str
    epoch: int
    model: str
    first: Peer
    nodes: list[str]
    kv_tokens: int
    resumption: Resumption | None = None
    change: ShapeChange = UNCHANGED
    limits: StepLimits = StepLimits()


class Share(msgspec.Struct, frozen=True, tag=True):
    """To a driver: use so much of the chain's KV memory from now on."""

    chain: str
    epoch: int
    kv_tokens: int


class Retire(msgspec.Struct, frozen=True, tag=True):
    """To a driver: the chain will not come back."""

    chain: str


class Unservable(msgspec.Struct, frozen=True, tag=True):
    """To a driver: a model cannot be served, and what is missing; `broken` are its chains that wait for that."""

    model: str
    missing_bytes: int
    reasons: list[str]
    broken: list[str]


class Progressed(msgspec.Struct, frozen=True, tag=True):
    """To a driver: a chain that it waits for is being loaded, how far that is, and what is missing."""

    chain: str
    epoch: int
    fraction: float
    waits_for: str


class HostDriver(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """To a worker: get ready to drive chains of this model, whose tokenizer comes from `origin`. Drivers of
    other chains than these are over."""

    model: OfferedModel
    origin: Peer
    chains: list[str]


WorkerCommand: TypeAlias = (
    LoadLayers
    | HoldLayers
    | UnloadLayers
    | TakeDraftHead
    | Connect
    | ExpectKv
    | SendKv
    | OpenLinks
    | Admit
    | Dismiss
    | FenceOff
    | TraceStep
    | ConfirmMissing
    | Redial
    | ShowRows
    | Probe
    | MeetNode
    | Leave
    | HostDriver
    | Attach
    | Share
    | Retire
    | Progressed
)
DriverCommand: TypeAlias = (
    Introduce
    | Attach
    | Share
    | Retire
    | Unservable
    | Progressed
    | FenceOff
    | ConfirmMissing
    | Redial
    | Probe
    | MeetNode
    | Leave
)
NodeCommand: TypeAlias = WorkerCommand | DriverCommand
Answer = TypeVar("Answer", Connected, StepTraced)


def encode_command(command: NodeCommand) -> bytes:
    return msgspec.json.encode(command)


def encode_answer(answer: Connected | StepTraced) -> bytes:
    return msgspec.json.encode(answer)


def encode_rows(rows: ShownRows) -> bytes:
    return msgspec.msgpack.encode(rows)


def decode_rows(content: bytes) -> ShownRows:
    """LinkError where a peer shows something else."""
    try:
        rows = msgspec.msgpack.decode(content, type=ShownRows)
    except (ValueError, RecursionError) as error:
        raise LinkError(f"rows cannot be understood: {error}", hint="run one release on all nodes") from error
    if len(rows.content) != 4 * rows.width * rows.count:
        raise LinkError(f"{len(rows.content)} bytes are no {rows.count} rows of {rows.width}")
    return rows


def decode_connected(content: bytes) -> Connected:
    return _decode_answer(content, Connected)


def decode_traced(content: bytes) -> StepTraced:
    return _decode_answer(content, StepTraced)


def _decode_answer(content: bytes, kind: type[Answer]) -> Answer:
    try:
        return msgspec.json.decode(content, type=kind)
    except (ValueError, RecursionError) as error:
        raise LinkError(
            f"an answer cannot be understood: {error}", hint="run one release on all nodes"
        ) from error


def decode_command(content: bytes) -> NodeCommand:
    try:
        command: NodeCommand = msgspec.json.decode(content, type=NodeCommand)
    except (ValueError, RecursionError) as error:
        raise LinkError(
            f"a command cannot be understood: {error}", hint="run one release on all nodes"
        ) from error
    return command
