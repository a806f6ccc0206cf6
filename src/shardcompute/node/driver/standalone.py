"""Standalone driver, in a process of its own: it holds no layers, serves the whole API, and uses the cluster's chains
beside the coordinator's own driver.

It needs none of a model's files: tokenizers come from the coordinator, as weights come to workers. While the
coordinator is away it goes on with the chains it has.
"""

from __future__ import annotations

import logging
import platform
import threading
import time
from dataclasses import dataclass, field

from shardcompute.control.events import LinkBroken, NodeJoined, RingTimed
from shardcompute.node.driver.command_executor import DriverCommandExecutor
from shardcompute.node.driver.ledger_client import LedgerClient
from shardcompute.node.driver.pool import DriverPool
from shardcompute.node.enrolment.stored import remember_urls
from shardcompute.node.rpc.commands import Introduce, NodeCommand, Probe
from shardcompute.node.rpc.control_client import ControlClient, FindAgain
from shardcompute.node.rpc.endpoint import Endpoint, receive_all
from shardcompute.node.rpc.link_probe import answer_probes, probe_links
from shardcompute.node.rpc.whereabouts import Whereabouts
from shardcompute.security.api_keys import KeyBook, KeySummary
from shardcompute.security.credentials import Credentials
from shardcompute.security.revocations import Revocations
from shardcompute.version import VERSION
from shardcompute.wire import Transports, default_transports, join_address

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StandaloneOptions:
    """Where a driver is reached by stages. Port 0: any free one."""

    host: str = "127.0.0.1"
    port: int = 0
    advertise: str = ""
    name: str = ""
    transports: Transports = field(default_factory=default_transports)
    """How links are made, by the scheme of their URLs."""
    follows_address: bool = False
    """Whether it listens where its coordinator sees this machine, also when that changes; else at `host` alone."""
    find_again: FindAgain = lambda: ()
    """Says where else the coordinator may be, when it is where it was no longer."""


class StandaloneDriver:
    """Drives from `start` on until it is closed. `pool` is what the API serves from."""

    def __init__(self, credentials: Credentials, control_urls: list[str], options: StandaloneOptions) -> None:
        self._options = options
        self._lock = threading.Lock()
        self._introducing = threading.Lock()
        self._version = 0
        self._keys = KeyBook()
        self._doubtful: set[str] = set()
        self._api_url = ""
        self._endpoint = Endpoint(
            credentials,
            join_address(options.host, options.port),
            {"stage": lambda link: receive_all(link, self.pool.take), "probe": answer_probes},
            advertise=options.advertise,
            transports=options.transports,
        )
        self.node = self._endpoint.node
        self.pool = DriverPool(
            self._endpoint.dialler("driver"),
            self._endpoint.url,
            self._link_broken,
            on_overdue=lambda overdue: self._control.report(overdue),
            on_ring=lambda chain, epoch, step_s, wire_s: self._control.tell(
                RingTimed(chain, epoch, step_s, wire_s, 0.0)
            ),
            credentials=lambda: self._endpoint.credentials,
        )
        self._executor = DriverCommandExecutor(self.pool, self._endpoint.dialler("weights"))
        self.quota = LedgerClient(
            lambda message: self._control.send_accounts(message),
            self.pool.session_namespace,
            self.pool.requests.usage.take_increments,
        )
        """What API keys with limits draw from."""
        self._control = ControlClient(
            self._endpoint,
            control_urls,
            self._describe,
            self._carry_out,
            self._registered,
            on_accounts=self.quota.take,
            on_urls=lambda urls: remember_urls(credentials, urls),
            whereabouts=Whereabouts(self._endpoint, follows=options.follows_address),
            find_again=options.find_again,
        )
        self._endpoint.start()

    def start(self, api_url: str = "") -> None:
        """Register with the coordinator; clients find this driver's API at `api_url`."""
        self._api_url = api_url
        self._control.start()
        self.quota.start()

    @property
    def has_left(self) -> bool:
        """Whether the coordinator has released this driver."""
        return self._control.left.is_set()

    def leave(self) -> None:
        """Say goodbye before `close`, so that what this driver holds of the chains is free at once."""
        self.quota.close()
        self._control.leave(self.node)

    @property
    def refusal(self) -> str:
        return self._control.refusal

    def find_key(self, key: str) -> KeySummary | None:
        """Whose API key of the cluster this is, None if it is unknown; AuthError if it was good once."""
        with self._lock:
            keys = self._keys
        return keys.find(key, now_s=time.time())

    def close(self) -> None:
        self.quota.close()
        self._control.close()
        self.pool.close()
        self._endpoint.close()

    # What is told to the coordinator

    def _describe(self) -> NodeJoined:
        return NodeJoined(
            node=self.node,
            name=self._options.name or platform.node() or self.node,
            role="driver",
            address=self._endpoint.url,
            device="cpu",
            backend="none",
            memory_bytes=0,
            threads=1,
            version=VERSION,
            incarnation=0,
            now_s=0.0,
            session_namespace=self.pool.session_namespace,
            api_url=self._api_url,
        )

    def _registered(self, incarnation: int, revocations: Revocations) -> None:
        self._endpoint.heed(revocations)
        log.info("registered as %s, incarnation %d", self.node, incarnation)
        # Chains may have been retired while the coordinator could not tell us; it will say which there are.
        with self._lock:
            self._version = 0  # a coordinator that was started again counts from the beginning
            self._doubtful = self.pool.chains()
        for node in self.pool.unreachable():
            self._link_broken(node)

    def _link_broken(self, node: str) -> None:
        self._control.tell(LinkBroken(self.node, node, 0.0))

    # What the coordinator asks

    def _carry_out(self, command: NodeCommand) -> bytes:
        if isinstance(command, Introduce):
            with self._introducing:
                self._learn(command)
        elif isinstance(command, Probe):
            self._probe(command)
        else:
            self._executor.carry_out(command)
        return b""

    def _learn(self, command: Introduce) -> None:
        # Commands run beside each other: an older one may come last.
        if command.version < self._version:
            return
        self._version = command.version
        with self._lock:
            self._keys = KeyBook.from_bytes(command.keys)
            doubtful, self._doubtful = self._doubtful, set()
        for chain in doubtful - set(command.chains):
            self.pool.retire_chain(chain)
        known = {model.name for model in self.pool.all_models()}
        for offered in command.models:
            self._executor.learn(offered, command.origin)
        for name in known - {offered.name for offered in command.models} - set(command.wanted):
            self.pool.remove_model(name)

    def _probe(self, command: Probe) -> None:
        for measured in probe_links(self.node, command.peers, self._endpoint.dial):
            self._control.tell(measured)
