"""The control plane's shell: events in, actions out, one thread that decides.

Links and timers put events into one queue; a single thread journals and applies them, asks the control room what
to do next, and has each action started once (`deeds`). What actions bring about comes back as events, as does what
nodes report (`reception`). Nothing here computes tensors; token traffic never passes through.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable

from shardcompute.control import apply, next_actions
from shardcompute.control.actions import Action, Record
from shardcompute.control.events import (
    CoordinatorStarted,
    Event,
    LinkBroken,
    LinkMeasured,
    encode_event,
    is_journalled,
)
from shardcompute.control.state import ClusterState
from shardcompute.core.rate_limited_log import RateLimitedLog
from shardcompute.node.coordinator.clock import SteadyClock
from shardcompute.node.coordinator.control_server import ControlServer
from shardcompute.node.coordinator.driver_port import DriverPort
from shardcompute.node.coordinator.driver_ports import Brief, RemoteDrivers
from shardcompute.node.coordinator.executor import ActionExecutor, as_json
from shardcompute.node.coordinator.journal import Journal
from shardcompute.node.coordinator.journal_replay import replay_journal
from shardcompute.node.coordinator.link_breaker import LinkBreaker
from shardcompute.node.coordinator.liveness import Dial, LivenessProbe
from shardcompute.node.coordinator.node_registry import NodeRegistry
from shardcompute.node.rpc.commands import Peer
from shardcompute.wire import Link
from shardcompute.wire.codecs.mode import EXACT

log = logging.getLogger(__name__)
_TICK_S = 0.1


class Coordinator:
    """Owns the cluster's state. `apply` belongs to its own thread; everything else may be called from any."""

    def __init__(
        self,
        node: str,
        weights_url: str,
        journal: Journal,
        driver: DriverPort,
        *,
        dial: Dial,
        initial: ClusterState,
        revocations: Callable[[], bytes] = lambda: b"",
        brief: Callable[[], Brief] = lambda: Brief([], b""),
        wire: str = EXACT,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._journal = journal
        self._clock = SteadyClock(clock)
        self._events: queue.SimpleQueue[Event | Callable[[], None] | None] = queue.SimpleQueue()
        self._limited_log = RateLimitedLog(log)
        self._state = replay_journal(journal, initial)
        self._members = NodeRegistry()
        self.has_stood_down = False
        origin = Peer(node, weights_url)
        self._doubts = LinkBreaker(origin)
        self._drivers = RemoteDrivers(
            driver, origin, self._members, lambda: self._state, brief, self._events.put
        )
        self._deeds = ActionExecutor(self, origin, driver, self._members, self._drivers, self._doubts, wire)
        self._reception = ControlServer(
            self, origin, self._members, self._drivers, self._deeds, LivenessProbe(dial), revocations
        )
        self._listeners: list[Callable[[ClusterState], None]] = []
        self._thread = threading.Thread(target=self._run, name="coordinator", daemon=True)

    @property
    def state(self) -> ClusterState:
        """The newest state; a frozen value."""
        return self._state

    def now_s(self) -> float:
        return self._clock()

    def start(self) -> None:
        self._thread.start()
        self.post(CoordinatorStarted(self._clock()))

    def post(self, event: Event) -> None:
        """Apply this when its turn comes."""
        self._events.put(event)

    def later(self, task: Callable[[], None]) -> None:
        """Run this in the coordinator's thread."""
        self._events.put(task)

    def listen(self, listener: Callable[[ClusterState], None]) -> None:
        """Call `listener`, in the coordinator's thread, with each new state."""
        self._listeners.append(listener)

    def stand_down(self) -> None:
        """The whole cluster is about to stop: nothing is decided any more, and whoever goes is expected back with
        it."""
        self.has_stood_down = True

    def close(self) -> None:
        self._deeds.close()
        self._events.put(None)
        self._thread.join()
        self._members.close()

    def serve_control(self, link: Link) -> None:
        """Serve one node's control link until it ends."""
        self._reception.serve(link)

    def expel(self, node: str) -> None:
        """A node was revoked: tell it, forget it, and give the others the news. Returns once they were sent."""
        self._reception.expel(node)

    def introduce(self) -> None:
        """There are other models, or keys, than a moment ago: tell the drivers."""
        self.later(self._drivers.introduce)

    def lost_host(self, chain: str, node: str) -> None:
        """The worker that hosts a chain's driver cannot be handed generations any more."""
        self.later(lambda: self._loosen_host(chain, node))

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
            self._handle(lambda: self._doubts.probe(self._state, self._clock(), self._reception.probe))

    def _handle(self, item: Event | Callable[[], None]) -> None:
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
        """The only way in which the state changes."""
        if is_journalled(event):
            self._journal.append(encode_event(event))
        before = self._state
        self._state = apply(before, event)
        if self._state is before:
            return
        for chain in before.live_chains():
            if chain.id not in self._state.chains or not self._state.chains[chain.id].is_live:
                self._deeds.retire(chain.id)
        if isinstance(event, LinkBroken):
            self._drivers.broke(event)
        if isinstance(event, LinkMeasured) and event.is_open:
            self._doubts.opened(event.a, event.b)
        elif isinstance(event, LinkBroken) and _interrupted(self._state) - _interrupted(before):
            closed = self._doubts.broke(self._state, event)
            if closed is not None:
                self.apply(closed)
        for listener in self._listeners:
            listener(self._state)

    def _act(self) -> None:
        """Decide, and start what is not under way yet."""
        if self.has_stood_down:
            return
        due: list[Action] = []
        for action in next_actions(self._state, self._clock()):
            if isinstance(action, Record):
                log.info("decided: %s", as_json(action.event))
                self.apply(action.event)
            else:
                due.append(action)
        self._deeds.begin(due)

    def _loosen_host(self, chain: str, node: str) -> None:
        event = self._drivers.lost_host(chain, node)
        if event is not None:
            self.apply(event)


def _interrupted(state: ClusterState) -> set[str]:
    return {chain.id for chain in state.chains.values() if chain.is_interrupted}
