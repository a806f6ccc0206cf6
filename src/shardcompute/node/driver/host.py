"""Drivers inside a worker: for chains whose ring is shorter from here than from the coordinator.

The coordinator says which chains, and hands over their generations on a link of its own. Nobody else is served: the
worker has no HTTP API and knows no API keys.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import msgspec

from shardcompute.core.errors import LinkError
from shardcompute.node.driver.driver import Driver
from shardcompute.node.driver.hosted_server import HostedDriverServer
from shardcompute.node.driver.orders import DriverCommandExecutor
from shardcompute.node.driver.pool import DriverPool
from shardcompute.node.rpc.commands import HostDriver, NodeCommand, Retire
from shardcompute.node.rpc.endpoint import Endpoint
from shardcompute.security.certificates import read_peer
from shardcompute.security.names import Role
from shardcompute.wire import Link, Message, StageTiming


class DriverHost:
    """Idle until the coordinator wants a driver here. Methods may be called from any thread."""

    def __init__(self, endpoint: Endpoint, on_link_broken: Callable[[str], None]) -> None:
        self.endpoint = endpoint
        self.pool = DriverPool(
            lambda url: endpoint.dial(url, "driver"), endpoint.url, on_link_broken, on_step=self._timed
        )
        self._orders = DriverCommandExecutor(
            self.pool, lambda peer: endpoint.dial(peer.url, "weights", peer.node)
        )
        self._lock = threading.Lock()
        self._learning = threading.Lock()
        self._desks: set[HostedDriverServer] = set()
        self._is_closed = False

    @property
    def session_namespace(self) -> int:
        """The namespace in which sessions are numbered here (see `session_ids`)."""
        return self.pool.session_namespace

    def carry_out(self, command: NodeCommand) -> None:
        if isinstance(command, HostDriver):
            with self._learning:
                for chain in self.pool.chains() - set(command.chains):
                    self._retire(chain)
                self._orders.learn(command.model, command.origin)
        elif isinstance(command, Retire):
            self._retire(command.chain)
        else:
            self._orders.carry_out(command)

    def take(self, message: Message, body: memoryview, sender: str) -> None:
        """What last stages send."""
        self.pool.take(message, body, sender)

    def unreachable(self) -> set[str]:
        return self.pool.unreachable()

    def serve(self, link: Link) -> None:
        """The coordinator hands generations over, until the link ends."""
        if Role.COORDINATOR not in read_peer(link.certificate).roles:
            raise LinkError(f"{link.peer} is no coordinator", hint="clients talk to the coordinator's API")
        desk = HostedDriverServer(link, self._find_driver)
        with self._lock:
            if self._is_closed:
                return
            self._desks.add(desk)
        try:
            desk.serve()
        finally:
            with self._lock:
                self._desks.discard(desk)

    def close(self) -> None:
        # The links first: whoever waits for answers goes on elsewhere, and is told of no error.
        with self._lock:
            self._is_closed = True
            desks = list(self._desks)
        for desk in desks:
            desk.close()
        self.pool.close()

    def _timed(self, chain: str, timings: Sequence[StageTiming]) -> None:
        with self._lock:
            desks = list(self._desks)
        if desks:
            packed = msgspec.msgpack.encode(timings)
            for desk in desks:
                desk.timed(chain, packed)

    def _retire(self, chain: str) -> None:
        with self._lock:
            desks = list(self._desks)
        for desk in desks:
            desk.release(chain)
        self.pool.retire_chain(chain)

    def _find_driver(self, chain: str) -> Driver:
        driver = self.pool.find_driver(chain)
        if driver is None:
            raise LinkError(f"no driver of {chain} is hosted here")
        return driver
