"""What to do next, in the imperative. Actions are hashable values; each says who does it.

The same action comes out of `next_actions` until an event says that it was done, so the shell remembers the
`key` of what it has under way and starts each once.
"""

from __future__ import annotations

from msgspec import Struct

from shardcompute.control.events import Event


class Source(Struct, frozen=True):
    """A peer that can serve the bytes of layers `[start, stop)`."""

    node: str
    address: str
    start: int
    stop: int


class StageAddress(Struct, frozen=True):
    node: str
    address: str
    start: int
    stop: int


class Record(Struct, frozen=True, tag=True):
    """A decision: journal and apply this event, before doing any of the actions that follow."""

    event: Event

    @property
    def key(self) -> tuple[object, ...]:
        return ("record", self.event)


class FenceChain(Struct, frozen=True, tag=True):
    """Tell the driver and these nodes to drop frames of this epoch and earlier; then `ChainFenced`."""

    chain: str
    epoch: int
    nodes: tuple[str, ...]

    @property
    def key(self) -> tuple[object, ...]:
        return ("fence", self.chain, self.epoch)


class UnloadShard(Struct, frozen=True, tag=True):
    """Tell the node to free this memory; then `ShardUnloaded`."""

    node: str
    incarnation: int
    chain: str
    model: str
    start: int
    stop: int

    @property
    def key(self) -> tuple[object, ...]:
        return ("unload", self.node, self.incarnation, self.chain, self.start, self.stop)


class LoadShard(Struct, frozen=True, tag=True):
    """Tell the node to load these layers; then `ShardLoaded` or `ShardFailed`."""

    node: str
    incarnation: int
    chain: str
    epoch: int
    model: str
    start: int
    stop: int
    size_bytes: int
    sources: tuple[Source, ...]

    @property
    def key(self) -> tuple[object, ...]:
        # Neither the epoch nor new sources make a load that is under way another load.
        return ("load", self.node, self.incarnation, self.chain, self.start, self.stop)


class PrepareStandby(Struct, frozen=True, tag=True):
    """Like `LoadShard`, in the background: the chain serves without it."""

    node: str
    incarnation: int
    chain: str
    model: str
    start: int
    stop: int
    size_bytes: int
    sources: tuple[Source, ...]

    @property
    def key(self) -> tuple[object, ...]:
        return ("load", self.node, self.incarnation, self.chain, self.start, self.stop)


class ConnectChain(Struct, frozen=True, tag=True):
    """Open the links driver → stages in order → driver for this epoch; then `ChainConnected`.

    Where a link does not open: `LinkBroken` to try again in a new epoch, or `LinkMeasured` with
    `is_open=False` to plan around it.
    """

    chain: str
    epoch: int
    model: str
    driver: str
    stages: tuple[StageAddress, ...]
    kv_tokens: int = 0
    """The driver's share of the KV memory."""

    @property
    def key(self) -> tuple[object, ...]:
        return ("connect", self.chain, self.epoch)


class ActivateChain(Struct, frozen=True, tag=True):
    """Tell the driver to use this epoch, replaying sessions where it must; then `ChainReady`."""

    chain: str
    epoch: int
    model: str

    @property
    def key(self) -> tuple[object, ...]:
        return ("activate", self.chain, self.epoch)


class AttachDriver(Struct, frozen=True, tag=True):
    """Let a driver on another machine use a chain that serves, beside the others; then `DriverAttached`."""

    chain: str
    epoch: int
    model: str
    driver: str
    address: str
    session_namespace: int
    kv_tokens: int
    is_hosted: bool = False
    """It is a worker that hosts the driver in the coordinator's place."""

    @property
    def key(self) -> tuple[object, ...]:
        return ("attach", self.chain, self.epoch, self.driver, self.session_namespace)


class ShareMemory(Struct, frozen=True, tag=True):
    """Give a driver that uses a chain another share of its KV memory; then `DriverAttached`."""

    chain: str
    epoch: int
    driver: str
    session_namespace: int
    kv_tokens: int

    @property
    def key(self) -> tuple[object, ...]:
        return ("share", self.chain, self.epoch, self.driver, self.session_namespace, self.kv_tokens)


class DetachDriver(Struct, frozen=True, tag=True):
    """A driver is gone: have the stages forget it and free what its sessions hold; then `DriverDetached`."""

    chain: str
    epoch: int
    driver: str
    session_namespace: int
    nodes: tuple[str, ...]

    @property
    def key(self) -> tuple[object, ...]:
        return ("detach", self.chain, self.epoch, self.driver, self.session_namespace)


class ReleaseNode(Struct, frozen=True, tag=True):
    """Nothing of ours is left on this draining node: tell it that it may go; then `NodeLeft`."""

    node: str
    incarnation: int

    @property
    def key(self) -> tuple[object, ...]:
        return ("release", self.node, self.incarnation)


class ReportUnservable(Struct, frozen=True, tag=True):
    """Tell people that a model (or another chain of it) cannot be served, and what is missing."""

    model: str
    missing_bytes: int
    reasons: tuple[str, ...]

    @property
    def key(self) -> tuple[object, ...]:
        return ("unservable", self.model, self.missing_bytes)


Action = (
    Record
    | FenceChain
    | UnloadShard
    | LoadShard
    | PrepareStandby
    | ConnectChain
    | ActivateChain
    | AttachDriver
    | ShareMemory
    | DetachDriver
    | ReleaseNode
    | ReportUnservable
)
