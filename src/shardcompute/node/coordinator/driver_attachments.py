"""Attachments of drivers to chains: a driver comes to use one that serves, gets another share of its memory, or goes.

Attaching one disturbs nobody: the stages let it in one by one, then it dials the first. What goes wrong with one of
them is tried again, or ends with that driver; the chain goes on for the others.
"""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from shardcompute.control.actions import AttachDriver, DetachDriver, ShareMemory
from shardcompute.control.drivers import live_drivers
from shardcompute.control.events import DriverAttached, DriverDetached, DriverHostFailed, Event, LinkBroken
from shardcompute.control.state import Node
from shardcompute.core.errors import LinkError, ShardComputeError
from shardcompute.node.coordinator.chain_connector import ConnectedEpoch, attach_command
from shardcompute.node.coordinator.coordinator_port import CoordinatorPort
from shardcompute.node.coordinator.driver_port import DriverPort, DriverPorts
from shardcompute.node.coordinator.node_registry import NodeRegistry, await_answer
from shardcompute.node.rpc.commands import (
    Admit,
    Connected,
    Dismiss,
    HostDriver,
    Introduce,
    OfferedModel,
    Peer,
    Retire,
    Share,
    decode_connected,
)

log = logging.getLogger(__name__)
_TOKENIZER_TIMEOUT_S = 60.0
DriverAction = AttachDriver | ShareMemory | DetachDriver
Ended = Callable[[DriverAction, Event | None], None]
"""Called in the coordinator's thread: what came of an action, None if it is to be tried again."""


@dataclass(frozen=True, slots=True)
class Brief:
    """What a driver must know to answer clients."""

    models: list[OfferedModel]
    keys: bytes


class DriverAttachments:
    """Called from the coordinator's thread."""

    def __init__(
        self,
        coordinator: CoordinatorPort,
        origin: Peer,
        registry: NodeRegistry,
        ports: DriverPorts,
        brief: Callable[[], Brief],
    ) -> None:
        self._coordinator = coordinator
        self._origin = origin
        self._registry = registry
        self._ports = ports
        self._brief = brief
        self._version = 0
        # Only what is in flight: whether a link of a driver broke while an action for it was under way.
        self._breaks: Counter[str] = Counter()

    def introduce(self, driver: str | None = None) -> None:
        """Tell one driver, or all in processes of their own, what is served and who may ask for it."""
        self._version += 1
        brief, state = self._brief(), self._coordinator.state
        command = Introduce(
            version=self._version,
            models=brief.models,
            wanted=[name for name, each in state.models.items() if each.is_wanted],
            keys=brief.keys,
            origin=self._origin,
            chains=[chain.id for chain in state.live_chains()],
        )
        for each in [node.id for node in live_drivers(state)] if driver is None else [driver]:
            self._ports.find(each).tell(command)

    def link_broke(self, event: LinkBroken) -> None:
        """A link ended, perhaps one that was opened a moment ago for a driver that is being attached."""
        self._breaks.update((event.reporter, event.node))

    def lost_host(self, chain: str, node: str) -> None:
        """The link over which this worker was handed generations ended; unless it is gone, it is attached anew."""
        known = self._coordinator.state.chains.get(chain)
        for each in () if known is None else known.drivers:
            if each.driver == node:
                self._coordinator.apply(
                    DriverAttached(chain, 0, node, each.session_namespace, each.kv_tokens)
                )

    def start(self, action: DriverAction, connected: ConnectedEpoch | None, ended: Ended) -> None:
        """Carry out an action in the background, because it waits for others."""
        port, breaks = self._ports.find(action.driver), self._breaks[action.driver]
        node = self._coordinator.state.nodes.get(action.driver)

        def finish(event: Event | None) -> None:
            has_held = isinstance(action, DetachDriver) or self._breaks[action.driver] == breaks
            ended(action, self._outcome(action, event if has_held else None))

        def run() -> None:
            event: Event | None = None
            try:
                if connected is None or connected.epoch != action.epoch:
                    raise LinkError(f"epoch {action.epoch} of chain {action.chain} is over")
                event = self._carry_out(action, port, connected, node)
            except ShardComputeError as error:
                log.info("%s of %s: %s", type(action).__name__, action.driver, error.message)
            self._coordinator.later(partial(finish, event))

        self._coordinator.background(run)

    def _outcome(self, action: DriverAction, event: Event | None) -> Event | None:
        """What came of an action; that a worker failed to host a driver is counted in the state."""
        if event is None and isinstance(action, AttachDriver) and action.is_hosted:
            self._coordinator.apply(DriverHostFailed(action.chain, action.driver, action.session_namespace))
        return event

    # In the background

    def _carry_out(
        self, action: DriverAction, port: DriverPort, connected: ConnectedEpoch, node: Node | None
    ) -> Event:
        if isinstance(action, DetachDriver):
            self._detach(action, port, node)
            return DriverDetached(action.chain, action.driver, action.session_namespace)
        if isinstance(action, AttachDriver):
            self._attach(action, port, connected)
        else:
            self._admit(action, port, action.nodes)
            port.ask(Share(action.chain, action.epoch, action.kv_tokens))
        return DriverAttached(
            action.chain, action.epoch, action.driver, action.session_namespace, action.kv_tokens
        )

    def _attach(self, action: AttachDriver, port: DriverPort, connected: ConnectedEpoch) -> None:
        if action.is_hosted:
            self._prepare_host(action)
        answers = self._admit(action, port, [stage.node for stage in action.stages])
        resumption = connected.resume(port.session_namespace, answers)
        port.ask(attach_command(action, resumption, connected.change, connected.limits))
        if action.is_hosted:
            node = self._coordinator.state.nodes.get(action.driver)
            name = action.driver if node is None else node.name
            self._ports.own.host_chain(action.chain, action.driver, port.url, name)

    def _prepare_host(self, action: AttachDriver) -> None:
        offered = [model for model in self._brief().models if model.name == action.model]
        if not offered:
            raise LinkError(f"{action.model} is not served here yet")
        chains = self._coordinator.state.live_chains()
        hosted = [chain.id for chain in chains if chain.driver_host == action.driver]
        command = HostDriver(model=offered[0], origin=self._origin, chains=hosted)
        await_answer(action.driver, self._registry.ask(action.driver, command), _TOKENIZER_TIMEOUT_S)

    def _detach(self, action: DetachDriver, port: DriverPort, node: Node | None) -> None:
        self._ports.own.unhost_chain(action.chain, action.driver)
        is_here = node is not None and node.is_live and node.can_host
        if is_here and port.session_namespace == action.session_namespace:
            # A worker that is there and hosts the driver no longer is to forget it; one that is gone has.
            with contextlib.suppress(LinkError):
                port.ask(Retire(action.chain))
        dismiss = Dismiss(action.chain, action.session_namespace)
        for each, answer in [(each, self._registry.ask(each, dismiss)) for each in action.nodes]:
            await_answer(each, answer)

    def _admit(
        self, action: AttachDriver | ShareMemory, port: DriverPort, nodes: Sequence[str]
    ) -> list[Connected]:
        """Have every stage let a driver in; LinkError unless all do."""
        command = Admit(
            chain=action.chain,
            epoch=action.epoch,
            driver=Peer(port.node, port.url),
            session_namespace=port.session_namespace,
            kv_tokens=action.kv_tokens,
        )
        asked = [(node, self._registry.ask(node, command)) for node in nodes]
        return [decode_connected(await_answer(node, answer)) for node, answer in asked]
