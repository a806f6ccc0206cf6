"""The control plane's shell: events in, actions out, one thread that decides.

Links and timers put events into one queue; a single thread journals and applies them, asks the control room what
to do next, and starts each action once. What actions bring about comes back as events. Nothing here computes
tensors; token traffic never passes through.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from functools import partial

import msgspec

from shardcompute.control import apply, needs_rejoin, next_actions
from shardcompute.control.actions import (
    Action,
    ActivateChain,
    AttachDriver,
    ConnectChain,
    DetachDriver,
    FenceChain,
    LoadShard,
    PrepareStandby,
    Record,
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
    CoordinatorStarted,
    Event,
    LinkBroken,
    LinkMeasured,
    NodeJoined,
    NodeLeft,
    NodeSeen,
    ShardFailed,
    ShardUnloaded,
    decode_event,
    encode_event,
    is_journalled,
)
from shardcompute.control.memberships import next_incarnation
from shardcompute.control.state import COORDINATOR, ClusterState, Node
from shardcompute.core.errors import LinkError, ShardComputeError, UsageError
from shardcompute.core.sparing_log import SparingLog
from shardcompute.node.chain_port import Resumption
from shardcompute.node.claims import judge_join, judge_role, sift_report
from shardcompute.node.commands import (
    FenceOff,
    Leave,
    Load,
    NodeCommand,
    Peer,
    Probe,
    Unload,
)
from shardcompute.node.driver_members import Brief, DriverAction, DriverMembers
from shardcompute.node.driver_side import DriverSide
from shardcompute.node.journal import Journal
from shardcompute.node.link_doubts import LinkDoubts
from shardcompute.node.members import Member, Members
from shardcompute.node.recollection import recollect
from shardcompute.node.rewiring import Wiring, rewire
from shardcompute.node.session_ranges import resumption_within
from shardcompute.node.steady_clock import SteadyClock
from shardcompute.node.wire_choice import EXACT, wire_between
from shardcompute.security.certificates import read_peer
from shardcompute.wire import Link, LinkPump, Message, Refused
from shardcompute.wire.control import Answer, Happened, Heartbeat, Register, Registered

log = logging.getLogger(__name__)
_TICK_S = 0.1
_RETRY_S = 0.2
_EXPEL_TIMEOUT_S = 5.0
_OF_A_MODEL = (LoadShard, PrepareStandby, ConnectChain, ActivateChain)


class Coordinator:
    """Owns the cluster's state. `post` may be called from any thread; everything else happens in its own."""

    def __init__(
        self,
        node: str,
        weights_url: str,
        journal: Journal,
        driver: DriverSide,
        *,
        initial: ClusterState,
        revocations: Callable[[], bytes] = lambda: b"",
        brief: Callable[[], Brief] = lambda: Brief([], b""),
        wire: str = EXACT,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.node = node
        self._weights_url = weights_url
        self._journal = journal
        self._driver = driver
        self._revocations = revocations
        self._wire = wire
        self._clock = SteadyClock(clock)
        self._events: queue.SimpleQueue[Event | Callable[[], None] | None] = queue.SimpleQueue()
        self._sparing = SparingLog(log)
        self._state = recollect(journal, initial)
        self._members = Members()
        origin = Peer(node, weights_url)
        self._doubts = LinkDoubts(origin)
        self._drivers = DriverMembers(
            driver, origin, self._members, lambda: self._state, brief, self._events.put
        )
        self._started: set[tuple[object, ...]] = set()
        self._connecting: set[tuple[object, ...]] = set()
        self._wirings: dict[str, Wiring] = {}
        self._shapes: dict[str, tuple[StageAddress, ...]] = {}
        """The last shape of each chain that its driver has used."""
        self._closing = threading.Event()
        self._listeners: list[Callable[[ClusterState], None]] = []
        self._thread = threading.Thread(target=self._run, name="coordinator", daemon=True)

    @property
    def state(self) -> ClusterState:
        """The newest state; a frozen value."""
        return self._state

    def start(self) -> None:
        self._thread.start()
        self.post(CoordinatorStarted(self._clock()))

    def post(self, event: Event) -> None:
        self._events.put(event)

    def listen(self, listener: Callable[[ClusterState], None]) -> None:
        """Call `listener`, in the coordinator's thread, with each new state."""
        self._listeners.append(listener)

    def close(self) -> None:
        self._closing.set()
        self._events.put(None)
        self._thread.join()
        self._members.close()

    # Control links

    def serve_control(self, link: Link) -> None:
        """Serve one node's control link until it ends."""
        ended = threading.Event()
        reasons: list[LinkError] = []

        def end(error: LinkError) -> None:
            reasons.append(error)
            ended.set()

        pump = LinkPump(link, lambda m, _: self._take(link.peer, pump, m), end)
        pump.start()
        ended.wait()
        pump.close()
        self._sparing.info(link.peer, "the control link of %s ended: %s", link.peer, reasons[0].message)
        self._events.put(lambda: self._link_ended(link.peer, pump))

    def _take(self, node: str, pump: LinkPump, message: Message) -> None:
        if isinstance(message, Register):
            self._take_registration(node, pump, decode_event(message.event))
        elif isinstance(message, Heartbeat):
            if needs_rejoin(self._state, node, message.incarnation):
                # It was given up in the meantime: let it register again with what it holds.
                pump.link.close()
                return
            self._events.put(lambda: self._apply(NodeSeen(node, message.incarnation, self._clock())))
        elif isinstance(message, Happened):
            self._take_event(node, decode_event(message.event))
        elif isinstance(message, Answer):
            self._members.answered(pump, message)

    def _take_registration(self, node: str, pump: LinkPump, event: Event) -> None:
        reason: str | None = "a node may only register itself"
        if isinstance(event, NodeJoined) and event.node == node:
            reason = judge_join(event) or judge_role(event.role, read_peer(pump.link.certificate).roles)
            if reason is None:
                self._events.put(lambda: self._register(event, pump))
                return
        self._sparing.warning(node, "%s was not registered: %s", node, reason)
        pump.offer(Refused(f"This node is not registered: {reason}"), timeout_s=1.0)

    def _take_event(self, node: str, event: Event) -> None:
        try:
            heard = sift_report(event, node, self.node, self._state.nodes)
        except UsageError as error:
            self._sparing.warning(
                node, "a %s of %s is ignored: %s", type(event).__name__, node, error.message
            )
            return
        if isinstance(heard, LinkBroken | ShardFailed):
            self._events.put(lambda: self._apply(msgspec.structs.replace(heard, now_s=self._clock())))
        else:
            self.post(heard)

    # In the coordinator's thread

    def _run(self) -> None:
        while True:
            try:
                item = self._events.get(timeout=_TICK_S)
            except queue.Empty:
                pass
            else:
                if item is None:
                    return
                self._handle(item)
                while not self._events.empty():
                    following = self._events.get()
                    if following is None:
                        return
                    self._handle(following)
            self._handle(self._act)
            self._handle(lambda: self._doubts.probe(self._state, self._clock(), self._probe))

    def _handle(self, item: Event | Callable[[], None]) -> None:
        """Whatever goes wrong with one event, the cluster goes on."""
        lost_s = self._clock.turn()
        if lost_s:
            log.warning("the coordinator stood still for %.1f s", lost_s)
        try:
            if callable(item):
                item()
            else:
                self._apply(item)
        except Exception as error:
            self._sparing.error(type(error).__name__, "an event could not be dealt with", exc_info=True)

    def _apply(self, event: Event) -> None:
        if is_journalled(event):
            self._journal.append(encode_event(event))
        before = self._state
        self._state = apply(before, event)
        if self._state is before:
            return
        for chain in before.live_chains():
            if chain.id not in self._state.chains or not self._state.chains[chain.id].is_live:
                self._retire(chain.id)
        if isinstance(event, LinkBroken):
            self._drivers.broke(event)
        if isinstance(event, LinkMeasured) and event.is_open:
            self._doubts.opened(event.a, event.b)
        elif isinstance(event, LinkBroken) and _interrupted(self._state) - _interrupted(before):
            closed = self._doubts.broke(self._state, event)
            if closed is not None:
                self._apply(closed)
        for listener in self._listeners:
            listener(self._state)

    def _act(self) -> None:
        """Decide, and start what is not under way yet."""
        due: set[tuple[object, ...]] = set()
        for action in next_actions(self._state, self._clock()):
            if isinstance(action, Record):
                log.info("decided: %s", _words(action.event))
                self._apply(action.event)
                continue
            if isinstance(action, _OF_A_MODEL) and not self._driver.serves(action.model):
                continue  # the journal remembers it, but it has not been opened yet
            due.add(action.key)
            if action.key not in self._started:
                self._started.add(action.key)
                self._start(action)
        # What is no longer asked for may be asked for again later.
        self._started &= due

    def _start(self, action: Action) -> None:
        log.info("doing: %s", _words(action))
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
            chains = self._state.live_chains(action.model)
            broken = [each.id for each in chains if each.status == "broken"]
            self._driver.report_unservable(action, broken)
            self._drivers.report_unservable(action, broken)

    def _load(self, action: LoadShard | PrepareStandby) -> None:
        model = self._state.models[action.model].model
        sources = [Peer(source.node, source.address) for source in action.sources]
        command = Load(
            chain=action.chain,
            model=action.model,
            start=action.start,
            stop=action.stop,
            kv_tokens=model.kv_tokens,
            context_length=model.context_length,
            sources=[*sources, Peer(self.node, self._weights_url)],
            drafts=model.can_self_draft and action.start == 0 and action.stop < model.layer_count,
        )
        self._tell(action, action.node, command)

    def _unload(self, action: UnloadShard) -> None:
        done = ShardUnloaded(action.node, action.incarnation, action.chain, action.start, action.stop)
        self._tell(action, action.node, Unload(action.chain, action.start, action.stop), done)

    def _tell(self, action: Action, node: str, command: NodeCommand, done: Event | None = None) -> None:
        """Have a node carry out an action, then note that it is done; if it is not, it may be asked for again."""

        def answered(answer: Answer) -> None:
            if answer.error:
                self._events.put(lambda: self._started.discard(action.key))
            elif done is not None:
                self.post(done)

        self._members.command(node, command, answered)

    def _activate(self, action: ActivateChain) -> None:
        wiring = self._wirings[action.chain]
        try:
            known = resumption_within(wiring.resumption, self._driver.sessions)
            self._driver.activate_chain(action, wiring.kv_tokens, known)
        except ShardComputeError as error:
            # Its link ended, which has been reported and leads to a new epoch.
            log.warning("chain %s cannot be used: %s", action.chain, error)
            self._try_again(action)
            return
        self._shapes[action.chain] = wiring.stages
        self._doubts.worked([stage.node for stage in wiring.stages])
        self.post(ChainReady(action.chain, action.epoch, wiring.kv_tokens))
        for node in self._state.nodes.values():
            self._dismiss(node, action.chain)

    def _driver_done(self, action: DriverAction, event: Event | None) -> None:
        if event is None:
            self._try_again(action)
        else:
            self._apply(event)

    def _try_again(self, action: Action) -> None:
        threading.Timer(_RETRY_S, self._events.put, [lambda: self._started.discard(action.key)]).start()

    def _dismiss(self, node: Node, chain: str) -> None:
        """A node that holds a shard of a chain in reserve may have been one of its stages before."""
        known = self._state.chains.get(chain)
        holds = any(shard.chain == chain for shard in node.shards)
        if known is not None and holds and node.is_live and node.id not in known.nodes:
            order = FenceOff(chain, known.epoch - 1, forgets=True)
            self._members.command(node.id, order, lambda _: None)

    def _retire(self, chain: str) -> None:
        self._shapes.pop(chain, None)
        self._wirings.pop(chain, None)
        self._driver.retire_chain(chain)
        self._drivers.retire(chain)

    def _fence(self, action: FenceChain) -> None:
        self._driver.fence_chain(action.chain, action.epoch)
        self._drivers.fence(action.chain, action.epoch)
        for node in action.nodes:
            self._members.command(node, FenceOff(action.chain, action.epoch), lambda _: None)
        self.post(ChainFenced(action.chain, action.epoch))

    def _connect(self, action: ConnectChain, before: tuple[StageAddress, ...]) -> None:
        """In a thread, because it waits for others."""
        try:
            wire_of = partial(wire_between, self._state, self._wire)
            resumption = rewire(action, before, self._driver, self._members.ask, wire_of)
        except ShardComputeError as error:
            log.warning("chain %s could not be connected: %s", action.chain, error.message)
            self._closing.wait(_RETRY_S)
            self._events.put(lambda: self._not_connected(action))
            return
        kept = "lost" if resumption is None else "kept"
        log.info("chain %s, epoch %d: connected, sessions %s", action.chain, action.epoch, kept)
        self._events.put(lambda: self._connected(action, resumption))

    def _connected(self, action: ConnectChain, resumption: Resumption | None) -> None:
        self._connecting.discard(action.key)
        self._started.discard(action.key)
        self._wirings[action.chain] = Wiring(
            action.epoch, action.stages, action.kv_tokens, resumption, drafts=action.drafts
        )
        self._apply(ChainConnected(action.chain, action.epoch))

    def _not_connected(self, action: ConnectChain) -> None:
        """Unless somebody has reported the broken link already, try again in a new epoch."""
        self._connecting.discard(action.key)
        chain = self._state.chains.get(action.chain)
        if chain is not None and chain.epoch == action.epoch and not chain.is_interrupted:
            self._apply(LinkBroken(self.node, action.stages[0].node, self._clock()))

    # Members

    def _register(self, event: NodeJoined, pump: LinkPump) -> None:
        if event.role == "driver" and self._drivers.is_taken(event.node, event.sessions):
            self._members.offer(
                pump, Refused("Another driver numbers its sessions in the same way; start again")
            )
            return
        incarnation = next_incarnation(self._state, event.node)
        self._members.enter(Member(event.node, incarnation, pump))
        self._apply(msgspec.structs.replace(event, incarnation=incarnation, now_s=self._clock()))
        interval = self._state.health.heartbeat_interval_s
        self._members.offer(pump, Registered(incarnation, interval, self._revocations()))
        others = [
            Peer(n.id, n.address) for n in self._state.nodes.values() if n.is_live and n.id != event.node
        ]
        self._probe(event.node, Peer(self.node, self._weights_url), *others)
        if event.role == "driver":
            self._drivers.introduce(event.node)
            # It was not there when the others were told what cannot be served.
            self._started = {key for key in self._started if key[0] != "unservable"}
        for chain in {shard.chain for shard in event.shards}:
            self._dismiss(self._state.nodes[event.node], chain)

    def introduce(self) -> None:
        """There are other models, or keys, than a moment ago: tell the drivers."""
        self._events.put(self._drivers.introduce)

    def _probe(self, node: str, *peers: Peer) -> None:
        self._members.command(node, Probe(list(peers)), lambda _: None)

    def expel(self, node: str) -> None:
        """A node was revoked: tell it, forget it, and give the others the news. Returns once they were sent."""
        done = threading.Event()
        self._events.put(lambda: self._expel(node))
        self._events.put(done.set)
        done.wait(_EXPEL_TIMEOUT_S)

    def _expel(self, node: str) -> None:
        member = self._members.leave(node)
        if member is not None:
            self._members.offer(member.pump, Refused("This node has been removed from the cluster"))
            member.pump.close(drain_s=_TICK_S)
        known = self._state.nodes.get(node)
        if known is not None:
            self._apply(NodeLeft(node, known.incarnation))
        interval = self._state.health.heartbeat_interval_s
        for each in self._members.all():
            self._members.offer(each.pump, Registered(each.incarnation, interval, self._revocations()))

    def _link_ended(self, node: str, pump: LinkPump) -> None:
        if self._members.leave(node, pump) is not None:
            self._apply(LinkBroken(COORDINATOR, node, self._clock()))


def _interrupted(state: ClusterState) -> set[str]:
    return {chain.id for chain in state.chains.values() if chain.is_interrupted}


def _words(value: object) -> str:
    return msgspec.json.encode(value).decode()
