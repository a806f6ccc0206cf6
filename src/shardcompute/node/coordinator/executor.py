"""What was decided, done: each action is started once, and what it brings about comes back as events."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from functools import partial
from typing import Protocol

import msgspec

from shardcompute.control.actions import (
    Action,
    ActivateChain,
    AttachDriver,
    ConnectChain,
    DetachDriver,
    FenceChain,
    LoadShard,
    PrepareStandby,
    ReleaseNode,
    ReportUnservable,
    ShareMemory,
    StageAddress,
    UnloadShard,
)
from shardcompute.control.events import (
    ChainConnected,
    ChainFenced,
    ChainReady,
    Event,
    LinkBroken,
    NodeLeft,
    ShardUnloaded,
)
from shardcompute.control.state import ClusterState, Node
from shardcompute.core.errors import ShardComputeError
from shardcompute.node.coordinator.chain_connector import ConnectedEpoch, connect_epoch, wire_between
from shardcompute.node.coordinator.driver_port import DriverPort
from shardcompute.node.coordinator.driver_ports import DriverAction, RemoteDrivers
from shardcompute.node.coordinator.link_breaker import LinkBreaker
from shardcompute.node.coordinator.node_registry import NodeRegistry
from shardcompute.node.rpc.commands import FenceOff, Leave, LoadLayers, NodeCommand, Peer, UnloadLayers
from shardcompute.node.rpc.session_ids import Resumption
from shardcompute.wire.control import CommandReply

log = logging.getLogger(__name__)
_RETRY_S = 0.2
_OF_A_MODEL = (LoadShard, PrepareStandby, ConnectChain, ActivateChain)


class CoordinatorPort(Protocol):
    """The coordinator, as those see it who act for it. `apply` belongs to its thread; the others to any."""

    @property
    def state(self) -> ClusterState: ...

    @property
    def has_stood_down(self) -> bool:
        """Nothing is decided any more."""
        ...

    def now_s(self) -> float: ...

    def apply(self, event: Event) -> None: ...

    def post(self, event: Event) -> None:
        """Apply this when its turn comes."""
        ...

    def later(self, task: Callable[[], None]) -> None:
        """Run this in the coordinator's thread."""
        ...


class ActionExecutor:
    """Called in the coordinator's thread."""

    def __init__(
        self,
        truth: CoordinatorPort,
        origin: Peer,
        own: DriverPort,
        members: NodeRegistry,
        drivers: RemoteDrivers,
        doubts: LinkBreaker,
        wire: str,
    ) -> None:
        self._truth = truth
        self._origin = origin
        self._own = own
        self._members = members
        self._drivers = drivers
        self._doubts = doubts
        self._wire = wire
        self._started: set[tuple[object, ...]] = set()
        self._connecting: set[tuple[object, ...]] = set()
        self._wirings: dict[str, ConnectedEpoch] = {}
        self._shapes: dict[str, tuple[StageAddress, ...]] = {}
        """The last shape of each chain that its driver has used."""
        self._closing = threading.Event()

    def close(self) -> None:
        self._closing.set()

    def begin(self, actions: Iterable[Action]) -> None:
        """Start what is not under way yet; what is no longer asked for may be asked for again later."""
        due: set[tuple[object, ...]] = set()
        for action in actions:
            if isinstance(action, _OF_A_MODEL) and not self._own.serves(action.model):
                continue  # the journal remembers it, but it has not been opened yet
            due.add(action.key)
            if action.key not in self._started:
                self._started.add(action.key)
                self._start(action)
        self._started &= due

    def report_again(self) -> None:
        """Somebody has come who was not there when the others were told what cannot be served."""
        self._started = {key for key in self._started if key[0] != "unservable"}

    def _start(self, action: Action) -> None:
        log.info("doing: %s", as_json(action))
        if isinstance(action, LoadShard | PrepareStandby):
            self._load(action)
        elif isinstance(action, UnloadShard):
            self._unload(action)
        elif isinstance(action, ConnectChain):
            if action.key in self._connecting:
                return  # it was not asked for in between, but goes on
            self._connecting.add(action.key)
            before = self._shapes.get(action.chain, ())
            threading.Thread(target=self._connect, args=(action, before), name="connect", daemon=True).start()
        elif isinstance(action, ActivateChain):
            self._activate(action)
        elif isinstance(action, AttachDriver | ShareMemory | DetachDriver):
            self._drivers.start(action, self._wirings[action.chain], self._driver_done)
        elif isinstance(action, FenceChain):
            self._fence(action)
        elif isinstance(action, ReleaseNode):
            left = NodeLeft(action.node, action.incarnation)
            self._tell(action, action.node, Leave(), left)
        elif isinstance(action, ReportUnservable):
            chains = self._truth.state.live_chains(action.model)
            broken = [each.id for each in chains if each.status == "broken"]
            self._own.report_unservable(action, broken)
            self._drivers.report_unservable(action, broken)

    def _load(self, action: LoadShard | PrepareStandby) -> None:
        model = self._truth.state.models[action.model].model
        sources = [Peer(source.node, source.address) for source in action.sources]
        command = LoadLayers(
            chain=action.chain,
            model=action.model,
            start=action.start,
            stop=action.stop,
            kv_tokens=model.kv_tokens,
            context_length=model.context_length,
            sources=[*sources, self._origin],
        )
        self._tell(action, action.node, command)

    def _unload(self, action: UnloadShard) -> None:
        done = ShardUnloaded(action.node, action.incarnation, action.chain, action.start, action.stop)
        self._tell(action, action.node, UnloadLayers(action.chain, action.start, action.stop), done)

    def _tell(self, action: Action, node: str, command: NodeCommand, done: Event | None = None) -> None:
        """Have a node carry out an action, then note that it is done; if it is not, it may be asked for again."""

        def answered(answer: CommandReply) -> None:
            if answer.error:
                self._truth.later(lambda: self._started.discard(action.key))
            elif done is not None:
                self._truth.post(done)

        self._members.command(node, command, answered)

    def _activate(self, action: ActivateChain) -> None:
        wiring = self._wirings[action.chain]
        try:
            known = (
                None if wiring.resumption is None else wiring.resumption.within(self._own.session_namespace)
            )
            self._own.activate_chain(action, wiring.kv_tokens, known)
        except ShardComputeError as error:
            # Its link ended, which has been reported and leads to a new epoch.
            log.warning("chain %s cannot be used: %s", action.chain, error)
            self._try_again(action)
            return
        self._shapes[action.chain] = wiring.stages
        self._doubts.worked([stage.node for stage in wiring.stages])
        self._truth.post(ChainReady(action.chain, action.epoch, wiring.kv_tokens))
        for node in self._truth.state.nodes.values():
            self.dismiss(node, action.chain)

    def _driver_done(self, action: DriverAction, event: Event | None) -> None:
        if event is None:
            self._try_again(action)
        else:
            self._truth.apply(event)

    def _try_again(self, action: Action) -> None:
        threading.Timer(_RETRY_S, self._truth.later, [lambda: self._started.discard(action.key)]).start()

    def dismiss(self, node: Node, chain: str) -> None:
        """A node that holds a shard of a chain in reserve may have been one of its stages before."""
        known = self._truth.state.chains.get(chain)
        holds = any(shard.chain == chain for shard in node.shards)
        if known is not None and holds and node.is_live and node.id not in known.nodes:
            order = FenceOff(chain, known.epoch - 1, forgets=True)
            self._members.command(node.id, order, lambda _: None)

    def retire(self, chain: str) -> None:
        self._shapes.pop(chain, None)
        self._wirings.pop(chain, None)
        self._own.retire_chain(chain)
        self._drivers.retire(chain)

    def _fence(self, action: FenceChain) -> None:
        self._own.fence_chain(action.chain, action.epoch)
        self._drivers.fence(action.chain, action.epoch)
        for node in action.nodes:
            self._members.command(node, FenceOff(action.chain, action.epoch), lambda _: None)
        self._truth.post(ChainFenced(action.chain, action.epoch))

    def _connect(self, action: ConnectChain, before: tuple[StageAddress, ...]) -> None:
        """In a thread, because it waits for others."""
        try:
            wire_of = partial(wire_between, self._truth.state, self._wire)
            resumption = connect_epoch(action, before, self._own, self._members.ask, wire_of)
        except ShardComputeError as error:
            log.warning("chain %s could not be connected: %s", action.chain, error.message)
            self._closing.wait(_RETRY_S)
            self._truth.later(lambda: self._not_connected(action))
            return
        kept = "lost" if resumption is None else "kept"
        log.info("chain %s, epoch %d: connected, sessions %s", action.chain, action.epoch, kept)
        self._truth.later(lambda: self._connected(action, resumption))

    def _connected(self, action: ConnectChain, resumption: Resumption | None) -> None:
        self._connecting.discard(action.key)
        self._started.discard(action.key)
        self._wirings[action.chain] = ConnectedEpoch(
            action.epoch, action.stages, action.kv_tokens, resumption
        )
        self._truth.apply(ChainConnected(action.chain, action.epoch))

    def _not_connected(self, action: ConnectChain) -> None:
        """Unless somebody has reported the broken link already, try again in a new epoch."""
        self._connecting.discard(action.key)
        chain = self._truth.state.chains.get(action.chain)
        if chain is not None and chain.epoch == action.epoch and not chain.is_interrupted:
            self._truth.apply(LinkBroken(self._origin.node, action.stages[0].node, self._truth.now_s()))


def as_json(value: object) -> str:
    return msgspec.json.encode(value).decode()
