"""Executes what was decided: each action is started once, and what it brings about comes back as events.

Kept here is only what is in flight: which actions are under way, and which sessions an epoch that has just been
connected can go on with.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from functools import partial

import msgspec

from shardcompute.control.actions import (
    Action,
    ActivateChain,
    AttachDriver,
    ConnectChain,
    CopyKv,
    DetachDriver,
    FenceChain,
    LoadShard,
    ProbeLink,
    ReleaseNode,
    ReportProgress,
    ReportUnservable,
    RetireChain,
    SearchLayout,
    SeedWeights,
    ShareMemory,
    UnloadShard,
    identity,
)
from shardcompute.control.events import (
    ChainConnected,
    ChainFenced,
    ChainReady,
    ChainReleased,
    Event,
    KvCopied,
    LinkBroken,
    LinkProbed,
    NodeLeft,
    SeedingFailed,
    ShardFailed,
    ShardUnloaded,
    StageStalled,
    WeightsSeeded,
)
from shardcompute.control.state import Node
from shardcompute.core.errors import ShardComputeError
from shardcompute.core.fields import shorten
from shardcompute.core.phases import phase
from shardcompute.node.coordinator.chain_connector import (
    ConnectedEpoch,
    StuckStageError,
    attach_command,
    change_of,
    connect_epoch,
    wire_between,
)
from shardcompute.node.coordinator.coordinator_port import CoordinatorPort
from shardcompute.node.coordinator.driver_attachments import DriverAction, DriverAttachments
from shardcompute.node.coordinator.driver_port import DriverPorts
from shardcompute.node.coordinator.kv_copies import KvCopies, KvCopy
from shardcompute.node.coordinator.layout_search import LayoutSearch
from shardcompute.node.coordinator.node_registry import NodeRegistry
from shardcompute.node.rpc.commands import (
    FenceOff,
    HoldLayers,
    Leave,
    LoadLayers,
    NodeCommand,
    Peer,
    Probe,
    Progressed,
    Retire,
    UnloadLayers,
    Unservable,
)
from shardcompute.wire.control import CommandReply

log = logging.getLogger(__name__)
_RETRY_S = 0.2
_LOAD_QUIET_S = 900.0
"""So long a load may come no further: every fetch has a deadline of its own, and opening a shard takes a while."""
FENCING = "fence of an epoch"
CONNECTING = "connection of an epoch"
ACTIVATING = "activation of an epoch"
"""Phases of a change of layout, during which answers wait; `bench migration` takes pauses apart by them."""
_OF_A_MODEL = (LoadShard, SeedWeights, ConnectChain, ActivateChain)


class ActionExecutor:
    """Called in the coordinator's thread."""

    def __init__(
        self,
        coordinator: CoordinatorPort,
        origin: Peer,
        registry: NodeRegistry,
        ports: DriverPorts,
        attachments: DriverAttachments,
        wire: str,
    ) -> None:
        self._coordinator = coordinator
        self._origin = origin
        self._registry = registry
        self._ports = ports
        self._attachments = attachments
        self._wire = wire
        self._layouts = LayoutSearch(coordinator)
        self._under_way: set[Action] = set()
        self._connecting: set[Action] = set()
        self._epochs: dict[str, ConnectedEpoch] = {}
        self._kv_copies = KvCopies()

    def begin(self, actions: Iterable[Action]) -> None:
        """Start what is not under way yet; what is no longer asked for may be asked for again later."""
        due: set[Action] = set()
        for action in actions:
            if isinstance(action, _OF_A_MODEL) and not self._ports.own.serves(action.model):
                continue  # the journal remembers it, but it has not been opened yet
            same = identity(action)
            due.add(same)
            if same not in self._under_way:
                self._under_way.add(same)
                self._start(action)
        self._under_way &= due

    def _start(self, action: Action) -> None:
        log.info("doing: %s", as_json(action))
        match action:
            case LoadShard():
                self._load(action)
            case SeedWeights():
                self._seed(action)
            case UnloadShard(node, incarnation, chain, start, stop, tensor):
                done = ShardUnloaded(node, incarnation, chain, start, stop, tensor)
                self._command(action, node, UnloadLayers(chain, start, stop, tensor), done)
            case CopyKv():
                self._coordinator.background(partial(self._copy_kv, action))
            case ConnectChain():
                self._begin_to_connect(action)
            case ActivateChain():
                self._activate(action)
            case AttachDriver() | ShareMemory() | DetachDriver():
                self._attachments.start(action, self._epochs.get(action.chain), self._driver_done)
            case FenceChain():
                self._fence(action)
            case RetireChain(chain):
                self._epochs.pop(chain, None)
                self._ports.tell_all(Retire(chain))
                self._coordinator.post(ChainReleased(chain))
            case ProbeLink():
                self._probe(action)
            case SearchLayout():
                self._layouts.start(action)
            case ReleaseNode(node, incarnation):
                self._command(action, node, Leave(), NodeLeft(node, incarnation))
            case ReportUnservable():
                self._report(action)
            case ReportProgress():
                told = Progressed(action.chain, action.epoch, action.fraction, action.waits_for)
                for driver in action.drivers:
                    self._ports.find(driver).tell(told)

    def _load(self, action: LoadShard) -> None:
        model = self._coordinator.state.models[action.model].model
        sources = [Peer(source.node, source.address) for source in action.sources]
        command = LoadLayers(
            chain=action.chain,
            model=action.model,
            start=action.start,
            stop=action.stop,
            kv_tokens=model.kv_tokens,
            kv_type=model.kv_type,
            backend=model.backend,
            context_length=model.context_length,
            sources=[*sources, self._origin],
            tensor=action.tensor,
        )
        self._command(action, action.node, command)
        self._coordinator.after(_LOAD_QUIET_S, lambda: self._check_load(action, -1.0))

    def _seed(self, action: SeedWeights) -> None:
        command = HoldLayers(
            model=action.model,
            start=action.start,
            stop=action.stop,
            sources=[*(Peer(source.node, source.address) for source in action.sources), self._origin],
            bytes_per_s=action.bytes_per_s,
        )
        node, life = action.node, action.incarnation

        def answered(answer: CommandReply) -> None:
            if answer.error:
                now_s = self._coordinator.now_s()
                self._coordinator.post(SeedingFailed(node, life, shorten(answer.error, 300), now_s))
            else:
                self._coordinator.post(WeightsSeeded(node, life, action.model, action.start, action.stop))

        self._registry.command(node, command, answered)

    def _check_load(self, action: LoadShard, fraction: float) -> None:
        """A load that came no further since it was looked at last hangs: others are tried, and this one later."""
        node = self._coordinator.state.nodes.get(action.node)
        if node is None or not node.is_live or node.incarnation != action.incarnation:
            return
        if identity(action) not in self._under_way:
            return  # it is done, or nobody wants it any more
        place = (action.chain, action.start, action.stop, action.tensor)
        now = next((each.fraction for each in node.loading if each.place == place), 0.0)
        if now > fraction:
            self._coordinator.after(_LOAD_QUIET_S, lambda: self._check_load(action, now))
            return
        reason = f"loading has come no further than {now:.0%} for {_LOAD_QUIET_S / 60:.0f} minutes"
        log.warning("%s: %s; its log says why", node.name, reason)
        self._coordinator.apply(
            ShardFailed(
                node.id,
                node.incarnation,
                action.chain,
                action.model,
                action.start,
                action.stop,
                reason,
                self._coordinator.now_s(),
                tensor=action.tensor,
            )
        )

    def _command(self, action: Action, node: str, command: NodeCommand, done: Event | None = None) -> None:
        """Have a node carry out an action, then note that it is done; if it is not, it may be asked for again."""

        def answered(answer: CommandReply) -> None:
            if answer.error:
                self._coordinator.later(lambda: self._forget(action))
            elif done is not None:
                self._coordinator.post(done)

        self._registry.command(node, command, answered)

    def _forget(self, action: Action) -> None:
        self._under_way.discard(identity(action))

    def _try_again(self, action: Action) -> None:
        self._coordinator.after(_RETRY_S, lambda: self._forget(action))

    def _fence(self, action: FenceChain) -> None:
        command = FenceOff(action.chain, action.epoch)
        with phase(FENCING, is_brief=True):
            self._ports.tell_all(command)
            # Whoever can host a driver was told of its stages with it.
            for node in set(action.nodes) - {port.node for port in self._ports.all()}:
                self._registry.command(node, command, lambda _: None)
        self._coordinator.post(ChainFenced(action.chain, action.epoch))

    def _probe(self, action: ProbeLink) -> None:
        node = self._coordinator.state.nodes.get(action.peer)
        peer = self._origin if node is None else Peer(node.id, node.address)

        def probed() -> None:
            self._coordinator.apply(LinkProbed(action.node, action.peer, self._coordinator.now_s()))

        self._registry.command(
            action.node, Probe([peer] * action.times), lambda _: self._coordinator.later(probed)
        )

    def _report(self, action: ReportUnservable) -> None:
        chains = self._coordinator.state.live_chains(action.model)
        broken = [chain.id for chain in chains if chain.status == "broken"]
        command = Unservable(action.model, action.missing_bytes, list(action.reasons), broken)
        self._ports.find(action.driver).tell(command)

    # Epochs

    def _copy_kv(self, action: CopyKv) -> None:
        """In the background, because it waits for others."""
        copy = self._kv_copies.run(action, self._coordinator.state, self._registry, self._home())
        self._coordinator.later(lambda: self._kv_copied(action, copy))

    def _home(self) -> Peer:
        """Where results of chains go."""
        own = self._ports.own
        return Peer(own.node, own.url)

    def _kv_copied(self, action: CopyKv, copy: KvCopy | None) -> None:
        self._kv_copies.keep(action.chain, copy)
        stages = tuple(stage.assignment for stage in action.target)
        self._coordinator.apply(KvCopied(action.chain, action.epoch, stages))

    def _begin_to_connect(self, action: ConnectChain) -> None:
        if identity(action) not in self._connecting:  # else it was not asked for in between, but goes on
            self._connecting.add(identity(action))
            kv_copy = self._kv_copies.number_for(action)
            self._coordinator.background(partial(self._connect, action, kv_copy))

    def _connect(self, action: ConnectChain, kv_copy: int) -> None:
        """In the background, because it waits for others."""
        try:
            state = self._coordinator.state
            wire_of, change = partial(wire_between, state, self._wire), change_of(state, action)
            with phase(CONNECTING, is_brief=True):
                connected = connect_epoch(action, self._ports.own, self._registry, wire_of, change, kv_copy)
        except StuckStageError as stuck:
            log.warning("chain %s could not be connected: %s", action.chain, stuck)
            node, reason = stuck.node, stuck.reason
            self._coordinator.later(lambda: self._stuck(action, node, reason))
            return
        except ShardComputeError as error:
            log.warning("chain %s could not be connected: %s", action.chain, error)
            self._coordinator.after(_RETRY_S, lambda: self._not_connected(action))
            return
        kept = "lost" if connected.resumption is None else "moved" if kv_copy else "kept"
        log.info("chain %s, epoch %d: connected, sessions %s", action.chain, action.epoch, kept)
        self._coordinator.later(lambda: self._connected(action, connected))

    def _connected(self, action: ConnectChain, connected: ConnectedEpoch) -> None:
        self._connecting.discard(identity(action))
        self._forget(action)
        former = self._epochs.get(action.chain)
        # The same epoch may be connected again, where a stage had lost its shard meanwhile: what it knows now counts.
        if former is None or former.epoch <= connected.epoch:
            self._epochs[action.chain] = connected
        self._coordinator.apply(ChainConnected(action.chain, action.epoch, action.kv_tokens))

    def _not_connected(self, action: ConnectChain) -> None:
        """Unless somebody has reported the broken link already, try again in a new epoch."""
        self._connecting.discard(identity(action))
        chain = self._coordinator.state.chains.get(action.chain)
        if chain is not None and chain.epoch == action.epoch and not chain.is_interrupted:
            first, now_s = action.stages[0].node, self._coordinator.now_s()
            self._coordinator.apply(LinkBroken(self._origin.node, first, now_s))

    def _stuck(self, action: ConnectChain, id: str, reason: str) -> None:
        """A stage does not answer because its computing thread is stuck: another machine is to take its place."""
        self._connecting.discard(identity(action))
        node = self._coordinator.state.nodes.get(id)
        if node is not None:
            now_s = self._coordinator.now_s()
            self._coordinator.apply(StageStalled(id, node.incarnation, action.chain, reason, now_s))

    def _activate(self, action: ActivateChain) -> None:
        own, connected = self._ports.own, self._epochs.get(action.chain)
        if connected is None:
            command = attach_command(action)
        else:
            known = connected.known_of(own.session_namespace)
            command = attach_command(action, known, connected.change, connected.limits)
        try:
            with phase(ACTIVATING, is_brief=True):
                own.ask(command)
        except ShardComputeError as error:
            # Its link ended, which has been reported and leads to a new epoch.
            log.warning("chain %s cannot be used: %s", action.chain, error)
            self._try_again(action)
            return
        # At once: from now on the sessions are where this shape has them.
        self._coordinator.apply(ChainReady(action.chain, action.epoch))
        for node in self._coordinator.state.nodes.values():
            self.forget_sessions(node, action.chain)

    def forget_sessions(self, node: Node, chain: str) -> None:
        """A node that holds a shard of a chain in reserve may have been one of its stages before: others go on with
        the sessions."""
        known = self._coordinator.state.chains.get(chain)
        holds = any(shard.chain == chain for shard in node.shards)
        if known is not None and holds and node.is_live and node.id not in known.members:
            command = FenceOff(chain, known.epoch - 1, forgets=True)
            self._registry.command(node.id, command, lambda _: None)

    def _driver_done(self, action: DriverAction, event: Event | None) -> None:
        if event is None:
            self._try_again(action)
        else:
            self._coordinator.apply(event)


def as_json(value: object) -> str:
    return msgspec.json.encode(value).decode()
