"""Worker: one machine's shards, told by the coordinator what to hold and whom to talk to."""

from __future__ import annotations

import logging
import platform
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from dataclasses import replace as replace_fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from msgspec.structs import replace

from shardcompute.backends.devices import ComputeDevice, host_device, offered_bytes, spare_bytes
from shardcompute.backends.footprint import holding_of
from shardcompute.backends.processor import own_class, own_fallback_class
from shardcompute.control.events import (
    LinkBroken,
    MemoryRegained,
    NodeJoined,
    NodeMeasured,
    NodeRested,
    RingTimed,
    ShardFailed,
    ShardLoaded,
    ShardProgressed,
)
from shardcompute.control.state import AlternativeBackend, Holding, RankPlace, UnusedDevice
from shardcompute.core.errors import BackendError, DeviceMemoryError, LinkError, ShardComputeError
from shardcompute.core.fields import shorten
from shardcompute.core.process_memory import give_back_large_blocks, resident_bytes
from shardcompute.core.settings import Settings
from shardcompute.core.units import format_bytes
from shardcompute.node.enrolment.stored import remember_urls
from shardcompute.node.rpc.commands import (
    Admit,
    Connect,
    Connected,
    Dismiss,
    ExpectKv,
    FenceOff,
    HoldLayers,
    LoadLayers,
    NodeCommand,
    OpenLinks,
    Probe,
    Redial,
    SendKv,
    ShowRows,
    TakeDraftHead,
    TraceStep,
    UnloadLayers,
    encode_answer,
    encode_rows,
)
from shardcompute.node.rpc.control_client import ControlClient, FindAgain, HeartbeatFacts
from shardcompute.node.rpc.endpoint import Endpoint, receive_all
from shardcompute.node.rpc.link_probe import answer_probes, probe_links
from shardcompute.node.rpc.whereabouts import Whereabouts
from shardcompute.node.weights.server import CachedModels, WeightsServer
from shardcompute.node.worker.conditions.policy import WorkConditions
from shardcompute.node.worker.device_speeds import DeviceSpeeds
from shardcompute.node.worker.finetuning import FinetuneHost
from shardcompute.node.worker.memory.offer import RecoveryPolicy
from shardcompute.node.worker.memory.recovery import OfferRecovery
from shardcompute.node.worker.power.meter import open_meter
from shardcompute.node.worker.power.terms import PowerTerms
from shardcompute.node.worker.ranks.groups import RankGroups
from shardcompute.node.worker.receipts.claims import claim_stage
from shardcompute.node.worker.shard_loader import MeasuredShard, ShardLoader, ShardOptions
from shardcompute.node.worker.shares.host import ShareHost
from shardcompute.node.worker.speed_book import DeviceKey, SpeedBook
from shardcompute.node.worker.stages.service_pace import ShardPace
from shardcompute.node.worker.stages.stage_server import StageServer
from shardcompute.node.worker.stages.stage_slots import ShardKey
from shardcompute.security.credentials import Credentials
from shardcompute.security.revocations import Revocations
from shardcompute.version import VERSION
from shardcompute.weights.shard_cache import ShardCache
from shardcompute.weights.sources.rate import RateLimit
from shardcompute.wire import (
    CODECS,
    Link,
    Message,
    StageSigned,
    StepFailed,
    StepResult,
    Transports,
    default_transports,
    join_address,
)
from shardcompute.wire.control import StepOverdue

if TYPE_CHECKING:
    from shardcompute.node.worker.conditions.watch import ConditionWatch

log = logging.getLogger(__name__)
_RELIEF_S = 5.0
_MOST_WORDS = 300


@dataclass(frozen=True, slots=True)
class WorkerOptions:
    """How a worker takes part. `max_memory_bytes` bounds all that it takes of its device's memory; where that is the
    machine's own, `process_bytes` of it are what the process takes before it holds any layer."""

    folder: Path
    host: str = "127.0.0.1"
    port: int = 0
    advertise: str = ""
    name: str = ""
    max_memory_bytes: int | None = None
    process_bytes: int = 0
    threads: int = 1
    device: ComputeDevice = field(default_factory=host_device)
    """Where it computes, as it was found at the start."""
    unused: tuple[ComputeDevice, ...] = ()
    """GPUs of this machine that cannot be used, and why: for others to see."""
    transports: Transports = field(default_factory=default_transports)
    """How links are made, by the scheme of their URLs."""
    may_host: bool = True
    """Whether it may drive chains, beside computing: not where that brings them nearer to nobody."""
    reads_originals: bool = False
    """Whether models that are served from this machine are read from where they lie (`weights.originals`)."""
    sources: Settings | None = None
    """Which hub, mirrors and token weights are read with that lie there; None: all come from other nodes."""
    recovery: RecoveryPolicy = field(default_factory=RecoveryPolicy)
    """When memory that ran out is offered again."""
    conditions: WorkConditions = field(default_factory=WorkConditions)
    """When its owner lets it work."""
    power: PowerTerms = field(default_factory=PowerTerms)
    """What its owner says that it draws and costs."""
    seed_bytes: int = 0
    """What its disk may hold of weights for others, while no chain needs it."""
    follows_address: bool = False
    """Whether it listens where its coordinator sees it, also when that changes; else where it was told to."""
    find_again: FindAgain = lambda: ()
    """Where else its coordinator may be."""
    find_holders: FindAgain = lambda: ()
    """Where nodes may be that hold weights."""
    max_upload: int | None = None
    """Bytes of weights a second that others may have from it; None: as many as they take."""
    measure_spare: Callable[[ComputeDevice], int | None] = spare_bytes
    """What may be taken of the device's memory, besides what is held there."""


@dataclass(frozen=True, slots=True)
class WorkerShard:
    """Layers of a chain that a worker holds or fetches."""

    chain: str
    model: str
    start: int
    stop: int
    tensor: RankPlace | None = None
    """Which share of them; None: all of them."""
    fraction: float = 1.0
    """How much of them has been fetched."""
    is_at_work: bool = False
    """Whether the chain runs through them; else they stand by."""

    @property
    def place(self) -> ShardKey:
        return self.chain, self.start, self.stop, self.tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerView:
    """A worker at one moment, for people to see."""

    device: ComputeDevice
    threads: int
    memory_bytes: int
    seconds_per_byte: float
    is_registered: bool = False
    was_registered: bool = False
    """Now or before."""
    loading: tuple[WorkerShard, ...] = ()
    held: tuple[WorkerShard, ...] = ()
    problem: str = ""
    """What went wrong last."""
    rest_reason: str = ""
    """Why it must not work now; "": it may."""


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


class NoHostedDrivers:
    """Of a worker that hosts none: nothing of a driver is imported for it."""

    @property
    def session_namespace(self) -> int:
        return 0

    def carry_out(self, command: NodeCommand) -> None:
        """No command is for us."""

    def take(self, message: Message, body: memoryview, sender: str) -> None:
        """Nobody waits for it."""

    def serve(self, link: Link) -> None:
        raise LinkError("no driver is hosted here", hint="ask the coordinator")

    def unreachable(self) -> set[str]:
        return set()

    def close(self) -> None:
        """There is nothing to close."""


OnRing = Callable[[str, int, float, float], None]
HostDrivers = Callable[
    [Endpoint, Callable[[str], None], Callable[[StepOverdue], None], OnRing], HostedDriversPort
]
"""Opens them on a worker's endpoint, and has broken links, missing results, and what steps take (chain, epoch, seconds
once round, and of that on lines) reported."""


class Worker:
    """Serves until it is told to leave or is closed."""

    def __init__(
        self,
        credentials: Credentials,
        control_urls: list[str],
        options: WorkerOptions,
        host_drivers: HostDrivers | None,
    ) -> None:
        """`host_drivers`: None where `options` say that it may host none."""
        give_back_large_blocks()
        self._options = options
        self._loading: dict[ShardKey, WorkerShard] = {}
        self._connected: set[ShardKey] = set()
        self._problem = ""
        self._memory_reason = ""
        self._rest = ("", False)
        self._telling_offer = threading.Lock()
        """Of two changes of what is offered, the coordinator hears the later one last."""
        self._memory_bytes = offered_bytes(options.device, limit_bytes=options.max_memory_bytes)
        self._cache = ShardCache(options.folder / "shards")
        rate = None if options.max_upload is None else RateLimit(options.max_upload)
        self._weights = WeightsServer(CachedModels(self._cache), rate=rate)
        self._power = open_meter(options.device, options.power.sharers)
        self._speeds = DeviceSpeeds(
            DeviceKey(options.device.label, options.device.backend, options.device.name, options.threads),
            SpeedBook(options.folder / "speeds.json"),
        )
        self._endpoint = Endpoint(
            credentials,
            join_address(options.host, options.port),
            {
                "stage": self._serve_frames,
                "collective": lambda link: self._ranks.serve(link),
                "driver": self._serve_frames,
                "weights": self._serve_weights,
                "kv": lambda link: self._stages.serve_kv(link),
                "generations": lambda link: self._hosted.serve(link),
                "finetune": lambda link: self._finetuning.serve(link),
                "shares": lambda link: self._shares.serve(link),
                "probe": answer_probes,
            },
            advertise=options.advertise,
            transports=options.transports,
        )
        self.node = self._endpoint.node
        self._hosted: HostedDriversPort = NoHostedDrivers()
        if host_drivers is not None:
            self._hosted = host_drivers(
                self._endpoint,
                self._link_broken,
                lambda overdue: self._control.report(overdue),
                lambda chain, epoch, step_s, wire_s: self._control.tell(
                    RingTimed(chain, epoch, step_s, wire_s, 0.0)
                ),
            )
        self._ranks = RankGroups(
            self._endpoint.dialler("collective"), self._link_broken, on_out_of_memory=self._give_up
        )
        self._stages = StageServer(
            self.node,
            self._endpoint.dialler("stage"),
            self._link_broken,
            ranks=self._ranks,
            dial_kv=self._endpoint.dialler("kv"),
            credentials=lambda: self._endpoint.credentials,
            on_out_of_memory=self._give_up,
            on_pace=self._tell_pace,
        )
        self._loader = ShardLoader(
            self._stages,
            self._cache,
            self._endpoint.dialler("weights"),
            ShardOptions(
                self._memory_bytes,
                options.threads,
                options.device.backend,
                options.device.name,
                alternatives=options.device.alternatives,
                process_bytes=options.process_bytes,
                overhead_s=self._speeds.probed.overhead_s,
                reads_originals=options.reads_originals,
                sources=options.sources,
                recovery=options.recovery,
                find_holders=options.find_holders,
                claim=partial(claim_stage, options.device),
            ),
        )
        self._shares = ShareHost(self._loader)
        self._finetuning = FinetuneHost(
            self._loader,
            self._endpoint.dialler("finetune"),
            _training_device(options.device),
            options.threads,
        )
        self._recovery = OfferRecovery(
            self._loader, lambda: options.measure_spare(options.device), self._tell_regained
        )
        self._control = ControlClient(
            self._endpoint,
            control_urls,
            self._describe,
            self._carry_out,
            self._registered,
            self._heartbeat_facts,
            on_urls=lambda urls: remember_urls(credentials, urls),
            whereabouts=Whereabouts(self._endpoint, follows=options.follows_address),
            find_again=options.find_again,
        )
        self._watch: ConditionWatch | None = None
        if options.conditions.has_any:
            from shardcompute.node.worker.conditions.watch import ConditionWatch

            self._watch = ConditionWatch(options.conditions, self)
            # The coordinator is to hear with the first word that it must not work.
            self._watch.step()
            self._watch.start()
        self._endpoint.start()
        self._control.start()

    @property
    def is_idle(self) -> bool:
        """Whether it holds no layers and fetches none."""
        with self._loader.held() as shards:
            return not shards and not self._loading

    def rest(self, reason: str, *, is_at_rest: bool) -> None:
        """Ask to be relieved of all work, or to be given some again (""); `is_at_rest`: it works no more."""
        self._rest = (shorten(reason, _MOST_WORDS), is_at_rest)
        self._control.tell(NodeRested(self.node, self._control.incarnation, *self._rest))

    def view(self) -> WorkerView:
        with self._loader.held() as shards:
            held = tuple(
                WorkerShard(
                    shard.chain,
                    shard.model,
                    shard.start,
                    shard.stop,
                    shard.tensor,
                    is_at_work=shard.place in self._connected,
                )
                for shard in sorted(shards, key=lambda shard: (shard.model, shard.start, shard.chain))
            )
        return WorkerView(
            device=self._options.device,
            threads=self._options.threads,
            memory_bytes=self._loader.memory_bytes,
            seconds_per_byte=self._speeds.probed.seconds_per_byte,
            is_registered=self._control.is_registered,
            was_registered=self._control.incarnation > 0,
            loading=tuple(self._loading.values()),
            held=held,
            problem=self._problem,
            rest_reason=self._rest[0],
        )

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
        if self._watch is not None:
            self._watch.close()
        self._recovery.close()
        self._finetuning.close()
        self._loader.close()
        self._control.close()
        self._hosted.close()
        self._stages.close()
        self._endpoint.close()

    # What others ask over links

    def _serve_frames(self, link: Link) -> None:
        receive_all(link, self._take)

    def _take(self, message: Message, body: memoryview, sender: str) -> None:
        if isinstance(message, StepResult | StepFailed | StageSigned):
            self._hosted.take(message, body, sender)
        else:
            self._stages.take(message, body, sender)

    def _serve_weights(self, link: Link) -> None:
        self._weights.serve(link)

    def _link_broken(self, node: str) -> None:
        self._control.tell(LinkBroken(self.node, node, 0.0))

    # What the coordinator asks

    def _describe(self) -> NodeJoined:
        memory_bytes = self._loader.memory_bytes
        with self._loader.held() as shards:
            return NodeJoined(
                node=self.node,
                name=self._options.name or platform.node() or self.node,
                role="worker",
                address=self._endpoint.url,
                device=self._options.device.name,
                backend=self._options.device.backend,
                device_label=self._options.device.label,
                device_bytes=self._options.device.total_bytes,
                device_remark=shorten(self._options.device.remark, _MOST_WORDS),
                unused_devices=_unused(self._options.unused),
                exactness=own_class(self._options.device).name,
                fallback=own_fallback_class(self._options.device),
                memory_bytes=memory_bytes,
                memory_reason=self._memory_reason,
                threads=self._options.threads,
                version=VERSION,
                incarnation=0,
                now_s=0.0,
                seconds_per_byte=self._speeds.probed.seconds_per_byte,
                prefill_seconds_per_byte=self._speeds.probed.prefill_seconds_per_byte,
                overhead_s=self._speeds.probed.overhead_s,
                probed_at_s=self._speeds.probed_at_s,
                remembered=self._speeds.remembered(),
                cached=tuple(Holding(held.model, held.start, held.stop) for held in self._cache.holdings()),
                shards=shards,
                codecs=tuple(CODECS),
                session_namespace=self._hosted.session_namespace if self._options.may_host else 0,
                holding=self._loader.holding(self._options.device.backend),
                alternatives=_alternatives(self._options.device),
                process_bytes=self._options.process_bytes,
                rest_reason=self._rest[0],
                is_at_rest=self._rest[1],
                stated_watts=self._options.power.watts or 0.0,
                price_per_hour=self._options.power.price_per_hour,
                seed_bytes=self._options.seed_bytes,
            )

    def _heartbeat_facts(self) -> HeartbeatFacts:
        self._power.look(time.monotonic(), self._stages.computed_s)
        return HeartbeatFacts(
            resident_bytes(),
            self._loader.kv_used_bytes(),
            self._loader.draft_heads(),
            self._power.busy_watts,
            self._power.idle_watts,
            sum(self._weights.sent_bytes().values()),
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
        elif isinstance(command, HoldLayers):
            self._loader.hold(command)
        elif isinstance(command, UnloadLayers):
            self._loader.unload(command.place)
            self._speeds.unloaded(command.place)
        elif isinstance(command, TakeDraftHead):
            self._loader.take_draft_head(command)
        elif isinstance(command, Connect):
            return encode_answer(self._connect(command))
        elif isinstance(command, FenceOff):
            self._connected = {key for key in self._connected if key[0] != command.chain}
            self._stages.fence(command.chain, command.epoch, forgets=command.forgets)
            self._hosted.carry_out(command)
        elif isinstance(command, ExpectKv):
            self._stages.expect_kv(command)
        elif isinstance(command, SendKv):
            self._stages.send_kv(command)
        elif isinstance(command, OpenLinks):
            self._stages.open_links(command)
        elif isinstance(command, Admit):
            return encode_answer(self._stages.admit(command))
        elif isinstance(command, Dismiss):
            self._stages.dismiss(command.chain, command.session_namespace)
        elif isinstance(command, TraceStep):
            return encode_answer(self._stages.trace(command))
        elif isinstance(command, Redial) and not command.by_driver:
            self._stages.redial(command)
        elif isinstance(command, ShowRows):
            return encode_rows(self._stages.show_rows(command))
        elif isinstance(command, Probe):
            self._probe(command)
        else:
            self._hosted.carry_out(command)
        return b""

    def _connect(self, command: Connect) -> Connected:
        key = command.place
        is_follower = self._ranks.follows(key)
        if key not in self._stages.shards() and not is_follower:
            # Unloaded while the coordinator was away: it must hear that, and of no model that failed to load.
            self._tell_failed(key, "-", BackendError("it is not loaded here"))
        connected = self._ranks.follow(command) if is_follower else self._stages.connect(command)
        self._connected = {*self._connected, key}
        return connected

    def _load(self, command: LoadLayers) -> None:
        key = command.place
        try:
            # What is loaded could not be used.
            self._stages.check_not_stuck()
            measured = self._load_shard(command)
        except ShardComputeError as error:
            log.warning("layers %d to %d of %s could not be loaded: %s", *key[1:3], command.model, error)
            self._problem = (
                f"layers {key[1]}–{key[2] - 1} of {command.model} could not be loaded: {error.message}"
            )
            self._tell_failed(key, command.model, error)
            raise
        finally:
            self._loading.pop(key, None)
        if measured is not None:
            self._tell_measured(self._speeds.loaded(key, command.model, measured))
        self._tell_held()

    def _load_shard(self, command: LoadLayers) -> MeasuredShard | None:
        key = command.place
        loading = WorkerShard(command.chain, command.model, command.start, command.stop, command.tensor)

        def progressed(fraction: float) -> None:
            self._loading[key] = replace_fields(loading, fraction=fraction)
            life, (chain, start, stop, tensor) = self._control.incarnation, key
            self._control.tell(ShardProgressed(self.node, life, chain, start, stop, fraction, tensor))

        return self._loader.load(command, progressed)

    def _tell_failed(self, key: ShardKey, model: str, error: ShardComputeError) -> None:
        life, (chain, start, stop, tensor) = self._control.incarnation, key
        told = shorten(str(error))
        failed = ShardFailed(self.node, life, chain, model, start, stop, told, 0.0, tensor=tensor)
        if not isinstance(error, DeviceMemoryError):
            self._control.tell(failed)
            return
        with self._telling_offer:
            self._memory_reason = shorten(error.message)
            self._control.tell(replace(failed, memory_bytes=self._loader.memory_bytes))
        self._recovery.begin()

    def _give_up(self, key: ShardKey, error: DeviceMemoryError) -> None:
        """Memory ran out in service. In the computing thread, which is at nothing else."""
        shard = self._loader.give_up(key)
        if shard is None:
            return
        self._connected = {each for each in self._connected if each != key}
        what = f"layers {shard.start}–{shard.stop - 1} of {shard.model}"
        log.warning("%s are given up: %s", what, error)
        self._problem = f"{what} were given up: {error.message}"
        self._tell_failed(key, shard.model, error)

    def _tell_regained(self) -> None:
        """Memory that ran out has been free for a while: it is offered again."""
        with self._telling_offer:
            memory_bytes, is_all = self._loader.memory_bytes, self._loader.is_offering_all
            if is_all:
                self._memory_reason = self._problem = ""
            log.info("%s of memory are offered again", format_bytes(memory_bytes))
            life = self._control.incarnation
            self._control.tell(MemoryRegained(self.node, life, memory_bytes, is_all))

    def _tell_held(self) -> None:
        """Say what is in memory. More than once, because the coordinator may have been away when it came there."""
        # Inside the block, so that nothing is unloaded, and that answered, between looking and saying.
        with self._loader.held() as shards:
            for shard in shards:
                life, (chain, start, stop, tensor) = self._control.incarnation, shard.place
                self._control.tell(
                    ShardLoaded(self.node, life, chain, shard.model, start, stop, shard.size_bytes, tensor)
                )

    def _tell_pace(self, key: ShardKey, pace: ShardPace) -> None:
        """What steps in service take of late; the coordinator decides what that means."""
        timed = self._speeds.paced(key, pace)
        if timed is not None:
            self._control.tell(replace(timed, node=self.node, incarnation=self._control.incarnation))

    def _tell_measured(self, measured: NodeMeasured) -> None:
        self._control.tell(replace(measured, node=self.node, incarnation=self._control.incarnation))

    def _probe(self, command: Probe) -> None:
        for measured in probe_links(self.node, command.peers, self._endpoint.dial):
            self._control.tell(measured)


def _training_device(device: ComputeDevice) -> str:
    """What torch calls it; a CPU where something else than torch computes."""
    return device.name if device.backend == "torch" else "cpu"


def _alternatives(device: ComputeDevice) -> tuple[AlternativeBackend, ...]:
    return tuple(
        AlternativeBackend(each, holding_of(each, device.name), own_class(device, backend=each).name)
        for each in device.alternatives
    )


def _unused(devices: Sequence[ComputeDevice]) -> tuple[UnusedDevice, ...]:
    return tuple(
        UnusedDevice(
            each.name,
            each.label,
            shorten(each.problem, _MOST_WORDS),
            shorten(each.fix, _MOST_WORDS),
            each.total_bytes,
        )
        for each in devices
    )
