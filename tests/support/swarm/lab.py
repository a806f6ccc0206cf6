"""A whole swarm inside a test: one cluster, its workers, real links over loopback, and everything that can befall it.

    with swarm(tmp_path, checkpoint, layers=(2, 2, 2, 2)) as lab:
        talk = lab.start(request)
        lab.wait_until(lambda: len(talk.tokens) > 5, "some tokens")
        lab.kill(lab.stage(1))
        assert talk.result() == expected

`layers` says for each worker how many of the model's layers it has room for. What machines measure is replaced by
constants, so that the same machines always make the same plan.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import shutil
import socket
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock
from urllib.parse import urlsplit

from shardcompute.backends.cpu_choice import CpuBackendChoice
from shardcompute.backends.devices import ComputeDevice, host_device
from shardcompute.backends.footprint import holding_of
from shardcompute.control import ClusterState, HealthPolicy, PlacementPolicy
from shardcompute.control.placement.parallelism import Parallelism
from shardcompute.control.sizes import LAYER_OVERHEAD_BYTES, sizes_of
from shardcompute.control.state import Chain, Model, is_loaded
from shardcompute.core.closing import Closing
from shardcompute.core.errors import ShardComputeError
from shardcompute.core.generation import Delta, FinishReason, GenerationRequest, Timings, TokenChoice
from shardcompute.core.kv_types import DEFAULT_KV_TYPE, KvType
from shardcompute.core.settings import load_settings
from shardcompute.decoding.drafting import Drafter
from shardcompute.models.tokenizer import Tokenizer
from shardcompute.node.admin.dry_run import size_up
from shardcompute.node.cluster import Cluster, ClusterOptions
from shardcompute.node.cluster import cluster as cluster_room
from shardcompute.node.coordinator.shared import (
    Candidate,
    Leadership,
    LeaseKeeper,
    cluster_prefix,
    register_candidate,
)
from shardcompute.node.driver.chain_links import OnOverdue, OnRing
from shardcompute.node.driver.hosted_server import DriverHost
from shardcompute.node.driver.pool import DriverPool
from shardcompute.node.driver.repair_wait import QUIET_S
from shardcompute.node.driver.standalone import StandaloneDriver, StandaloneOptions
from shardcompute.node.enrolment.join_client import join_cluster
from shardcompute.node.local.service import EngineOptions, LocalService, open_model
from shardcompute.node.rpc import link_probe
from shardcompute.node.rpc.commands import Attach, LoadLayers
from shardcompute.node.rpc.endpoint import Endpoint
from shardcompute.node.rpc.link_probe import LinkQuality
from shardcompute.node.rpc.session_ids import Resumption
from shardcompute.node.rpc.step_times import STAGE_PATIENCE, Patience
from shardcompute.node.worker import device_speeds, shard_loader
from shardcompute.node.worker import worker as worker_room
from shardcompute.node.worker.memory.offer import RecoveryPolicy
from shardcompute.node.worker.shard_loader import MeasuredShard
from shardcompute.node.worker.speed_probe import BackendSpeed, ShardSpeed, StageSpeed
from shardcompute.node.worker.stages import service_pace
from shardcompute.node.worker.stages.stage_server import ShardKey, StageServer
from shardcompute.node.worker.worker import Worker, WorkerOptions
from shardcompute.security import Credentials, Role, parse_token
from shardcompute.security.attestation.policy import AttestationPolicy
from shardcompute.security.identity import NodeIdentity
from shardcompute.security.tokens import JoinToken
from shardcompute.trust.pools import PoolPolicy
from shardcompute.weights.checkpoint import Checkpoint, adapted, open_checkpoint
from shardcompute.weights.sources.reference import parse_reference
from shardcompute.weights.sources.resolve import resolve
from shardcompute.wire import Link
from support.network.lab_links import LabNetwork, wait_until
from support.swarm.fake_store import FakeStore

KV_TOKENS = 4096
RTT_S = 1e-4
STILL = PlacementPolicy(latency_weight=1.0, min_gain=1e9, tensor_min_gain=1e9, least_lifetime_s=0.0)
"""As few machines as hold the model, the others stand by; a chain that serves is left alone."""
SPREAD = PlacementPolicy(
    latency_weight=0.0, machine_price=0.0, min_gain=1e9, tensor_min_gain=1e9, least_lifetime_s=0.0
)
"""Every machine takes part, whatever room it has."""
HURRIED = HealthPolicy(restart_grace_s=2.0, given_up_after_s=10.0)
"""Who is missing, or silent where nobody can take over, is soon given up."""
DEADLINE_S = 45.0


@dataclass(frozen=True, slots=True)
class Answer:
    """All that a client got."""

    tokens: tuple[TokenChoice, ...]
    text: str
    finish: FinishReason | None
    prompt: tuple[TokenChoice, ...] = ()


class Talk:
    """One generation under way: what has arrived so far."""

    def __init__(self, request: GenerationRequest) -> None:
        self.request = request
        self.tokens: list[TokenChoice] = []
        self.error: BaseException | None = None
        self.timings: Timings | None = None
        self._deltas: list[Delta] = []
        self._ended = threading.Event()

    def took(self, delta: Delta) -> None:
        self._deltas.append(delta)
        self.timings = delta.timings or self.timings
        self.tokens.extend(delta.tokens)

    def ended(self, error: BaseException | None) -> None:
        self.error = error
        self._ended.set()

    @property
    def is_over(self) -> bool:
        return self._ended.is_set()

    def result(self, timeout_s: float = DEADLINE_S) -> Answer:
        assert self._ended.wait(timeout_s), f"no answer in {timeout_s} s; {len(self.tokens)} tokens came"
        if self.error is not None:
            raise self.error
        return answer_of(self._deltas)


def answer_of(deltas: Sequence[Delta]) -> Answer:
    tokens = tuple(choice for delta in deltas for choice in delta.tokens)
    prompt = tuple(choice for delta in deltas for choice in delta.prompt)
    return Answer(tokens, "".join(delta.text for delta in deltas), deltas[-1].finish, prompt)


class LabWorker(Worker):
    """A worker that writes down what it loads."""

    def __init__(self, credentials: Credentials, urls: list[str], options: WorkerOptions) -> None:
        self.loads: list[ShardKey] = []
        self.before_load: Callable[[LoadLayers], None] = lambda command: None
        self.folder = options.folder
        self.credentials = credentials
        super().__init__(credentials, urls, options, self._open_host)

    def _open_host(
        self,
        endpoint: Endpoint,
        on_link_broken: Callable[[str], None],
        on_overdue: OnOverdue,
        on_ring: OnRing,
    ) -> DriverHost:
        self.hosted = DriverHost(endpoint, on_link_broken, on_overdue, on_ring)
        return self.hosted

    @property
    def url(self) -> str:
        return self._endpoint.url

    @property
    def memory_bytes(self) -> int:
        return self._memory_bytes

    @property
    def revoked_nodes(self) -> Collection[str]:
        """Whom it talks to no more."""
        return self._endpoint.revocations.node_ids

    @property
    def stages(self) -> StageServer:
        return self._stages

    def _load_shard(self, command: LoadLayers) -> MeasuredShard | None:
        self.before_load(command)
        measured = super()._load_shard(command)
        if measured is not None:
            self.loads.append(command.place)
        return measured

    def sent_bytes(self) -> dict[str, int]:
        """Of weights, by who got them."""
        return self._weights.sent_bytes()

    def sessions(self) -> int:
        """Sessions that hold KV here."""
        return sum(runtime.kv_usage().sessions for runtime in self._stages.shards().values())

    def session_ids(self) -> set[int]:
        return {id_ for runtime in self._stages.shards().values() for id_ in runtime.session_lengths()}

    def logged_bytes(self) -> int:
        return sum(log.used_bytes for log in self._stages._slots.logs())


@dataclass(frozen=True, slots=True)
class Activation:
    """A chain's epoch came into use, and what it still knew of its sessions."""

    chain: str
    epoch: int
    resumption: Resumption | None


def _device(backend: str) -> ComputeDevice:
    """A CPU; "auto": with a backend that nobody named, so that a model may be computed by llama.cpp."""
    if backend != "auto":
        return host_device(backend=backend)
    return replace(host_device(), alternatives=("llamacpp",))


@dataclass
class LabSwarm(Closing):
    """A running swarm. `close` (or leaving `swarm`) ends all of it."""

    folder: Path
    checkpoints: dict[str, Path]
    options: ClusterOptions
    form: str = "native"
    backend: str = "onnx"
    """What the workers compute with."""
    chains: int = 1
    parallel: Parallelism | None = None
    """How the model is to be cut."""
    adapters: Mapping[str, Path] = field(default_factory=dict)
    """Kept beside every checkpoint that is served."""
    log_bytes: int = 64 << 20
    patience: Patience = STAGE_PATIENCE
    """When a stage counts as stuck."""
    health: HealthPolicy = HURRIED
    recovery: RecoveryPolicy = field(default_factory=RecoveryPolicy)
    """When workers offer memory again that ran out."""
    home_rtt_s: float = RTT_S
    """How far from the coordinator workers find themselves, which are near each other."""
    rtt_s: float = RTT_S
    """How far from each other."""
    has_distances: bool = False
    """Whether frames take that long, and links are measured by probes that do; else it is what probes are said to
    find."""
    layer_s: float | None = None
    """What every worker measures for a layer, with the model and without; None: next to nothing."""
    store: FakeStore | None = None
    """Where there is one, coordinators share it, and lead by it."""
    evidence_of: Callable[[Path], bytes] = lambda folder: b""
    """What the worker in a folder shows of its hardware when it joins."""
    network: LabNetwork = field(default_factory=LabNetwork)
    workers: list[LabWorker] = field(default_factory=list)
    drivers: list[StandaloneDriver] = field(default_factory=list)
    activations: list[Activation] = field(default_factory=list)
    cluster: Cluster = field(init=False)
    _loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.new_event_loop)
    _joined: int = 0

    def __post_init__(self) -> None:
        self._patches = contextlib.ExitStack()
        self.options = replace(self.options, transports=self.network.transports)
        self._patches.enter_context(_constant_measurements(self.layer_s))
        if self.has_distances:
            self.network.one_way_s = self._one_way_s
            self._patches.enter_context(mock.patch.object(link_probe, "time", self.network.clock))
        else:
            self._patches.enter_context(mock.patch.object(link_probe, "probe_link", self._reach))
        host = partial(StageServer, log_bytes=self.log_bytes, patience=self.patience)
        self._patches.enter_context(mock.patch.object(worker_room, "StageServer", host))
        initial = partial(ClusterState, health=self.health)
        self._patches.enter_context(mock.patch.object(cluster_room, "ClusterState", initial))
        self._thread = threading.Thread(target=self._loop.run_forever, name="lab clients")
        self._thread.start()
        self.open_cluster()

    def _reach(self, dial: Callable[[], Link]) -> LinkQuality:
        with dial() as link:
            return LinkQuality(self.home_rtt_s if link.peer == self.cluster.node else self.rtt_s, 1e9)

    def _one_way_s(self, source: str, target: str) -> float:
        if source == target:
            return 0.0
        return (self.home_rtt_s if self.home in (source, target) else self.rtt_s) / 2

    @property
    def home(self) -> str:
        """The coordinator; "" before there is one."""
        cluster = getattr(self, "cluster", None)
        return "" if cluster is None else cluster.node

    # The cluster

    def open_cluster(self) -> None:
        self.cluster = Cluster(self.options, self._lead())
        token = parse_token(self.cluster.access.create_token())
        join_port = int(token.addresses[0].rpartition(":")[2])
        # Started again it is found where it was.
        port = urlsplit(self.cluster.url).port
        assert port is not None
        self.options = replace(self.options, port=port, join_port=join_port)
        self.token = token
        swarm, activate = self.cluster.pool, self.cluster.pool.activate_chain

        def note(command: Attach) -> None:
            activate(command)
            self.activations.append(Activation(command.chain, command.epoch, command.resumption))

        swarm.activate_chain = note  # type: ignore[method-assign]

    def _lead(self) -> Leadership | None:
        """Wait until nobody else leads."""
        if self.store is None:
            return None
        self.client = self.store.client()
        node = NodeIdentity.open(self.options.folder / "coordinator").node_id
        leadership = Leadership(self.client, cluster_prefix(self.options.name), node, ttl_s=1.0)
        self.wait_until(leadership.try_to_lead, "nobody else leads")
        self.keeper = LeaseKeeper(leadership)
        self._patches.callback(self.keeper.close)
        return leadership

    def add_candidate(self) -> ClusterOptions:
        """The options of another coordinator, which has the cluster's authority and does not lead yet."""
        assert self.store is not None
        assert self.cluster.leadership is not None
        self._joined += 1
        folder = self.folder / f"cluster-{self._joined}"
        shutil.copytree(self.options.folder / "authority", folder / "authority")
        with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as two:
            port, join_port = one.getsockname()[1], two.getsockname()[1]
        node = NodeIdentity.open(folder / "coordinator").node_id
        own = Candidate(node, f"tcp://127.0.0.1:{port}", f"127.0.0.1:{join_port}")
        register_candidate(self.store.client(), self.cluster.leadership.prefix, own)
        self.cluster._refresh_list()
        return replace(self.options, folder=folder, port=port, join_port=join_port)

    def serve(self, name: str | None = None, *, chains: int | None = None) -> None:
        """Serve one of the checkpoints, or all of them."""
        for each, path in self.checkpoints.items():
            if name in (None, each):
                checkpoint = adapted(open_tiny(path), self.adapters, None)
                self.cluster.serve(
                    checkpoint, form=self.form, chains=chains or self.chains, parallel=self.parallel
                )

    def kill_cluster(self) -> None:
        """The coordinator's process dies: not a word to anybody, nothing more is written down."""
        if self.store is not None:
            self.keeper.close()
        self.cluster.coordinator.close()
        self.network.kill(self.cluster.node)
        self.cluster.close()

    @property
    def state(self) -> ClusterState:
        return self.cluster.coordinator.state

    @property
    def model(self) -> str:
        return next(iter(self.checkpoints))

    def chain(self, model: str | None = None) -> Chain:
        """The first chain of a model."""
        return self.state.live_chains(model or self.model)[0]

    def is_serving(self, model: str | None = None, *, stages: int | None = None, standbys: int = 0) -> bool:
        """All chains serve, with so many stages and at least so many standbys that are loaded."""
        chains = self.state.live_chains(model)
        wanted = sum(entry.chain_count for name, entry in self.state.models.items() if model in (None, name))
        return len(chains) == wanted > 0 and all(
            chain.status == "ready"
            and not chain.is_interrupted
            and stages in (None, len(chain.stages))
            and len(self.ready_standbys(chain)) >= standbys
            for chain in chains
        )

    def ready_standbys(self, chain: Chain) -> list[str]:
        return [standby.node for standby in chain.standbys if is_loaded(self.state, chain, standby)]

    def wait_serving(self, model: str | None = None, *, stages: int | None = None, standbys: int = 0) -> None:
        self.wait_until(
            lambda: self.is_serving(model, stages=stages, standbys=standbys),
            lambda: f"{stages} stages and {standbys} standbys of {model or 'all'}: {self.describe()}",
        )

    def wait_until(self, condition: Callable[[], bool], what: str | Callable[[], str]) -> None:
        wait_until(condition, what, DEADLINE_S)

    def wait_real_time(self, seconds: float) -> None:
        """For what is about time itself: nothing happens that could be waited for."""
        threading.Event().wait(seconds)

    def describe(self) -> str:
        nodes = ", ".join(
            f"{n.id[:6]} {n.status}{' draining' * n.is_draining}" for n in self.state.nodes.values()
        )
        chains = "; ".join(
            f"{c.id} epoch {c.epoch} {c.status}{' interrupted' * c.is_interrupted} ({c.reason}) "
            f"{[(s.node[:6], s.start, s.stop) for s in c.stages]} + "
            f"{[(s.node[:6], s.start, s.stop) for s in c.standbys]}"
            for c in self.state.chains.values()
        )
        return f"nodes {nodes}; chains {chains}"

    # Workers

    def add_worker(
        self,
        layers: int,
        *,
        advertise: str = "",
        backend: str = "",
        seed_bytes: int = 0,
        token: JoinToken | None = None,
    ) -> LabWorker:
        """Another machine, with room for so many layers of the first model; `backend` "": as all others."""
        self._joined += 1
        folder = self.folder / f"worker-{self._joined}"
        room = self.room_for(layers, backend) if layers else 1
        return self._open_worker(folder, room, advertise, backend, seed_bytes, token)

    def revive(self, worker: LabWorker) -> LabWorker:
        """The same machine, started again."""
        return self._open_worker(worker.folder, worker.memory_bytes)

    def _open_worker(
        self,
        folder: Path,
        memory_bytes: int,
        advertise: str = "",
        backend: str = "",
        seed_bytes: int = 0,
        token: JoinToken | None = None,
    ) -> LabWorker:
        credentials, urls = join_cluster(
            token or self.token, folder, Role.WORKER, evidence=self.evidence_of(folder)
        )
        options = WorkerOptions(
            folder,
            name=folder.name,
            advertise=advertise,
            threads=1,
            device=_device(backend or self.backend),
            max_memory_bytes=memory_bytes,
            transports=self.network.transports,
            recovery=self.recovery,
            seed_bytes=seed_bytes,
        )
        worker = LabWorker(credentials, urls, options)
        self.workers.append(worker)
        return worker

    def room_for(self, layers: int, backend: str = "") -> int:
        named = backend or self.backend
        held = sizes_of(self.sized()).on(holding_of("llamacpp" if named == "auto" else named, "cpu"))
        layer = max(after - before for before, after in itertools.pairwise(held.memory_before))
        own = held.memory_bytes(0, held.layer_count) - held.memory_before[-1]
        drafting = 0 if self.options.draft_heads is None else held.memory_before[1] * 3 // 4
        return layers * layer + own + drafting

    def sized(self) -> Model:
        with adapted(open_tiny(self.checkpoints[self.model]), self.adapters, None) as checkpoint:
            return size_up(
                checkpoint,
                self.form,
                kv_tokens=self.options.kv_tokens,
                kv_type=self.options.kv_type,
                context_length=self.options.context_length,
            )

    def worker(self, node: str) -> LabWorker:
        return next(worker for worker in self.workers if worker.node == node)

    def stage(self, index: int, model: str | None = None) -> LabWorker:
        """The worker that holds a stage of the first chain; -1 is the last."""
        return self.worker(self.chain(model).stages[index].node)

    def kill(self, worker: LabWorker) -> None:
        """Its sockets are closed without a goodbye and its threads end."""
        self.workers.remove(worker)
        self.network.kill(worker.node)
        worker.close()

    def leave(self, worker: LabWorker, patience_s: float = DEADLINE_S) -> None:
        """It is stopped politely."""
        worker.leave(patience_s)
        self.workers.remove(worker)
        worker.close()

    def freeze(self, worker: LabWorker) -> None:
        """It keeps its sockets, and neither says nor hears anything."""
        self.network.freeze(worker.node)

    def thaw(self, worker: LabWorker) -> None:
        self.network.thaw(worker.node)

    def cut(self, a: str, b: str, *, is_lasting: bool = False) -> None:
        """The links that carry frames between two nodes break, while both live."""
        assert self.network.cut(a, b, is_lasting=is_lasting) > 0, "there was no link to cut"

    # Drivers beside the coordinator's own

    def add_driver(self, **options: Any) -> StandaloneDriver:
        """Another driver, not yet in use."""
        self._joined += 1
        return self.open_driver(self.folder / f"driver-{self._joined}", **options)

    def open_driver(self, folder: Path, **given: Any) -> StandaloneDriver:
        credentials, urls = join_cluster(self.token, folder, Role.DRIVER)
        options = StandaloneOptions(name=folder.name, transports=self.network.transports, **given)
        driver = StandaloneDriver(credentials, urls, options)
        self.drivers.append(driver)
        driver.start()
        return driver

    def wait_driving(self, *drivers: StandaloneDriver) -> None:
        """These, and nobody else, use all chains beside the coordinator's own driver."""
        expected = {(self.cluster.node, 0), *((each.node, each.pool.session_namespace) for each in drivers)}
        self.wait_until(
            lambda: all(
                {(each.driver, each.session_namespace) for each in chain.drivers if each.epoch == chain.epoch}
                == expected
                and len(chain.drivers) == len(expected)
                and all(each.kv_tokens == self.options.kv_tokens // len(expected) for each in chain.drivers)
                for chain in self.state.live_chains()
            ),
            lambda: (
                f"drivers {expected}: {[chain.drivers for chain in self.state.live_chains()]}; {self.describe()}"
            ),
        )

    def host(self) -> LabWorker | None:
        """The worker whose driver the coordinator hands the first chain's generations to; None while it has its own."""
        node = self.cluster.pool.host_of(self.chain().id)
        return None if node is None else self.worker(node)

    def wait_hosted(self) -> LabWorker:
        self.wait_until(
            lambda: self.host() is not None,
            lambda: f"a driver on a worker: {self.chain().drivers}; {self.describe()}",
        )
        host = self.host()
        assert host is not None
        return host

    def kill_driver(self, driver: StandaloneDriver) -> None:
        self.drivers.remove(driver)
        self.network.kill(driver.node)
        driver.close()

    # Clients

    def start(
        self, request: GenerationRequest, model: str | None = None, driver: StandaloneDriver | None = None
    ) -> Talk:
        """Ask the coordinator's own driver, or another one."""
        talk = Talk(request)
        service = (driver or self.cluster).pool
        asyncio.run_coroutine_threadsafe(self._follow(service, talk, model or self.model), self._loop)
        return talk

    def ask(self, request: GenerationRequest, model: str | None = None) -> Answer:
        return self.start(request, model).result()

    async def _follow(self, service: DriverPool, talk: Talk, model: str) -> None:
        try:
            async for delta in service.generate(model, talk.request):
                talk.took(delta)
        except ShardComputeError as error:
            talk.ended(error)
        except BaseException as error:
            talk.ended(error)
            raise
        else:
            talk.ended(None)

    def wait_quiet(self) -> None:
        """No session holds memory anywhere any more, except where nobody can be told."""

        def is_quiet() -> bool:
            services = (self.cluster.pool, *(driver.pool for driver in self.drivers))
            for service in services:
                service.drop_prefixes()  # what ends from now on is kept again
            if any(service.load().running or service.load().waiting for service in services):
                return False
            gates = [(worker, self.network.gate_of(worker.node)) for worker in self.workers]
            return all(worker.sessions() == 0 for worker, gate in gates if gate.is_open)

        self.wait_until(
            is_quiet,
            lambda: f"KV left: {[(w.node[:6], w.sessions()) for w in self.workers]}; {self.describe()}",
        )

    # The end

    def close(self) -> None:
        for node in (*self.workers, *self.drivers):
            self.network.thaw(node.node)
        for driver in self.drivers:
            driver.close()
        for worker in self.workers:
            worker.close()
        self.cluster.close()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self._patches.close()


@contextmanager
def swarm(
    folder: Path,
    *checkpoints: Path,
    layers: Sequence[int] = (2, 2, 2),
    backends: Sequence[str] = (),
    stages: int | None = None,
    standbys: int = 0,
    placing: PlacementPolicy = STILL,
    kv_tokens: int = KV_TOKENS,
    kv_type: KvType = DEFAULT_KV_TYPE,
    wire: str = "exact",
    draft_heads: Path | None = None,
    open_drafters: Callable[[Tokenizer, int], Sequence[Drafter]] = lambda tokenizer, vocab_size: (),
    patience_s: float = 0.0,
    quiet_s: float = QUIET_S,
    choose_backend: Callable[[Checkpoint, str], CpuBackendChoice] | None = None,
    audit_rate: float = 0.0,
    pool: PoolPolicy | None = None,
    canaries_every_s: float = 0.0,
    attestation: AttestationPolicy | None = None,
    **options: Any,
) -> Iterator[LabSwarm]:
    """A swarm that serves these checkpoints already, from workers with room for `layers` layers each; `backends`
    compute on the first of them.

    Waits for as many `stages` and loaded `standbys` as said.
    """
    cluster = ClusterOptions(
        folder / "cluster",
        port=0,
        join_port=0,
        kv_tokens=kv_tokens,
        kv_type=kv_type,
        context_length=512,
        placing=placing,
        wire=wire,
        draft_heads=draft_heads,
        open_drafters=open_drafters,
        patience_s=patience_s,
        quiet_s=quiet_s,
        choose_backend=choose_backend,
        audit_rate=audit_rate,
        pool=pool,
        canaries_every_s=canaries_every_s,
        attestation=attestation,
    )
    with LabSwarm(folder, {_name_of(path): path for path in checkpoints}, cluster, **options) as lab:
        for room, backend in itertools.zip_longest(layers, backends, fillvalue=""):
            lab.add_worker(int(room), backend=str(backend))
        if layers:
            # A plan that is made before all have come is another plan.
            lab.wait_until(
                lambda: [n.status for n in lab.state.nodes.values()] == ["ready"] * len(layers),
                lambda: f"all workers: {lab.describe()}",
            )
            lab.serve()
            lab.wait_serving(stages=stages, standbys=standbys)
        yield lab


def _name_of(path: Path) -> str:
    with open_tiny(path) as checkpoint:
        return checkpoint.name


def open_tiny(path: Path) -> Checkpoint:
    return open_checkpoint(resolve(parse_reference(str(path)), load_settings()))


def open_alone(
    path: Path,
    backend: str = "onnx",
    kv_type: KvType = DEFAULT_KV_TYPE,
    adapters: Mapping[str, Path] | None = None,
) -> LocalService:
    """The same model in one process."""
    options = EngineOptions(
        backend=backend,
        threads=1,
        context_length=512,
        kv_bytes=64 << 20,
        kv_type=kv_type,
        adapters=adapters or {},
    )
    return open_model(str(path), load_settings(), options)


class Alone:
    """What one process answers; each request is computed once."""

    def __init__(self, service: LocalService) -> None:
        self.service = service
        self._answers: dict[str, Answer] = {}

    def answer(self, request: GenerationRequest) -> Answer:
        key = repr(request)
        if key not in self._answers:
            self._answers[key] = answer_of(list(self.service.stream(request)))
        return self._answers[key]


@contextmanager
def _constant_measurements(layer_s: float | None) -> Iterator[None]:
    probed = BackendSpeed(3e-12 if layer_s is None else layer_s / LAYER_OVERHEAD_BYTES, 1e-12, 0.0)
    loaded = ShardSpeed(StageSpeed(layer_s or 1e-4), layer_s or 1e-4)
    with (
        mock.patch.object(device_speeds, "probe_backend", return_value=probed),
        mock.patch.object(shard_loader, "measure_shard", return_value=loaded),
        mock.patch.object(service_pace, "LEAST_WINDOW_S", 1e9),
    ):
        yield
