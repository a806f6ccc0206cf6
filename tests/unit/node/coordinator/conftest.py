"""The coordinator's parts without threads or sockets: a port that does everything at once, nodes that answer as told,
a driver that writes down what it is commanded."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from shardcompute.control import Action, ClusterState, Event, apply
from shardcompute.core.errors import LinkError
from shardcompute.node.coordinator.driver_attachments import Brief, DriverAttachments
from shardcompute.node.coordinator.driver_port import DriverPorts
from shardcompute.node.coordinator.executor import ActionExecutor
from shardcompute.node.coordinator.node_registry import ConnectedNode, NodeRegistry
from shardcompute.node.rpc.commands import (
    Admit,
    Connect,
    Connected,
    NodeCommand,
    Peer,
    decode_command,
    encode_answer,
)
from shardcompute.wire.control import Command, CommandReply
from support.swarm.fake_cluster import serving_cluster

ORIGIN = Peer("head", "tcp://head:1")


class FakeCoordinator:
    """A `CoordinatorPort` for which everything happens at once; what is to come after a while waits for `wait`."""

    def __init__(self, state: ClusterState) -> None:
        self.state = state
        self.time_s = 0.0
        self.has_stood_down = False
        self.may_act = True
        self.applied: list[Event] = []
        self.delayed: list[Callable[[], None]] = []

    def now_s(self) -> float:
        return self.time_s

    def apply(self, event: Event) -> None:
        self.applied.append(event)
        self.state = apply(self.state, event)

    def post(self, event: Event) -> None:
        self.apply(event)

    def later(self, task: Callable[[], None]) -> None:
        task()

    def background(self, task: Callable[[], None]) -> None:
        task()

    def after(self, delay_s: float, task: Callable[[], None]) -> None:
        self.delayed.append(task)

    def wait(self) -> None:
        due, self.delayed = self.delayed, []
        for task in due:
            task()

    def of(self, kind: type) -> list[Any]:
        return [event for event in self.applied if isinstance(event, kind)]


class FakePump:
    """The coordinator's end of a node's control link. `answers` says by kind of command what comes back: bytes, an
    error, or None for silence."""

    def __init__(self, registry: NodeRegistry, node: str, certificate: bytes | None = None) -> None:
        self.registry = registry
        self.link = SimpleNamespace(peer=node, certificate=certificate, close=self.close)
        self.is_closed = False
        self.messages: list[Any] = []
        self.commands: list[NodeCommand] = []
        self.answers: dict[type, bytes | str | None] = {}

    def offer(self, message: Any, timeout_s: float | None = 0.0) -> bool:
        if self.is_closed:
            raise LinkError("the link is closed")
        self.messages.append(message)
        if isinstance(message, Command):
            command = decode_command(message.action)
            self.commands.append(command)
            self._answer(message.number, command)
        return True

    def _answer(self, number: int, command: NodeCommand) -> None:
        default = encode_answer(Connected()) if isinstance(command, Connect | Admit) else b""
        answer = self.answers.get(type(command), default)
        if answer is not None:
            is_error = isinstance(answer, str)
            reply = CommandReply(number, answer if is_error else "", b"" if is_error else answer)  # type: ignore[arg-type]
            self.registry.answered(self, reply)  # type: ignore[arg-type]

    def close(self, drain_s: float = 0.0) -> None:
        self.is_closed = True

    def told(self, kind: type) -> list[Any]:
        return [command for command in self.commands if isinstance(command, kind)]


class FakeDriver:
    """The coordinator's own driver. `failures` are raised, one at each `ask` or `open_chain`."""

    node = ORIGIN.node
    url = "tcp://head:2"
    session_namespace = 77

    def __init__(self) -> None:
        self.commands: list[NodeCommand] = []
        self.opened: list[tuple[str, int]] = []
        self.hosts: dict[str, str] = {}
        self.running: list[int] = []
        self.unopened: set[str] = set()
        self.failures: list[LinkError] = []

    def serves(self, model: str) -> bool:
        return model not in self.unopened

    def tell(self, command: NodeCommand) -> None:
        self.commands.append(command)

    def ask(self, command: NodeCommand) -> None:
        if self.failures:
            raise self.failures.pop(0)
        self.commands.append(command)

    def open_chain(self, command: Any) -> None:
        if self.failures:
            raise self.failures.pop(0)
        self.opened.append((command.chain, command.epoch))

    def host_chain(self, chain: str, node: str, url: str, name: str) -> None:
        self.hosts[chain] = node

    def running_sessions(self, chain: str) -> list[int]:
        return self.running

    def unhost_chain(self, chain: str, node: str) -> None:
        if self.hosts.get(chain) == node:
            del self.hosts[chain]

    def told(self, kind: type) -> list[Any]:
        return [command for command in self.commands if isinstance(command, kind)]


class Shell:
    """An executor and what it needs, around a cluster that serves a model from machines a, b, …"""

    def __init__(self, state: ClusterState) -> None:
        self.coordinator = FakeCoordinator(state)
        self.registry = NodeRegistry()
        self.driver = FakeDriver()
        self.ports = DriverPorts(self.driver, self.registry, lambda: self.coordinator.state)
        self.brief = Brief([], b"keys")
        self.attachments = DriverAttachments(
            self.coordinator, ORIGIN, self.registry, self.ports, lambda: self.brief
        )
        self.executor = ActionExecutor(
            self.coordinator, ORIGIN, self.registry, self.ports, self.attachments, "exact"
        )
        self.pumps = {node: self.connect(node) for node in state.nodes}

    def connect(self, node: str, certificate: bytes | None = None) -> FakePump:
        pump = FakePump(self.registry, node, certificate)
        self.registry.add(ConnectedNode(node, 1, pump))  # type: ignore[arg-type]
        return pump

    def begin(self, *actions: Action) -> None:
        self.executor.begin(actions)


@pytest.fixture
def shell() -> Shell:
    return Shell(serving_cluster(500, 500).coordinator.state)
