"""A driver in a process of its own: it holds no layers, serves the whole API, and uses the cluster's chains beside
the coordinator's own driver.

It needs none of a model's files: tokenizers come from the coordinator, as weights come to workers. While the
coordinator is away it goes on with the chains it has.
"""

from __future__ import annotations

import logging
import platform
import threading
from dataclasses import dataclass
from functools import partial

from shardcompute.control.actions import ActivateChain, ReportUnservable
from shardcompute.control.events import LinkBroken, LinkMeasured, NodeJoined
from shardcompute.core.errors import AuthError, LinkError, UnknownModelError
from shardcompute.models.tokenizer import Tokenizer
from shardcompute.node.chain_links import ChainAddress
from shardcompute.node.chain_port import Resumption
from shardcompute.node.commands import (
    Attach,
    FenceOff,
    Introduce,
    Leave,
    NodeCommand,
    OfferedModel,
    Peer,
    Probe,
    Retire,
    Share,
    Unservable,
)
from shardcompute.node.control_client import ControlClient
from shardcompute.node.endpoint import Endpoint, receive_all
from shardcompute.node.link_probe import answer_probes, probe_link
from shardcompute.node.swarm import Swarm, SwarmModel
from shardcompute.node.tokenizer_client import fetch_tokenizer
from shardcompute.security.api_keys import KeyBook
from shardcompute.security.credentials import Credentials
from shardcompute.security.names import Role
from shardcompute.security.revocations import Revocations
from shardcompute.version import VERSION
from shardcompute.wire import Transport

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class DriverOptions:
    """Where a driver is reached by stages. Port 0: any free one."""

    host: str = "127.0.0.1"
    port: int = 0
    advertise: str = ""
    name: str = ""
    transport: Transport | None = None
    """How links are made, where not simply over TCP."""


class RemoteDriver:
    """Drives from `start` on until it is closed. `swarm` is what the API serves from."""

    def __init__(self, credentials: Credentials, control_urls: list[str], options: DriverOptions) -> None:
        self._options = options
        self._lock = threading.Lock()
        self._introducing = threading.Lock()
        self._version = 0
        self._keys = KeyBook()
        self._doubtful: set[str] = set()
        self._api_url = ""
        self.left = threading.Event()
        self._endpoint = Endpoint(
            credentials,
            options.host,
            options.port,
            {"stage": lambda link: receive_all(link, self.swarm.take), "probe": answer_probes},
            advertise=options.advertise,
            transport=options.transport,
        )
        self.node = self._endpoint.node
        self.swarm = Swarm(
            lambda url: self._endpoint.dial(url, "driver"), self._endpoint.url, self._link_broken
        )
        self._control = ControlClient(
            lambda url: self._endpoint.dial(url, "control", needs=Role.COORDINATOR),
            control_urls,
            self._describe,
            self._carry_out,
            self._registered,
        )
        self._endpoint.start()

    def start(self, api_url: str = "") -> None:
        """Register with the coordinator; clients find this driver's API at `api_url`."""
        self._api_url = api_url
        self._control.start()

    @property
    def refusal(self) -> str:
        return self._control.refusal

    def verify_key(self, key: str) -> bool:
        """Whether the cluster knows this API key."""
        with self._lock:
            keys = self._keys
        try:
            keys.verify(key)
        except AuthError:
            return False
        return True

    def close(self) -> None:
        self._control.close()
        self.swarm.close()
        self._endpoint.close()

    # What is told to the coordinator

    def _describe(self) -> NodeJoined:
        return NodeJoined(
            node=self.node,
            name=self._options.name or platform.node() or self.node,
            role="driver",
            address=self._endpoint.url,
            device="cpu",
            memory_bytes=0,
            threads=1,
            version=VERSION,
            incarnation=0,
            now_s=0.0,
            sessions=self.swarm.sessions,
            api_url=self._api_url,
        )

    def _registered(self, incarnation: int, revocations: Revocations) -> None:
        self._endpoint.heed(revocations)
        log.info("registered as %s, incarnation %d", self.node, incarnation)
        # Chains may have been retired while the coordinator could not tell us; it will say which there are.
        with self._lock:
            self._version = 0  # a coordinator that was started again counts from the beginning
            self._doubtful = self.swarm.chains()
        for node in self.swarm.unreachable():
            self._link_broken(node)

    def _link_broken(self, node: str) -> None:
        self._control.tell(LinkBroken(self.node, node, 0.0))

    # What the coordinator asks

    def _carry_out(self, command: NodeCommand) -> bytes:
        if isinstance(command, Introduce):
            with self._introducing:
                self._learn(command)
        elif isinstance(command, Attach):
            self._attach(command)
        elif isinstance(command, Share):
            self.swarm.share_chain(command.chain, command.epoch, command.kv_tokens)
        elif isinstance(command, FenceOff):
            self.swarm.fence_chain(command.chain, command.epoch)
        elif isinstance(command, Retire):
            self.swarm.retire_chain(command.chain)
        elif isinstance(command, Unservable):
            action = ReportUnservable(command.model, command.missing_bytes, tuple(command.reasons))
            self.swarm.report_unservable(action, command.broken)
        elif isinstance(command, Probe):
            self._probe(command)
        elif isinstance(command, Leave):
            self.left.set()
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
            self.swarm.retire_chain(chain)
        known = {model.name: model for model in self.swarm.all_models()}
        for offered in command.models:
            before = known.pop(offered.name, None)
            if before is None or before.created_s != offered.created_s:
                self.swarm.add_model(self._open(offered, command.origin))
        for name in known.keys() - command.wanted:
            self.swarm.remove_model(name)

    def _open(self, offered: OfferedModel, origin: Peer) -> SwarmModel:
        return SwarmModel(
            offered.name,
            self._fetch_tokenizer(offered.name, origin),
            offered.vocab_size,
            offered.context_length,
            offered.created_s,
            offered.speculation,
        )

    def _fetch_tokenizer(self, model: str, origin: Peer) -> Tokenizer:
        log.info("fetching the tokenizer of %s", model)
        dial = partial(self._endpoint.dial, origin.url, "weights", origin.node)
        return fetch_tokenizer(dial, origin.node, model)

    def _attach(self, command: Attach) -> None:
        if not self.swarm.serves(command.model):
            raise UnknownModelError(f"the tokenizer of {command.model} is not here yet")
        first = command.first
        address = ChainAddress(
            command.chain, command.epoch, first.node, first.url, tuple(command.nodes), command.drafts
        )
        self.swarm.open_address(address)
        resumption = Resumption(command.lengths, command.has_new_first, frozenset(command.held))
        action = ActivateChain(command.chain, command.epoch, command.model)
        self.swarm.activate_chain(action, command.kv_tokens, None if command.is_new else resumption)

    def _probe(self, command: Probe) -> None:
        """Measure what can be reached."""
        for peer in command.peers:
            try:
                quality = probe_link(partial(self._endpoint.dial, peer.url, "probe", peer.node))
            except LinkError as error:
                log.info("%s cannot be probed: %s", peer.node, error.message)
                continue
            self._control.tell(LinkMeasured(self.node, peer.node, quality.rtt_s, quality.bytes_per_s))
