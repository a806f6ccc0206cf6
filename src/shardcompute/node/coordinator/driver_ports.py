"""The drivers elsewhere, in processes of their own or hosted by workers: each is told by commands what the
coordinator's own is told by calls.

Attaching one to a chain that serves disturbs nobody: the stages let it in one by one, then it dials the first. What
goes wrong with one of them is tried again, or ends with that driver; the chain goes on for the others.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

from shardcompute.control.actions import AttachDriver, DetachDriver, ReportUnservable, ShareMemory
from shardcompute.control.drivers import live_drivers
from shardcompute.control.events import DriverAttached, DriverDetached, DriverHostAvoided, Event, LinkBroken
from shardcompute.control.state import ClusterState, Node
from shardcompute.core.errors import LinkError, ShardComputeError
from shardcompute.node.coordinator.chain_connector import ConnectedEpoch, await_answer
from shardcompute.node.coordinator.driver_port import DriverPort
from shardcompute.node.coordinator.node_registry import NodeRegistry
from shardcompute.node.coordinator.session_recovery import RecoveryPlan
from shardcompute.node.rpc.commands import (
    Admit,
    Attach,
    Connected,
    Dismiss,
    FenceOff,
    HostDriver,
    Introduce,
    NodeCommand,
    OfferedModel,
    Peer,
    Retire,
    Share,
    Unservable,
    decode_connected,
)
from shardcompute.node.rpc.session_ids import Resumption

log = logging.getLogger(__name__)
_TOKENIZER_TIMEOUT_S = 60.0
_MOST_FAILURES = 5
"""So often in a row a worker may fail to host a driver before others are tried."""
DriverAction = AttachDriver | ShareMemory | DetachDriver
Ended = Callable[[DriverAction, Event | None], None]
"""Called in the coordinator's thread: what came of an action, None if it is to be tried again."""


@dataclass(frozen=True, slots=True)
class Brief:
    """What a driver must know to answer clients."""

    models: list[OfferedModel]
    keys: bytes


class RemoteDrivers:
    """Called from the coordinator's thread. `later` runs something there."""

    def __init__(
        self,
        own: DriverPort,
        origin: Peer,
        members: NodeRegistry,
        state: Callable[[], ClusterState],
        brief: Callable[[], Brief],
        later: Callable[[Callable[[], None]], None],
    ) -> None:
        self._own = own
        self._origin = origin
        self._members = members
        self._state = state
        self._brief = brief
        self._later = later
        self._version = 0
        self._breaks: Counter[str] = Counter()
        self._failures: Counter[tuple[str, str]] = Counter()

    # What the coordinator's own driver is told by calls

    def introduce(self, driver: str | None = None) -> None:
        """Tell one driver, or all of them, what is served and who may ask for it."""
        self._version += 1
        brief = self._brief()
        requested = self._state().models
        order = Introduce(
            version=self._version,
            models=brief.models,
            wanted=[name for name, each in requested.items() if each.is_wanted],
            keys=brief.keys,
            origin=self._origin,
            chains=[chain.id for chain in self._state().live_chains()],
        )
        told = [node.id for node in live_drivers(self._state())] if driver is None else [driver]
        self._tell(order, told)

    def fence(self, chain: str, epoch: int) -> None:
        self._tell(FenceOff(chain, epoch), self._all())

    def retire(self, chain: str) -> None:
        self._tell(Retire(chain), self._all())

    def report_unservable(self, action: ReportUnservable, broken: Iterable[str]) -> None:
        order = Unservable(action.model, action.missing_bytes, list(action.reasons), list(broken))
        self._tell(order, self._all())

    def _all(self) -> list[str]:
        """Who drives, or may: a worker that hosts nothing has nothing to do."""
        nodes = self._state().nodes.values()
        return [node.id for node in nodes if node.is_live and (node.can_drive or node.can_host)]

    def _tell(self, command: NodeCommand, drivers: Iterable[str]) -> None:
        for driver in drivers:
            self._members.command(driver, command, lambda _: None)

    # Coming and going

    def is_taken(self, node: str, session_namespace: int) -> bool:
        """Whether another driver numbers its sessions in this namespace."""
        nodes = self._state().nodes.values()
        others = [each.session_namespace for each in nodes if each.is_live and each.id != node]
        return session_namespace > 0 and session_namespace in (self._own.session_namespace, *others)

    def broke(self, event: LinkBroken) -> None:
        """A link ended, perhaps one that was opened a moment ago for a driver that is being attached."""
        self._breaks.update((event.reporter, event.node))

    def lost_host(self, chain: str, node: str) -> Event | None:
        """The link over which this worker was handed generations ended; unless it is gone, it is attached anew."""
        known = self._state().chains.get(chain)
        for each in () if known is None else known.drivers:
            if each.driver == node:
                return DriverAttached(chain, 0, node, each.session_namespace, each.kv_tokens)
        return None

    def start(self, action: DriverAction, wiring: ConnectedEpoch, ended: Ended) -> None:
        """Carry out an action in a thread, because it waits for others."""
        state, breaks = self._state(), self._breaks[action.driver]

        def finish(event: Event | None) -> None:
            has_held = isinstance(action, DetachDriver) or self._breaks[action.driver] == breaks
            ended(action, self._judge(action, event if has_held else None))

        def run() -> None:
            event: Event | None = None
            try:
                event = self._carry_out(action, wiring, state)
            except ShardComputeError as error:
                log.info("%s of %s: %s", type(action).__name__, action.driver, error.message)
            self._later(partial(finish, event))

        threading.Thread(target=run, name="driver", daemon=True).start()

    def _judge(self, action: DriverAction, event: Event | None) -> Event | None:
        """What came of an action; somebody who fails to host a driver again and again is not asked any more."""
        if not isinstance(action, AttachDriver) or not action.is_hosted:
            return event
        place = (action.chain, action.driver)
        self._failures[place] += 1
        if event is None and self._failures[place] < _MOST_FAILURES:
            return None
        del self._failures[place]
        return event or DriverHostAvoided(*place, action.session_namespace, "it could not be attached")

    def _carry_out(self, action: DriverAction, wiring: ConnectedEpoch, state: ClusterState) -> Event:
        if wiring.epoch != action.epoch:
            raise LinkError(f"epoch {action.epoch} of chain {action.chain} is over")
        if isinstance(action, DetachDriver):
            self._own.unhost_chain(action.chain, action.driver)
            self._release(action, state.nodes.get(action.driver))
            dismiss = Dismiss(action.chain, action.session_namespace)
            for node, answer in [(node, self._members.ask(node, dismiss)) for node in action.nodes]:
                await_answer(node, answer)
            return DriverDetached(action.chain, action.driver, action.session_namespace)
        if isinstance(action, AttachDriver):
            if action.is_hosted:
                self._prepare_host(action)
            self._attach(action, wiring)
            if action.is_hosted:
                self._own.host_chain(action.chain, action.driver, action.address)
        elif action.driver == state.driver:
            own = Peer(action.driver, self._own.url)
            self._admit(wiring, action.chain, own, self._own.session_namespace, action.kv_tokens)
            self._own.share_chain(action.chain, action.epoch, action.kv_tokens)
        else:
            peer = Peer(action.driver, state.nodes[action.driver].address)
            self._admit(wiring, action.chain, peer, action.session_namespace, action.kv_tokens)
            self._ask(action.driver, Share(action.chain, action.epoch, action.kv_tokens))
        return DriverAttached(
            action.chain, action.epoch, action.driver, action.session_namespace, action.kv_tokens
        )

    def _prepare_host(self, action: AttachDriver) -> None:
        offered = [model for model in self._brief().models if model.name == action.model]
        if not offered:
            raise LinkError(f"{action.model} is not served here yet")
        hosted = [chain.id for chain in self._state().live_chains() if chain.driver_host == action.driver]
        order = HostDriver(model=offered[0], origin=self._origin, chains=hosted)
        await_answer(action.driver, self._members.ask(action.driver, order), _TOKENIZER_TIMEOUT_S)

    def _release(self, action: DetachDriver, node: Node | None) -> None:
        """A worker that is there and hosts the driver no longer is to forget it; one that is gone has."""
        if (
            node is not None
            and node.is_live
            and node.can_host
            and node.session_namespace == action.session_namespace
        ):
            with contextlib.suppress(LinkError):
                self._ask(action.driver, Retire(action.chain))

    def _attach(self, action: AttachDriver, wiring: ConnectedEpoch) -> None:
        peer = Peer(action.driver, action.address)
        answers = self._admit(wiring, action.chain, peer, action.session_namespace, action.kv_tokens)
        if action.session_namespace in wiring.told:
            # It has used this epoch before: what its stages hold now is what they know.
            resumption: Resumption | None = RecoveryPlan(frozenset()).resumption(answers)
        else:
            resumption = (
                None if wiring.resumption is None else wiring.resumption.within(action.session_namespace)
            )
        wiring.told.add(action.session_namespace)
        first = wiring.stages[0]
        order = Attach(
            chain=action.chain,
            epoch=action.epoch,
            model=action.model,
            first=Peer(first.node, first.address),
            nodes=[stage.node for stage in wiring.stages],
            kv_tokens=action.kv_tokens,
            resumption=resumption,
        )
        self._ask(action.driver, order)

    def _admit(
        self, wiring: ConnectedEpoch, chain: str, driver: Peer, session_namespace: int, kv_tokens: int
    ) -> list[Connected]:
        """Have every stage let a driver in; LinkError unless all do."""
        order = Admit(
            chain=chain,
            epoch=wiring.epoch,
            driver=driver,
            session_namespace=session_namespace,
            kv_tokens=kv_tokens,
        )
        asked = [(stage.node, self._members.ask(stage.node, order)) for stage in wiring.stages]
        return [decode_connected(await_answer(node, answer)) for node, answer in asked]

    def _ask(self, driver: str, command: NodeCommand) -> None:
        await_answer(driver, self._members.ask(driver, command))
