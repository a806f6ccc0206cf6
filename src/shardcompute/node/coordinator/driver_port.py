"""How the coordinator commands a driver: its own in this process, and others over their nodes' control links, alike.

Everybody who drives is told by the same commands (`rpc.commands`). Which drivers there are follows from the state.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from shardcompute.control.drivers import all_drivers
from shardcompute.control.state import ClusterState
from shardcompute.node.coordinator.node_registry import NodeRegistry, await_answer
from shardcompute.node.rpc.commands import Attach, NodeCommand


class DriverPort(Protocol):
    """All drivers of one process, of one chain each."""

    @property
    def node(self) -> str: ...

    @property
    def url(self) -> str: ...

    @property
    def session_namespace(self) -> int:
        """In which its sessions are numbered (see `session_ids`)."""
        ...

    def tell(self, command: NodeCommand) -> None:
        """Without waiting. Whoever is away learns what there is when it is back."""
        ...

    def ask(self, command: NodeCommand) -> None:
        """Have it done. Raises LinkError, and others of ours where it refuses."""
        ...


class OwnDriver(DriverPort, Protocol):
    """The coordinator's own: the ring of every chain begins and ends with it, and it hands generations over to drivers
    that workers host. Only `open_chain` waits for others."""

    def serves(self, model: str) -> bool:
        """Whether the model's tokenizer and weights are at hand; after a restart they come a moment later."""
        ...

    def open_chain(self, command: Attach) -> None:
        """Dial the first stage of an epoch, which `ask` with the same command then has used. Raises LinkError."""
        ...

    def running_sessions(self, chain: str) -> list[int]:
        """Those that are being answered, and go on with a chain's next epoch."""
        ...

    def host_chain(self, chain: str, node: str, url: str, name: str) -> None:
        """This worker hosts the chain's driver from now on: hand generations over to it. Raises LinkError."""
        ...

    def unhost_chain(self, chain: str, node: str) -> None:
        """It does not any more: go on here with what it has not finished."""
        ...


@dataclass(frozen=True, slots=True)
class RemoteDriver:
    """A driver on another machine, over its control link. Every answer is awaited, so `ask` is for a background."""

    node: str
    url: str
    session_namespace: int
    registry: NodeRegistry

    def tell(self, command: NodeCommand) -> None:
        self.registry.command(self.node, command, lambda _: None)

    def ask(self, command: NodeCommand) -> None:
        await_answer(self.node, self.registry.ask(self.node, command))


class DriverPorts:
    """Ports to all drivers that there are."""

    def __init__(self, own: OwnDriver, registry: NodeRegistry, state: Callable[[], ClusterState]) -> None:
        self.own = own
        self._registry = registry
        self._state = state

    def all(self) -> list[DriverPort]:
        return [self.find(driver) for driver, _ in all_drivers(self._state())]

    def find(self, driver: str) -> DriverPort:
        """The port to a driver, or to a worker that may host one."""
        node = self._state().nodes.get(driver)
        if node is None:
            return self.own
        return RemoteDriver(node.id, node.address, node.session_namespace, self._registry)

    def tell_all(self, command: NodeCommand) -> None:
        for port in self.all():
            port.tell(command)

    def is_taken(self, node: str, session_namespace: int) -> bool:
        """Whether another driver numbers its sessions in this namespace."""
        nodes = self._state().nodes.values()
        others = [each.session_namespace for each in nodes if each.is_live and each.id != node]
        return session_namespace > 0 and session_namespace in (self.own.session_namespace, *others)
