"""Hosted drivers on their worker: for chains whose ring is shorter from here than from the coordinator.

The coordinator says which chains, and hands over their generations on a link of its own: many requests, deltas back in
order. Nobody else is served: the worker has no HTTP API and knows no API keys.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from shardcompute.core.errors import LinkError, ShardComputeError
from shardcompute.core.fields import shorten
from shardcompute.core.generation import Delta
from shardcompute.node.driver.chain_links import OnOverdue, OnRing
from shardcompute.node.driver.command_executor import DriverCommandExecutor
from shardcompute.node.driver.driver import Driver
from shardcompute.node.driver.pool import DriverPool
from shardcompute.node.rpc.commands import HostDriver, NodeCommand, Retire
from shardcompute.node.rpc.endpoint import Endpoint
from shardcompute.node.rpc.outbox import Outbox
from shardcompute.security.certificates import read_peer
from shardcompute.security.names import Role
from shardcompute.wire import Link, Message, StageTiming
from shardcompute.wire.generations import (
    MOST_RECEIPT_BYTES,
    RELEASED,
    Begun,
    CancelGeneration,
    Generate,
    Generated,
    GenerationFailed,
    HostLoad,
    ReceiptMade,
    StepTimed,
    pack_delta,
    unpack_request,
)

log = logging.getLogger(__name__)
_REPORT_S = 1.0
FindDriver = Callable[[str], Driver]
"""The driver of a chain that is hosted here. Raises LinkError where there is none."""


@dataclass(slots=True)
class _HostedGeneration:
    """One generation under way."""

    chain: str
    driver: Driver
    session: int = 0
    is_over: bool = False
    """Nothing more is said of it."""


class HostedDriverServer:
    """Serves one link until it ends; then everything that was asked over it is cancelled."""

    def __init__(self, link: Link, find_driver: FindDriver) -> None:
        self._find_driver = find_driver
        self._lock = threading.Lock()
        """Held while something is said of a generation, so that nothing follows its end."""
        self._generations: dict[int, _HostedGeneration] = {}
        self._reported: dict[str, HostLoad] = {}
        self._ended = threading.Event()
        self._outbox = Outbox(link, self._take, lambda error: self._ended.set())

    def serve(self) -> None:
        """Blocks until the link ends."""
        self._outbox.start()
        while not self._ended.wait(_REPORT_S):
            self._report()
        self._outbox.close()
        for hosted in list(self._generations.values()):
            hosted.is_over = True
            hosted.driver.cancel(hosted.session)
        self._generations.clear()

    def release(self, chain: str) -> None:
        """This chain's driver is about to go: give its generations back unfinished."""
        with self._lock:
            for number, hosted in list(self._generations.items()):
                if hosted.chain == chain and not hosted.is_over:
                    self._end(number, hosted)
                    self._outbox.put(GenerationFailed(number, RELEASED, "the driver moves elsewhere"))

    def timed(self, chain: str, packed: bytes) -> None:
        """A step of a chain is done; told to whoever has generations there."""
        if any(hosted.chain == chain for hosted in list(self._generations.values())):
            self._outbox.put(StepTimed(chain, packed))

    def made_receipt(self, receipt: str, packed: bytes) -> None:
        """Of an answer that was asked for over this link, or another."""
        if len(packed) <= MOST_RECEIPT_BYTES:
            self._outbox.put(ReceiptMade(receipt, packed))

    def _report(self) -> None:
        """Tell how busy the drivers are, where that is another thing than last time."""
        drivers = {hosted.chain: hosted.driver for hosted in list(self._generations.values())}
        for chain in drivers.keys() | self._reported.keys():
            try:
                driver = drivers.get(chain) or self._find_driver(chain)
            except LinkError:
                self._reported.pop(chain, None)
                continue
            load = driver.load()
            report = HostLoad(
                chain,
                load.running,
                load.waiting,
                load.used_tokens,
                load.capacity_tokens,
                dict(driver.speculation()),
            )
            if self._reported.get(chain) != report:
                self._reported[chain] = report
                self._outbox.put(report)

    def close(self) -> None:
        self._outbox.close()
        self._ended.set()

    def _take(self, message: Message, body: memoryview) -> None:
        if isinstance(message, Generate):
            self._begin(message, body)
        elif isinstance(message, CancelGeneration):
            hosted = self._generations.pop(message.number, None)
            if hosted is not None:
                hosted.is_over = True
                hosted.driver.cancel(hosted.session)
        else:
            raise LinkError(f"{type(message).__name__} came on a link for generations")

    def _begin(self, message: Generate, body: memoryview) -> None:
        number = message.number
        try:
            hosted = _HostedGeneration(message.chain, self._find_driver(message.chain))
            request = unpack_request(message, body)
        except LinkError as error:
            # The coordinator knows what it asked for, and can compute it itself.
            self._outbox.put(GenerationFailed(number, RELEASED, shorten(error.message)))
            return
        self._generations[number] = hosted
        try:
            hosted.session = hosted.driver.submit(request, lambda said: self._say(number, hosted, said))
        except ShardComputeError as error:
            hosted.is_over = True
            self._outbox.put(_failed(number, error))
        else:
            self._outbox.put(Begun(number, hosted.session))
        if hosted.is_over:
            # It ended before it could be cancelled, or was released meanwhile.
            self._generations.pop(number, None)
            hosted.driver.cancel(hosted.session)

    def _say(self, number: int, hosted: _HostedGeneration, said: Delta | ShardComputeError) -> None:
        with self._lock:
            if hosted.is_over:
                return
            if isinstance(said, Delta):
                self._outbox.put(Generated(number, pack_delta(said)))
            else:
                self._outbox.put(_failed(number, said))
            if not isinstance(said, Delta) or said.finish is not None:
                self._end(number, hosted)

    def _end(self, number: int, hosted: _HostedGeneration) -> None:
        hosted.is_over = True
        self._generations.pop(number, None)


class DriverHost:
    """Idle until the coordinator wants a driver here. Methods may be called from any thread."""

    def __init__(
        self,
        endpoint: Endpoint,
        on_link_broken: Callable[[str], None],
        on_overdue: OnOverdue,
        on_ring: OnRing = lambda chain, epoch, step_s, wire_s: None,
    ) -> None:
        self.endpoint = endpoint
        self.pool = DriverPool(
            endpoint.dialler("driver"),
            endpoint.url,
            on_link_broken,
            on_step=self._timed,
            on_overdue=on_overdue,
            on_ring=on_ring,
            credentials=lambda: endpoint.credentials,
            on_receipt=self._made_receipt,
        )
        self._executor = DriverCommandExecutor(self.pool, endpoint.dialler("weights"))
        self._lock = threading.Lock()
        self._learning = threading.Lock()
        self._servers: set[HostedDriverServer] = set()
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
                self._executor.learn(command.model, command.origin)
        elif isinstance(command, Retire):
            self._retire(command.chain)
        else:
            self._executor.carry_out(command)

    def take(self, message: Message, body: memoryview, sender: str) -> None:
        """What last stages send."""
        self.pool.take(message, body, sender)

    def unreachable(self) -> set[str]:
        return self.pool.unreachable()

    def serve(self, link: Link) -> None:
        """The coordinator hands generations over, until the link ends."""
        if Role.COORDINATOR not in read_peer(link.certificate).roles:
            raise LinkError(f"{link.peer} is no coordinator", hint="clients talk to the coordinator's API")
        server = HostedDriverServer(link, self._find_driver)
        with self._lock:
            if self._is_closed:
                return
            self._servers.add(server)
        try:
            server.serve()
        finally:
            with self._lock:
                self._servers.discard(server)

    def close(self) -> None:
        # The links first: whoever waits for answers goes on elsewhere, and is told of no error.
        with self._lock:
            self._is_closed = True
            servers = list(self._servers)
        for server in servers:
            server.close()
        self.pool.close()

    def _timed(self, chain: str, timings: Sequence[StageTiming]) -> None:
        with self._lock:
            servers = list(self._servers)
        if servers:
            packed = msgspec.msgpack.encode(timings)
            for server in servers:
                server.timed(chain, packed)

    def _made_receipt(self, receipt: str, packed: bytes) -> None:
        with self._lock:
            servers = list(self._servers)
        for server in servers:
            server.made_receipt(receipt, packed)

    def _retire(self, chain: str) -> None:
        with self._lock:
            servers = list(self._servers)
        for server in servers:
            server.release(chain)
        self.pool.retire_chain(chain)

    def _find_driver(self, chain: str) -> Driver:
        driver = self.pool.find_driver(chain)
        if driver is None:
            raise LinkError(f"no driver of {chain} is hosted here")
        return driver


def _failed(number: int, error: ShardComputeError) -> GenerationFailed:
    return GenerationFailed(number, type(error).__name__, shorten(error.message), shorten(error.hint))
