"""What to do next, in the imperative. Actions are hashable values; each says who does it.

The same action comes out of `next_actions` until an event says that it was done, so the shell remembers the
`identity` of what it has under way and starts each once.
"""

from __future__ import annotations

from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from shardcompute.control.events import Event
from shardcompute.control.state import Assignment, RankPlace, RankSeat
from shardcompute.models.tensor_share import Exchange


class Source(Struct, frozen=True):
    """A peer that can serve the bytes of layers `[start, stop)`."""

    node: str
    address: str
    start: int
    stop: int


class RankAddress(Struct, frozen=True):
    node: str
    address: str
    weight: int


class StageAddress(Struct, frozen=True):
    """Where a stage is reached: its node or, with `ranks`, those that compute it together, the first of which leads."""

    node: str
    address: str
    start: int
    stop: int
    ranks: tuple[RankAddress, ...] = ()
    exchange: Exchange = "gather"

    @property
    def assignment(self) -> Assignment:
        ranks = tuple(RankSeat(each.node, each.weight) for each in self.ranks)
        return Assignment(self.node, self.start, self.stop, ranks, self.exchange)


class Record(Struct, frozen=True, tag=True):
    """A decision: journal and apply this event, before doing any of the actions that follow."""

    event: Event


class SearchLayout(Struct, frozen=True, tag=True):
    """Search in the background for a better layout than is found quickly; then `LayoutFound`. Dropped where the chain
    is another one meanwhile."""

    chain: str
    epoch: int


class RetireChain(Struct, frozen=True, tag=True):
    """Tell all drivers that this chain will not come back; then `ChainReleased`."""

    chain: str


class FenceChain(Struct, frozen=True, tag=True):
    """Tell all drivers and these nodes to drop frames of this epoch and earlier; then `ChainFenced`."""

    chain: str
    epoch: int
    nodes: tuple[str, ...]


class UnloadShard(Struct, frozen=True, tag=True):
    """Tell the node to free this memory; then `ShardUnloaded`."""

    node: str
    incarnation: int
    chain: str
    start: int
    stop: int
    tensor: RankPlace | None = None


class LoadShard(Struct, frozen=True, tag=True, kw_only=True):
    """Tell the node to load these layers, or its share of them; then `ShardLoaded` or `ShardFailed`. Without a
    standby's the chain serves."""

    node: str
    incarnation: int
    chain: str
    model: str
    start: int
    stop: int
    size_bytes: int
    sources: tuple[Source, ...]
    is_standby: bool = False
    tensor: RankPlace | None = None


class SeedWeights(Struct, frozen=True, tag=True, kw_only=True):
    """Tell the node to fetch these layers to its disk, so slowly, for others; then `WeightsSeeded` or
    `SeedingFailed`."""

    node: str
    incarnation: int
    model: str
    start: int
    stop: int
    sources: tuple[Source, ...]
    bytes_per_s: int


class CopyKv(Struct, frozen=True, tag=True, kw_only=True):
    """Have the stages of a chain that serves send what sessions hold to those that take over their layers, while they
    go on; then `KvCopied`, whatever came of it."""

    chain: str
    epoch: int
    stages: tuple[StageAddress, ...]
    target: tuple[StageAddress, ...]


class ConnectChain(Struct, frozen=True, tag=True, kw_only=True):
    """Open the links driver → stages in order → driver for this epoch; then `ChainConnected`.

    Where a link does not open: `LinkBroken` to try again in a new epoch.
    """

    chain: str
    epoch: int
    model: str
    stages: tuple[StageAddress, ...]
    used_stages: tuple[Assignment, ...]
    """The last shape that was in use, with whose sessions this one may go on."""
    kv_tokens: int
    """The share of the coordinator's own driver of the KV memory."""


class ActivateChain(Struct, frozen=True, tag=True, kw_only=True):
    """Tell the coordinator's own driver to use this epoch, replaying sessions where it must; then `ChainReady`."""

    chain: str
    epoch: int
    model: str
    stages: tuple[StageAddress, ...]
    kv_tokens: int


class AttachDriver(Struct, frozen=True, tag=True, kw_only=True):
    """Let a driver on another machine use a chain that serves, beside the others; then `DriverAttached`, or, of a
    worker that hosts it in the coordinator's place, perhaps `DriverHostFailed`."""

    chain: str
    epoch: int
    model: str
    driver: str
    session_namespace: int
    kv_tokens: int
    stages: tuple[StageAddress, ...]
    is_hosted: bool


class ShareMemory(Struct, frozen=True, tag=True):
    """Give a driver that uses a chain another share of its stages' KV memory; then `DriverAttached`."""

    chain: str
    epoch: int
    driver: str
    session_namespace: int
    kv_tokens: int
    nodes: tuple[str, ...]


class DetachDriver(Struct, frozen=True, tag=True):
    """A driver is gone: have the stages forget it and free what its sessions hold; then `DriverDetached`."""

    chain: str
    epoch: int
    driver: str
    session_namespace: int
    nodes: tuple[str, ...]


class ProbeLink(Struct, frozen=True, tag=True):
    """Have a node see whether its closed link to a peer is back, or measure one that may have changed; then
    `LinkProbed`, after `LinkMeasured` as many `times` if it is there."""

    node: str
    peer: str
    times: int = 1


class ReleaseNode(Struct, frozen=True, tag=True):
    """Nothing of ours is left on this draining node: tell it that it may go; then `NodeLeft`."""

    node: str
    incarnation: int


class ReportUnservable(Struct, frozen=True, tag=True):
    """Tell a driver that a model (or another chain of it) cannot be served, and what is missing."""

    driver: str
    session_namespace: int
    model: str
    missing_bytes: int
    reasons: tuple[str, ...]


class ReportProgress(Struct, frozen=True, tag=True):
    """Tell drivers that a chain which they wait for is being loaded, how far that is, and what is missing."""

    drivers: tuple[str, ...]
    chain: str
    epoch: int
    fraction: float
    waits_for: str


Action = (
    Record
    | SearchLayout
    | RetireChain
    | FenceChain
    | UnloadShard
    | LoadShard
    | SeedWeights
    | CopyKv
    | ConnectChain
    | ActivateChain
    | AttachDriver
    | ShareMemory
    | DetachDriver
    | ProbeLink
    | ReleaseNode
    | ReportUnservable
    | ReportProgress
)

_VARYING: dict[type, dict[str, Any]] = {
    LoadShard: {"sources": (), "is_standby": False},
    SeedWeights: {"sources": (), "bytes_per_s": 0},
    ConnectChain: {"stages": (), "kv_tokens": 0},
    ActivateChain: {"stages": ()},
    AttachDriver: {"stages": (), "kv_tokens": 0},
    ReportUnservable: {"reasons": ()},
}
"""What may change while an action is under way without making it another one: other machines can serve the bytes too,
a standby was promoted, a machine came back at another address, the memory is shared with one driver more (which gets
its own `ShareMemory`), or the same want is put into other words."""


def identity(action: Action) -> Action:
    """The action without what may vary while it is under way."""
    varying = _VARYING.get(type(action))
    return action if varying is None else replace(action, **varying)
