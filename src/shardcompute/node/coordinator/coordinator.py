"""The control plane's shell: events in, actions out, one thread that decides.

Links and timers put events into one queue; a single thread applies and journals them, asks the control room what
to do next, and has each action started once (`executor`). What actions bring about comes back as events, as does what
nodes report (`control_server`). All that is known of the cluster is in its state; all times are of one clock. Nothing
here computes tensors; token traffic never passes through.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import queue
import threading
import time
from collections.abc import Callable

from shardcompute.control import apply, memorable, next_actions
from shardcompute.control.actions import Action, Record
from shardcompute.control.events import (
    ChainReshaped,
    CoordinatorStarted,
    CopiesWanted,
    DriverPlaced,
    Event,
    LeasesRenewed,
    LinkBroken,
    LinkClosed,
    MoveDropped,
    MoveJudged,
    MovePlanned,
    NodeMeasured,
    RingTimed,
    StandbysChosen,
    StateRemembered,
    encode_event,
    is_journalled,
)
from shardcompute.control.state import ClusterState
from shardcompute.core.rate_limited_log import RateLimitedLog
from shardcompute.node.coordinator.clock import SteadyClock
from shardcompute.node.coordinator.control_server import (
    AnswerMeeting,
    ControlServer,
    FindStanding,
    GrantRelays,
    Lead,
    MemberAccounts,
    MemberLedger,
    SignRequest,
    refuse_to_meet,
    refuse_to_sign,
)
from shardcompute.node.coordinator.coordinator_port import Background, Task, start_thread
from shardcompute.node.coordinator.driver_attachments import Brief, DriverAttachments
from shardcompute.node.coordinator.driver_port import DriverPorts, OwnDriver
from shardcompute.node.coordinator.executor import ActionExecutor, as_json
from shardcompute.node.coordinator.journal import JournalStore, JournalWriter, replay_journal
from shardcompute.node.coordinator.liveness import Dial, LivenessProbe
from shardcompute.node.coordinator.node_registry import NodeRegistry
from shardcompute.node.coordinator.stalled_steps import StalledSteps
from shardcompute.node.rpc.commands import Peer
from shardcompute.wire import Link
from shardcompute.wire.codecs.mode import EXACT
from shardcompute.wire.control import StepOverdue

log = logging.getLogger(__name__)
_TICK_S = 0.1
_APART_AFTER_S = 1.0
"""A lease that was renewed so soon was held up on its way, no more."""


class Coordinator:
    """Owns the cluster's state. `apply` and `turn` belong to its own thread; everything else may be called from any."""

    def __init__(
        self,
        node: str,
        weights_url: str,
        journal: JournalStore,
        driver: OwnDriver,
        *,
        dial: Dial,
        initial: ClusterState,
        revocations: Callable[[], bytes] = lambda: b"",
        sign: SignRequest = refuse_to_sign,
        grant: GrantRelays = lambda peer: None,
        answer: AnswerMeeting = refuse_to_meet,
        brief: Callable[[], Brief] = lambda: Brief([], b""),
        accounts: MemberAccounts | None = None,
        lead: Callable[[], Lead] = Lead,
        ledger: MemberLedger | None = None,
        standing: FindStanding = lambda node: "",
        wire: str = EXACT,
        clock: Callable[[], float] = time.monotonic,
        background: Background = start_thread,
    ) -> None:
        self._node = node
        self._clock = SteadyClock(clock)
        self.background = background
        self._inbox: queue.SimpleQueue[Event | Task] = queue.SimpleQueue()
        self._delayed: list[tuple[float, int, Task]] = []
        self._order = itertools.count()
        self._limited_log = RateLimitedLog(log)
        replayed = replay_journal(journal, initial)
        self._state = replayed.state
        self.record = JournalWriter(
            journal,
            replayed,
            lambda: encode_event(StateRemembered(memorable(self._state))),
            reserve=journal.reserve,
            clock=self._clock,
        )
        self.registry = NodeRegistry()
        self.has_stood_down = False
        self._has_ended = False
        origin = Peer(node, weights_url)
        ports = DriverPorts(driver, self.registry, lambda: self._state)
        self._attachments = DriverAttachments(self, origin, self.registry, ports, brief)
        self._executor = ActionExecutor(self, origin, self.registry, ports, self._attachments, wire)
        self._stalled = StalledSteps(self, self.registry, ports)
        self.control_server = ControlServer(
            self,
            origin,
            self.registry,
            ports,
            self._attachments,
            self._executor,
            self._stalled,
            LivenessProbe(dial, background),
            revocations,
            sign,
            grant,
            answer,
            accounts,
            lead,
            ledger,
            standing,
        )
        self._paused_since_s: float | None = None
        """Since when nothing may be changed."""
        self._is_apart = False
        """Whether nodes were left alone, to find another coordinator."""
        self._listeners: list[Callable[[ClusterState], None]] = []
        self._thread = threading.Thread(target=self._run, name="coordinator", daemon=True)

    @property
    def state(self) -> ClusterState:
        """The newest state; a frozen value."""
        return self._state

    @property
    def may_act(self) -> bool:
        return self.record.may_act

    def now_s(self) -> float:
        return self._clock()

    def start(self) -> None:
        self.post(CoordinatorStarted(self._clock()))
        self.later(self.control_server.grant_relays)
        self._thread.start()

    def post(self, event: Event) -> None:
        """Apply this when its turn comes."""
        self._inbox.put(event)

    def later(self, task: Task) -> None:
        """Run this in the coordinator's thread."""
        self._inbox.put(task)

    def after(self, delay_s: float, task: Task) -> None:
        """Run this in the coordinator's thread, when so much time has passed."""
        due_s = self._clock() + delay_s
        self.later(lambda: heapq.heappush(self._delayed, (due_s, next(self._order), task)))

    def listen(self, listener: Callable[[ClusterState], None]) -> None:
        """Call `listener`, in the coordinator's thread, with each new state."""
        self._listeners.append(listener)

    def stand_down(self) -> None:
        """The whole cluster is about to stop: nothing is decided any more, and whoever goes is expected back with
        it."""
        self.has_stood_down = True

    def close(self) -> None:
        self.later(self._end)
        self._thread.join()
        self.record.close()
        self.registry.close()

    def serve_control(self, link: Link) -> None:
        """Serve one node's control link until it ends."""
        self.control_server.serve(link)

    def revoke(self, node: str) -> None:
        """A node was revoked: tell it, forget it, and give the others the news. Returns once they were sent."""
        self.control_server.revoke(node)

    def introduce(self) -> None:
        """There are other models, or keys, than a moment ago: tell the drivers."""
        self.later(self._attachments.introduce)

    def lost_link(self, node: str) -> None:
        """The coordinator's own driver lost its link to this node."""
        self.later(lambda: self.apply(LinkBroken(self._node, node, self._clock())))

    def ring_timed(self, chain: str, epoch: int, step_s: float, wire_s: float) -> None:
        """What many steps of a chain took, as the coordinator's own driver saw them."""

        def note() -> None:
            known = self._state.chains.get(chain)
            # Of a chain that a worker drives that one's ring counts.
            if known is not None and not known.driver_host:
                self.apply(RingTimed(chain, epoch, step_s, wire_s, self._clock()))

        self.later(note)

    def step_overdue(self, overdue: StepOverdue) -> None:
        """The coordinator's own driver misses a step's results."""
        self.later(lambda: self._stalled.look_for(overdue, self._node))

    def lost_host(self, chain: str, node: str) -> None:
        """The worker that hosts a chain's driver cannot be handed generations any more."""
        self.later(lambda: self._attachments.lost_host(chain, node))

    # In the coordinator's thread

    def _run(self) -> None:
        while not self._has_ended:
            self.turn(_TICK_S)

    def turn(self, patience_s: float = 0.0) -> None:
        """Wait so long for something to happen, deal with all that has, then decide and act."""
        item = self._next(patience_s)
        while item is not None:
            self._handle(item)
            if self._has_ended:
                return
            item = self._next(0.0)
        while self._delayed and self._delayed[0][0] <= self._clock():
            self._handle(heapq.heappop(self._delayed)[2])
        self._handle(self._act)
        self._handle(self.record.turn)

    def _next(self, patience_s: float) -> Event | Task | None:
        try:
            return self._inbox.get(timeout=patience_s) if patience_s else self._inbox.get_nowait()
        except queue.Empty:
            return None

    def _end(self) -> None:
        self._has_ended = True

    def _handle(self, item: Event | Task) -> None:
        """Whatever goes wrong with one event, the cluster goes on."""
        lost_s = self._clock.turn()
        if lost_s:
            log.warning("the coordinator stood still for %.1f s", lost_s)
        try:
            if callable(item):
                item()
            else:
                self.apply(item)
        except Exception as error:
            self._limited_log.error(type(error).__name__, "an event could not be dealt with", exc_info=True)

    def apply(self, event: Event) -> None:
        """The only way in which the state changes. What changes nothing is not worth recording."""
        before = self._state
        self._state = apply(before, event)
        if self._state is before:
            return
        if is_journalled(event):
            self.record.append(encode_event(event))
        if isinstance(event, LinkBroken):
            self._attachments.link_broke(event)
        for listener in self._listeners:
            listener(self._state)

    def _act(self) -> None:
        """Decide, and start what is not under way yet."""
        if self.has_stood_down or not self._is_in_charge():
            return
        due: list[Action] = []
        for action in next_actions(self._state, self._clock()):
            if isinstance(action, Record):
                self._log_decision(action.event)
                self.apply(action.event)
            else:
                due.append(action)
        # Where others may go on from the record, nothing is done that is not on it.
        if self.may_act:
            self._executor.begin(due)

    def _is_in_charge(self) -> bool:
        """Whether this coordinator may act. Where it could not for a while another may: nodes are left alone then, so
        that they find that one."""
        if self.may_act:
            if self._is_apart:
                log.warning("this coordinator leads again")
                self.apply(LeasesRenewed(self._clock()))
            self._paused_since_s, self._is_apart = None, False
            return True
        now_s = self._clock()
        if self._paused_since_s is None:
            self._paused_since_s = now_s
        if not self._is_apart and now_s - self._paused_since_s > _APART_AFTER_S:
            log.warning("this coordinator may not lead at present: nodes are left to find another")
            self._is_apart = True
            self.registry.close()
        return False

    def _log_decision(self, event: Event) -> None:
        log.info("decided: %s", as_json(event))
        if (
            isinstance(event, MovePlanned | MoveDropped | ChainReshaped | StandbysChosen | DriverPlaced)
            and event.reason
        ):
            log.info("chain %s: %s", event.chain, event.reason)
        if isinstance(event, CopiesWanted):
            log.info("copies of %s: %s", event.model, event.reason)
        if isinstance(event, MoveJudged):
            log.info("move %d: %s", event.number, event.outcome)
        if isinstance(event, NodeMeasured) and event.layer_s is not None:
            log.info("%s has drifted: a layer takes %.3g ms now", event.node, 1e3 * event.layer_s)
        if isinstance(event, LinkClosed):
            log.warning("%s cannot reach %s: planning around that link", event.reporter, event.node)
