"""A worker: one machine's shards, told by the coordinator what to hold and whom to talk to."""

from __future__ import annotations

import contextlib
import logging
import platform
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Protocol

import psutil

from shardcompute.backends.executor import ExecutorOptions
from shardcompute.control.events import (
    LinkBroken,
    NodeJoined,
    NodeMeasured,
    ShardFailed,
    ShardLoaded,
    ShardProgressed,
)
from shardcompute.control.state import Holding, Shard
from shardcompute.core.errors import CapacityError, LinkError, ShardComputeError
from shardcompute.models.spec import Stage
from shardcompute.node.rpc.commands import (
    Admit,
    Connect,
    Connected,
    Dismiss,
    FenceOff,
    LoadLayers,
    NodeCommand,
    Peer,
    Probe,
    UnloadLayers,
    encode_connected,
)
from shardcompute.node.rpc.control_client import ControlClient
from shardcompute.node.rpc.endpoint import Endpoint, receive_all
from shardcompute.node.rpc.link_probe import answer_probes, probe_links
from shardcompute.node.weights.client import RemoteTensors, fetch_card, open_remote_shard
from shardcompute.node.weights.draft_heads import draft_head_bytes, open_head_drafter
from shardcompute.node.weights.pieces import Supplier
from shardcompute.node.weights.server import CachedModels, WeightsServer
from shardcompute.node.worker.speed_probe import measure_layer, measure_seconds_per_byte
from shardcompute.node.worker.stage_server import ShardKey, StageServer
from shardcompute.runtime.stage import StageRuntime
from shardcompute.security.credentials import Credentials
from shardcompute.security.names import Role
from shardcompute.security.revocations import Revocations
from shardcompute.version import VERSION
from shardcompute.weights.card import Card
from shardcompute.weights.served import served_vocabulary
from shardcompute.weights.shard_cache import ShardCache
from shardcompute.wire import (
    CODECS,
    Link,
    Message,
    StepFailed,
    StepResult,
    Transports,
    default_transports,
    join_address,
)

log = logging.getLogger(__name__)
_RETRY_DELAYS_S = (0.5, 1.0, 2.0)
_ROOM_TIMEOUT_S = 10.0
_RELIEF_S = 5.0


@dataclass(frozen=True, slots=True)
class WorkerOptions:
    """How a worker takes part. `max_memory_bytes` bounds weights and KV together."""

    folder: Path
    host: str = "127.0.0.1"
    port: int = 0
    advertise: str = ""
    name: str = ""
    max_memory_bytes: int | None = None
    threads: int = 1
    backend: str = "onnx"
    device: str = "cpu"
    transports: Transports = field(default_factory=default_transports)
    """How links are made, by the scheme of their URLs."""


class HostedDriversPort(Protocol):
    """Drivers that run on this worker in the coordinator's place. Methods may be called from any thread."""

    @property
    def session_namespace(self) -> int:
        """The namespace in which they number their sessions (see `session_ids`)."""
        ...

    def carry_out(self, command: NodeCommand) -> None:
        """Do what the coordinator tells drivers; what is no command for one is left alone."""
        ...

    def take(self, message: Message, body: memoryview, sender: str) -> None:
        """What last stages send."""
        ...

    def serve(self, link: Link) -> None:
        """Take generations over this link until it ends."""
        ...

    def unreachable(self) -> set[str]:
        """The first stages of chains in use to which the link is lost."""
        ...

    def close(self) -> None: ...


HostDrivers = Callable[[Endpoint, Callable[[str], None]], HostedDriversPort]
"""Opens them on a worker's endpoint, and has broken links reported."""


@dataclass(frozen=True, slots=True)
class _Held:
    model: str
    size_bytes: int
    draft_head_bytes: int = 0
    """Of its draft head, which is given up where others need the memory."""


class Worker:
    """Serves until it is told to leave or is closed."""

    def __init__(
        self,
        credentials: Credentials,
        control_urls: list[str],
        options: WorkerOptions,
        host_drivers: HostDrivers,
    ) -> None:
        self._options = options
        self._memory_bytes = options.max_memory_bytes or int(psutil.virtual_memory().available * 0.8)
        self._held: dict[ShardKey, _Held] = {}
        self._lock = threading.Lock()
        self._freed = threading.Condition(self._lock)
        self._loading = threading.Lock()
        self._closing = threading.Event()
        self._cache = ShardCache(options.folder / "shards")
        self._weights = WeightsServer(CachedModels(self._cache))
        self._seconds_per_byte = measure_seconds_per_byte(options.threads)
        self._endpoint = Endpoint(
            credentials,
            join_address(options.host, options.port),
            {
                "stage": self._serve_frames,
                "driver": self._serve_frames,
                "weights": self._serve_weights,
                "generations": lambda link: self._hosted.serve(link),
                "probe": answer_probes,
            },
            advertise=options.advertise,
            transports=options.transports,
        )
        self.node = self._endpoint.node
        self._hosted = host_drivers(self._endpoint, self._link_broken)
        self._stages = StageServer(
            self.node, lambda url: self._endpoint.dial(url, "stage"), self._link_broken
        )
        self._control = ControlClient(
            lambda url: self._endpoint.dial(url, "control", needs=Role.COORDINATOR),
            control_urls,
            self._describe,
            self._carry_out,
            self._registered,
        )
        self._endpoint.start()
        self._control.start()

    @property
    def has_left(self) -> bool:
        """Whether the coordinator has released this worker."""
        return self._control.left.is_set()

    def leave(self, patience_s: float = _RELIEF_S) -> None:
        """Take leave before `close`: others take over what can be taken over meanwhile, so that those who are being
        answered wait for a moment at most."""
        self._control.leave(self.node, patience_s)

    @property
    def refusal(self) -> str:
        return self._control.refusal

    def close(self) -> None:
        self._closing.set()
        with self._freed:
            self._freed.notify_all()
        self._control.close()
        self._hosted.close()
        self._stages.close()
        self._endpoint.close()

    # What others ask over links

    def _serve_frames(self, link: Link) -> None:
        receive_all(link, self._take)

    def _take(self, message: Message, body: memoryview, sender: str) -> None:
        if isinstance(message, StepResult | StepFailed):
            self._hosted.take(message, body, sender)
        else:
            self._stages.take(message, body, sender)

    def _serve_weights(self, link: Link) -> None:
        self._weights.serve(link)

    def _link_broken(self, node: str) -> None:
        self._control.tell(LinkBroken(self.node, node, 0.0))

    # What the coordinator asks

    def _describe(self) -> NodeJoined:
        with self._lock:
            shards = tuple(
                Shard(chain, held.model, start, stop, held.size_bytes)
                for (chain, start, stop), held in self._held.items()
            )
        return NodeJoined(
            node=self.node,
            name=self._options.name or platform.node() or self.node,
            role="worker",
            address=self._endpoint.url,
            device=self._options.device,
            memory_bytes=self._memory_bytes,
            threads=self._options.threads,
            version=VERSION,
            incarnation=0,
            now_s=0.0,
            seconds_per_byte=self._seconds_per_byte,
            cached=tuple(Holding(held.model, held.start, held.stop) for held in self._cache.holdings()),
            shards=shards,
            codecs=tuple(CODECS),
            session_namespace=self._hosted.session_namespace,
        )

    def _registered(self, incarnation: int, revocations: Revocations) -> None:
        self._endpoint.heed(revocations)
        log.info("registered as %s, incarnation %d", self.node, incarnation)
        # What was reported over the link before this one may not have arrived.
        self._tell_held()
        for node in self._stages.unreachable() | self._hosted.unreachable():
            self._link_broken(node)

    def _carry_out(self, command: NodeCommand) -> bytes:
        if isinstance(command, LoadLayers):
            self._load(command)
        elif isinstance(command, UnloadLayers):
            self._unload((command.chain, command.start, command.stop))
        elif isinstance(command, Connect):
            return encode_connected(self._connect(command))
        elif isinstance(command, FenceOff):
            self._stages.fence(command.chain, command.epoch, forgets=command.forgets)
            self._hosted.carry_out(command)
        elif isinstance(command, Admit):
            return encode_connected(self._stages.admit(command))
        elif isinstance(command, Dismiss):
            self._stages.dismiss(command.chain, command.session_namespace)
        elif isinstance(command, Probe):
            self._probe(command)
        else:
            self._hosted.carry_out(command)
        return b""

    def _connect(self, command: Connect) -> Connected:
        key = (command.chain, command.start, command.stop)
        if key not in self._stages.shards():
            # Unloaded while the coordinator was away: it must hear that, and of no model that failed to load.
            self._tell_failed(key, "-", "it is not loaded here")
        return self._stages.connect(command)

    def _load(self, command: LoadLayers) -> None:
        key = (command.chain, command.start, command.stop)
        try:
            # One at a time: two loads beside each other need the memory of both at their peak.
            with self._loading:
                if key not in self._held:
                    self._load_now(command, key)
        except ShardComputeError as error:
            log.warning("layers %d to %d of %s could not be loaded: %s", *key[1:], command.model, error)
            self._tell_failed(key, command.model, str(error))
            raise
        self._tell_held()

    def _tell_failed(self, key: ShardKey, model: str, reason: str) -> None:
        life, (chain, start, stop) = self._control.incarnation, key
        self._control.tell(ShardFailed(self.node, life, chain, model, start, stop, reason, 0.0))

    def _tell_held(self) -> None:
        """Say what is in memory. More than once, because the coordinator may have been away when it came there."""
        # Under the lock, so that nothing is unloaded, and that answered, between looking and saying.
        with self._lock:
            for (chain, start, stop), held in self._held.items():
                life = self._control.incarnation
                self._control.tell(
                    ShardLoaded(self.node, life, chain, held.model, start, stop, held.size_bytes)
                )

    def _fetch_card(self, origin: Peer, model: str) -> Card:
        """A moment without the coordinator is no reason to give up."""
        for delay_s in _RETRY_DELAYS_S:
            try:
                return fetch_card(partial(self._endpoint.dial, origin.url, "weights", origin.node), model)
            except LinkError:
                if self._closing.wait(delay_s):
                    raise
        return fetch_card(partial(self._endpoint.dial, origin.url, "weights", origin.node), model)

    def _await_room(self, size_bytes: int) -> None:
        """What is no longer wanted here is unloaded in a moment; CapacityError if that does not suffice."""

        def used_bytes() -> int:
            return sum(held.size_bytes + held.draft_head_bytes for held in self._held.values())

        can_fit = size_bytes <= self._memory_bytes
        with self._freed:
            if used_bytes() + size_bytes > self._memory_bytes:
                self._drop_draft_heads()
            if can_fit and self._freed.wait_for(
                lambda: self._closing.is_set() or used_bytes() + size_bytes <= self._memory_bytes,
                _ROOM_TIMEOUT_S,
            ):
                return
            raise CapacityError(
                f"{size_bytes} bytes do not fit beside the {used_bytes()} of {self._memory_bytes} in use",
                hint="give this worker more with --max-memory",
            )

    def _load_now(self, command: LoadLayers, key: ShardKey) -> None:
        *peers, origin = command.sources
        card = self._fetch_card(origin, command.model)
        stage = Stage(command.start, command.stop, card.spec.layer_count)
        kv_bytes = command.kv_tokens * card.spec.kv_bytes_per_token_and_layer * stage.count
        size = card.stage_bytes(stage) + kv_bytes
        self._await_room(size)

        def progress(done: int, total: int) -> None:
            fraction = done / total if total else 1.0
            life = self._control.incarnation
            self._control.tell(
                ShardProgressed(self.node, life, command.chain, command.start, command.stop, fraction)
            )

        options = ExecutorOptions(
            kv_bytes=kv_bytes,
            context_length=min(command.context_length, card.spec.context_length),
            threads=self._options.threads,
            device=self._options.device,
        )
        sources = [
            Supplier(each.node, partial(self._endpoint.dial, each.url, "weights", each.node), each is origin)
            for each in [*peers, origin]
        ]
        with contextlib.closing(RemoteTensors(card, sources, self._cache, progress=progress)) as tensors:
            backend = self._options.backend
            executor = open_remote_shard(card, stage, tensors, backend=backend, options=options)
            vocabulary = served_vocabulary(tensors) if stage.is_last else None
        runtime = StageRuntime(
            executor,
            is_first=stage.is_first,
            is_last=stage.is_last,
            vocabulary=None if vocabulary is None else lambda: vocabulary,
        )
        layer_s = measure_layer(runtime, stage, card.spec.hidden)
        self._stages.add(key, runtime)
        with self._lock:
            self._held[key] = _Held(command.model, size)
        life = self._control.incarnation
        self._control.tell(
            NodeMeasured(node=self.node, incarnation=life, model=command.model, layer_s=layer_s)
        )
        if stage.is_last and draft_head_bytes(card):
            # Not before the stage is there: a chain that waits for it can do without.
            add = partial(self._add_draft_head, key, card, sources, options)
            threading.Thread(target=add, name="draft head", daemon=True).start()

    def _add_draft_head(
        self, key: ShardKey, card: Card, sources: Sequence[Supplier], options: ExecutorOptions
    ) -> None:
        """Let a last stage draft, where there is memory left for that."""
        try:
            with self._loading, contextlib.closing(RemoteTensors(card, sources, self._cache)) as tensors:
                with self._lock:
                    used = sum(held.size_bytes + held.draft_head_bytes for held in self._held.values())
                opened = open_head_drafter(
                    card,
                    tensors,
                    backend=self._options.backend,
                    options=options,
                    room_bytes=self._memory_bytes - used,
                )
                if opened is None:
                    log.info("no memory is left for a draft head of %s", card.model)
                    return
                drafter, size_bytes = opened
                with self._lock:
                    held = self._held.get(key)
                    if held is not None:
                        self._held[key] = replace(held, draft_head_bytes=size_bytes)
                self._stages.draft_with(key, drafter)
        except ShardComputeError as error:
            log.warning("no draft head of %s is used: %s", card.model, error)

    def _drop_draft_heads(self) -> None:
        for key, held in self._held.items():
            if held.draft_head_bytes:
                self._held[key] = replace(held, draft_head_bytes=0)
                self._stages.draft_with(key, None)

    def _probe(self, command: Probe) -> None:
        for measured in probe_links(self.node, command.peers, self._endpoint.dial):
            self._control.tell(measured)

    def _unload(self, key: ShardKey) -> None:
        self._stages.remove(key)
        with self._freed:
            self._held.pop(key, None)
            self._freed.notify_all()
