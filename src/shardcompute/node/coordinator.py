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
from dataclasses import dataclass
from typing import Protocol

import msgspec

from shardcompute.control import apply, needs_rejoin, next_actions
from shardcompute.control.actions import (
    Action,
    ActivateChain,
    ConnectChain,
    FenceChain,
    LoadShard,
    PrepareStandby,
    Record,
    ReleaseNode,
    ReportUnservable,
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
    NodeMeasured,
    NodeSeen,
    ShardFailed,
    ShardLoaded,
    ShardProgressed,
    ShardUnloaded,
    decode_event,
    encode_event,
    is_journalled,
)
from shardcompute.control.memberships import next_incarnation
from shardcompute.control.state import COORDINATOR, ClusterState
from shardcompute.core.errors import LinkError, ShardComputeError
from shardcompute.core.sparing_log import SparingLog
from shardcompute.node.claims import judge_join, judge_report
from shardcompute.node.commands import (
    Connect,
    Connected,
    FenceOff,
    Leave,
    Load,
    Peer,
    Probe,
    Unload,
    WorkerCommand,
    decode_connected,
    encode_command,
)
from shardcompute.node.driver import Resumption
from shardcompute.node.journal import Journal
from shardcompute.node.repair import plan_repair
from shardcompute.wire import Link, LinkPump, Message, Refused
from shardcompute.wire.control import Answer, Command, Happened, Heartbeat, Register, Registered

log = logging.getLogger(__name__)
_TICK_S = 0.1
_CONNECT_TIMEOUT_S = 5.0
_EXPEL_TIMEOUT_S = 5.0
_MOST_REASON_CHARACTERS = 1000
_REPORTABLE = (LinkBroken, LinkMeasured, NodeMeasured, ShardFailed, ShardLoaded, ShardProgressed)


class DriverSide(Protocol):
    """What the coordinator asks of the driver that lives beside it."""

    url: str

    def open_chain(self, action: ConnectChain) -> None:
        """Dial the first stage. Raises LinkError."""
        ...

    def activate_chain(
        self, action: ActivateChain, state: ClusterState, resumption: Resumption | None
    ) -> None: ...

    def fence_chain(self, chain: str, epoch: int) -> None: ...

    def report_unservable(self, action: ReportUnservable) -> None: ...


@dataclass(slots=True)
class _Member:
    """A node with an open control link."""

    node: str
    incarnation: int
    pump: LinkPump


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
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.node = node
        self._weights_url = weights_url
        self._journal = journal
        self._driver = driver
        self._revocations = revocations
        self._clock = clock
        self._events: queue.SimpleQueue[Event | Callable[[], None] | None] = queue.SimpleQueue()
        self._sparing = SparingLog(log)
        self._state = self._replay(initial)
        self._members: dict[str, _Member] = {}
        self._started: set[tuple[object, ...]] = set()
        self._answers: dict[int, Callable[[Answer], None]] = {}
        self._shapes: dict[str, tuple[StageAddress, ...]] = {}
        self._resumptions: dict[str, Resumption | None] = {}
        self._commands = 0
        self._lock = threading.Lock()
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
        self._events.put(None)
        self._thread.join()
        for member in list(self._members.values()):
            member.pump.close()

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
            self.post(NodeSeen(node, message.incarnation, self._clock()))
        elif isinstance(message, Happened):
            self._take_event(node, decode_event(message.event))
        elif isinstance(message, Answer):
            with self._lock:
                done = self._answers.pop(message.number, None)
            if done is not None:
                done(message)

    def _take_registration(self, node: str, pump: LinkPump, event: Event) -> None:
        reason: str | None = "a node may only register itself"
        if isinstance(event, NodeJoined) and event.node == node:
            reason = judge_join(event)
            if reason is None:
                self._events.put(lambda: self._register(event, pump))
                return
        self._sparing.warning(node, "%s was not registered: %s", node, reason)
        pump.offer(Refused(f"This node is not registered: {reason}"), timeout_s=1.0)

    def _take_event(self, node: str, event: Event) -> None:
        """A node may report what it did or saw itself, nothing else; times are ours."""
        if not isinstance(event, _REPORTABLE):
            self._sparing.warning(
                node, "%s reported a %s, which is not its business", node, type(event).__name__
            )
            return
        if isinstance(event, LinkMeasured):
            reporter = node if node in (event.a, event.b) else event.a
        else:
            reporter = event.reporter if isinstance(event, LinkBroken) else event.node
        if reporter != node:
            self._sparing.warning(node, "%s spoke for %.40r", node, reporter)
            return
        reason = judge_report(event)
        if isinstance(event, LinkMeasured) and not {event.a, event.b} <= {self.node, *self._state.nodes}:
            reason = "it names a node that nobody knows"
        if reason is not None:
            self._sparing.warning(node, "%s reported a strange %s: %s", node, type(event).__name__, reason)
            return
        if isinstance(event, ShardFailed):
            event = msgspec.structs.replace(event, reason=event.reason[:_MOST_REASON_CHARACTERS])
        if isinstance(event, LinkBroken | ShardFailed):
            event = msgspec.structs.replace(event, now_s=self._clock())
        self.post(event)

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

    def _handle(self, item: Event | Callable[[], None]) -> None:
        """Whatever goes wrong with one event, the cluster goes on."""
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
        if self._state is not before:
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
            threading.Thread(target=self._connect, args=(action,), name="connect", daemon=True).start()
        elif isinstance(action, ActivateChain):
            self._activate(action)
        elif isinstance(action, FenceChain):
            self._fence(action)
        elif isinstance(action, ReleaseNode):
            self._command(
                action.node, Leave(), lambda _: self.post(NodeLeft(action.node, action.incarnation))
            )
        elif isinstance(action, ReportUnservable):
            self._driver.report_unservable(action)

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
        )
        self._command(action.node, command, lambda answer: self._retry(action, answer.error))

    def _unload(self, action: UnloadShard) -> None:
        done = ShardUnloaded(action.node, action.incarnation, action.chain, action.start, action.stop)
        command = Unload(action.chain, action.start, action.stop)
        self._command(action.node, command, lambda _: self.post(done))

    def _activate(self, action: ActivateChain) -> None:
        try:
            self._driver.activate_chain(action, self._state, self._resumptions.pop(action.chain, None))
        except ShardComputeError as error:
            log.warning("chain %s cannot be used: %s", action.chain, error)
            return
        self.post(ChainReady(action.chain, action.epoch))

    def _fence(self, action: FenceChain) -> None:
        self._driver.fence_chain(action.chain, action.epoch)
        for node in action.nodes:
            self._command(node, FenceOff(action.chain, action.epoch), lambda _: None)
        self.post(ChainFenced(action.chain, action.epoch))

    def _connect(self, action: ConnectChain) -> None:
        """Tell all stages, then dial the first; in a thread, because it waits."""
        repair = plan_repair(self._shapes.get(action.chain, ()), action.stages)
        ring = [*((stage.node, stage.address) for stage in action.stages), (action.driver, self._driver.url)]
        waiting = []
        for index, stage in enumerate(action.stages):
            command = Connect(
                chain=action.chain,
                epoch=action.epoch,
                start=stage.start,
                stop=stage.stop,
                next_node=ring[index + 1][0],
                next_url=ring[index + 1][1],
                previous_node=ring[index - 1][0],
                driver_node=action.driver,
                driver_url=self._driver.url,
                is_last=index == len(action.stages) - 1,
                keeps_sessions=repair is not None and index not in repair.new,
                replays=repair is not None and index + 1 in repair.new,
            )
            waiting.append((stage.node, self._ask(stage.node, command)))
        try:
            connected = [self._await(node, answer) for node, answer in waiting]
            self._driver.open_chain(action)
        except ShardComputeError as error:
            log.warning("chain %s could not be connected: %s", action.chain, error.message)
            self._events.put(lambda: self._started.discard(action.key))
            return
        resumption = None if repair is None else repair.resumption(connected)
        log.info("chain %s connected, sessions %s", action.chain, "lost" if resumption is None else "kept")
        self._events.put(lambda: self._connected(action, resumption))

    def _connected(self, action: ConnectChain, resumption: Resumption | None) -> None:
        self._shapes[action.chain] = action.stages
        self._resumptions[action.chain] = resumption
        self._apply(ChainConnected(action.chain, action.epoch))

    def _await(self, node: str, answer: queue.SimpleQueue[Answer]) -> Connected:
        try:
            answered = answer.get(timeout=_CONNECT_TIMEOUT_S)
        except queue.Empty:
            raise LinkError(f"{node} did not answer in time") from None
        if answered.error:
            raise LinkError(f"{node}: {answered.error}")
        return decode_connected(answered.result)

    # Members

    def _register(self, event: NodeJoined, pump: LinkPump) -> None:
        incarnation = next_incarnation(self._state, event.node)
        former = self._members.pop(event.node, None)
        if former is not None:
            former.pump.link.close()
        self._members[event.node] = _Member(event.node, incarnation, pump)
        self._apply(msgspec.structs.replace(event, incarnation=incarnation, now_s=self._clock()))
        interval = self._state.health.heartbeat_interval_s
        self._offer(pump, Registered(incarnation, interval, self._revocations()))
        others = [
            Peer(n.id, n.address) for n in self._state.nodes.values() if n.is_live and n.id != event.node
        ]
        self._command(event.node, Probe([Peer(self.node, self._weights_url), *others]), lambda _: None)

    def expel(self, node: str) -> None:
        """A node was revoked: tell it, forget it, and give the others the news. Returns once they were sent."""
        done = threading.Event()
        self._events.put(lambda: self._expel(node))
        self._events.put(done.set)
        done.wait(_EXPEL_TIMEOUT_S)

    def _expel(self, node: str) -> None:
        member = self._members.pop(node, None)
        if member is not None:
            self._offer(member.pump, Refused("This node has been removed from the cluster"))
            member.pump.close(drain_s=_TICK_S)
        known = self._state.nodes.get(node)
        if known is not None:
            self._apply(NodeLeft(node, known.incarnation))
        interval = self._state.health.heartbeat_interval_s
        for each in self._members.values():
            self._offer(each.pump, Registered(each.incarnation, interval, self._revocations()))

    def _link_ended(self, node: str, pump: LinkPump) -> None:
        member = self._members.get(node)
        if member is not None and member.pump is pump:
            del self._members[node]
            self._apply(LinkBroken(COORDINATOR, node, self._clock()))

    def _command(self, node: str, command: WorkerCommand, done: Callable[[Answer], None]) -> None:
        member = self._members.get(node)
        if member is None:
            return
        with self._lock:
            self._commands += 1
            number = self._commands
            self._answers[number] = done
        self._offer(member.pump, Command(number, encode_command(command)))

    def _ask(self, node: str, command: WorkerCommand) -> queue.SimpleQueue[Answer]:
        answer: queue.SimpleQueue[Answer] = queue.SimpleQueue()
        self._command(node, command, answer.put)
        return answer

    def _retry(self, action: Action, error: str) -> None:
        """A load failed: when the control room asks again, try again."""
        if error:
            self._events.put(lambda: self._started.discard(action.key))

    def _offer(self, pump: LinkPump, message: Message) -> None:
        try:
            pump.offer(message, timeout_s=1.0)
        except LinkError as error:
            log.info("%s did not get a %s: %s", pump.link.peer, type(message).__name__, error.message)

    def _replay(self, state: ClusterState) -> ClusterState:
        count = 0
        for line in self._journal.events():
            try:
                state = apply(state, decode_event(line))
            except (msgspec.DecodeError, RecursionError) as error:
                self._sparing.warning(
                    "journal", "event %d of the journal cannot be read: %s", count + 1, error
                )
            count += 1
        if count:
            log.info("%d events of the journal replayed", count)
        return state


def _words(value: object) -> str:
    return msgspec.json.encode(value).decode()
