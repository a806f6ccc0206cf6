"""A cluster in the foreground: coordinator and HTTP API in this process, local workers beside it.

`up` and `coordinator` are this with different plans. What happens in the cluster is said line by line, what is
being fetched also in a status line on terminals; the greeting comes with the first chain that serves.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING

from shardcompute.cli.attestation.files import attestation_policy
from shardcompute.cli.console import Screen, has_terminal_input, standard_input
from shardcompute.cli.failures import show_error
from shardcompute.cli.options.adapters import AdapterArguments
from shardcompute.cli.options.cluster import (
    CLUSTER_PORT,
    CONTEXT,
    JOIN_PORT,
    KV_TOKENS,
    LATENCY_WEIGHTS,
    RELAY_PORT,
    ClusterArguments,
    DriverPlacementOption,
    Preference,
    ServingArguments,
    cluster_folder,
    draft_heads_folder,
)
from shardcompute.cli.options.https import TlsExamples
from shardcompute.cli.options.keys import server_keys
from shardcompute.cli.progress import status_line, waiting
from shardcompute.cli.serve.addresses import (
    check_ports,
    is_address,
    is_any_address,
    is_loopback,
    near_host,
    reachable_host,
    reachable_hosts,
)
from shardcompute.cli.serve.greeting import dashboard, greeting, invitation, new_key
from shardcompute.cli.serve.shaping import open_transports
from shardcompute.cli.stopping import terminating_as_interrupt
from shardcompute.core.errors import JournalError, ShardComputeError, UsageError
from shardcompute.core.generation import Speculation
from shardcompute.core.kv_types import DEFAULT_KV_TYPE, KvType
from shardcompute.core.phases import log_phases, phase
from shardcompute.core.settings import Settings
from shardcompute.core.sockets.hosts import bracketed
from shardcompute.core.units import count_of
from shardcompute.version import VERSION
from shardcompute.weights.sources.reference import parse_reference

if TYPE_CHECKING:
    from starlette.applications import Starlette

    from shardcompute.api.access.hosts import AllowedHosts
    from shardcompute.api.access.sign_in import PageSessions
    from shardcompute.backends.cpu_choice import CpuBackendChoice
    from shardcompute.control.placement.parallelism import Parallelism
    from shardcompute.control.state import ClusterState
    from shardcompute.node.admin.admin import ClusterAdmin
    from shardcompute.node.cluster import Cluster, ClusterOptions, PreparedModel
    from shardcompute.node.coordinator.shared import Leadership
    from shardcompute.node.process.launch import Served
    from shardcompute.node.process.local_workers import LocalWorkers
    from shardcompute.node.process.pidfile import PidLock
    from shardcompute.node.telemetry.history_store import EventView
    from shardcompute.security.https.server import ServerTls
    from shardcompute.security.https.sources import KeyedCertificate
    from shardcompute.weights.checkpoint import Checkpoint
    from shardcompute.weights.sources.resolve import Fetch

_LOOK_S = 0.2
_SERVER = ("api", "api.standby", "node.admin.admin", "node.process.launch", "web")


@dataclass(frozen=True, slots=True)
class ClusterPlan:
    """What to start. `workers` None: none on this machine. Other Nones: the defaults that the options name."""

    serving: ServingArguments
    cluster: ClusterArguments
    form: str
    context: int | None = None
    kv_type: KvType = DEFAULT_KV_TYPE
    workers: LocalWorkers | None = None
    shape: str | None = None
    choose_backend: Callable[[Checkpoint, str], CpuBackendChoice] | None = None
    """What computes a model on CPUs whose owners left that open, see `ClusterOptions`."""
    parallel: Parallelism | None = None
    """How it is to be cut; None: as was asked for the last time."""
    adapters: AdapterArguments = field(default_factory=AdapterArguments)

    def cluster_options(self, settings: Settings) -> ClusterOptions:
        from shardcompute.control import PlacementPolicy
        from shardcompute.node.cluster import ClusterOptions
        from shardcompute.node.driver.draft_model import drafters_from
        from shardcompute.node.reach.cluster_relays import RelayOptions
        from shardcompute.trust.pools import PoolPolicy
        from shardcompute.wire.codecs.mode import EXACT, check_wire

        given, host, context = self.cluster, self.serving.host, _or(self.context, CONTEXT)
        hosts = reachable_hosts(host)
        return ClusterOptions(
            folder=cluster_folder(settings, given.data_dir),
            name=given.name or "home",
            host=host,
            port=_or(given.cluster_port, CLUSTER_PORT),
            join_port=_or(given.join_port, JOIN_PORT),
            relays=RelayOptions(
                relay_port(given), tuple(tuple(each.split(",")) for each in given.relay or ())
            ),
            advertise=given.advertise or hosts[0],
            also_at=() if given.advertise else hosts[1:],
            kv_tokens=_or(given.kv_tokens, KV_TOKENS),
            kv_type=self.kv_type,
            choose_backend=self.choose_backend,
            draft_heads=draft_heads_folder(settings),
            speculation=Speculation(given.speculate.value),
            open_drafters=drafters_from(given.draft_model, settings, context),
            context_length=context,
            placing=PlacementPolicy(
                latency_weight=LATENCY_WEIGHTS[given.prefer or Preference.BALANCED],
                drivers=(given.driver_placement or DriverPlacementOption.AUTO).value,
                moves_kv=not given.replay_moves,
                price_per_kwh=given.price_kwh,
                most_chains=given.most_chains or 0,
            ),
            wire=check_wire(EXACT if given.wire is None else given.wire),
            transports=open_transports(self.shape),
            audit_rate=given.audited_share,
            pool=PoolPolicy() if given.open else None,
            has_receipts=given.receipts or given.audited_share > 0.0,
            canaries_every_s=given.canaries or 0.0,
            attestation=attestation_policy(given.require_attested, has_own_workers=self.workers is not None),
            recovers_journal=given.recover_journal,
        )


def relay_port(given: ClusterArguments) -> int | None:
    """Of the relay beside the coordinator; None: there is none. Whoever moves the cluster's port moves this one."""
    if given.no_relay:
        return None
    if given.relay_port is not None:
        return given.relay_port
    if given.cluster_port is None:
        return RELAY_PORT
    return given.cluster_port and min(given.cluster_port + 2, 65535)


def run_cluster(plan: ClusterPlan, screen: Screen, settings: Settings) -> None:
    """Until a signal asks to stop."""
    from shardcompute.node.process.launch import check_cluster_name_of
    from shardcompute.node.process.log_files import logging_to_file
    from shardcompute.node.process.pidfile import CLUSTER_FILE, claim

    serving, name = plan.serving, plan.cluster.name
    folder = cluster_folder(settings, plan.cluster.data_dir)
    keys = server_keys(serving.api_key_file, settings)
    # A wrong name, origin or certificate is said before anything is started.
    serving.cors_origins(settings)
    https = serving.https_choice
    parse_reference(serving.model)
    if name is not None:
        check_cluster_name_of(folder, name)
    with terminating_as_interrupt(), claim(folder / CLUSTER_FILE, name or "") as held:
        options = plan.cluster_options(settings)
        ports = (serving.port, options.port, options.join_port, options.relays.port or 0)
        check_ports((serving.host, port) for port in ports)
        tls = https.open(folder, _names(plan, settings))
        if serving.port:
            options = replace(options, api_url=_api_url(plan, tls, serving.host, serving.port))
        with logging_to_file(folder, "coordinator"):
            log_phases()
            start = _Start(plan, options, keys, tls, held, screen, settings)
            if plan.cluster.store is not None:
                _run_candidate(start, plan.cluster.store)
            else:
                start = replace(start, options=_with_a_journal(options, screen))
                _run_leader(start, start.open())
    screen.say("stopped")


def _with_a_journal(options: ClusterOptions, screen: Screen) -> ClusterOptions:
    """A journal that is lost is said before anything is started; whoever sits there decides whether to go on."""
    from shardcompute.node.cluster import check_journal

    try:
        check_journal(options)
    except JournalError as error:
        if not has_terminal_input(standard_input()):
            raise
        show_error(screen, error)
        if not screen.confirm("go on with what is left of it?"):
            raise
        return replace(options, recovers_journal=True)
    return options


def _open(plan: ClusterPlan, screen: Screen, settings: Settings) -> Checkpoint:
    from shardcompute.runtime.fallback import fallback_remark
    from shardcompute.weights.checkpoint import adapted, open_checkpoint
    from shardcompute.weights.sources.resolve import resolve

    reference = parse_reference(plan.serving.model)
    merged = plan.adapters.merge_adapter
    # What is merged here cannot be read at the source.
    fetch: Fetch = "full" if plan.cluster.via_coordinator or merged is not None else "lazy"
    with phase("opening the checkpoint"), waiting(screen, f"opening {reference}") as progress:
        checkpoint = open_checkpoint(resolve(reference, settings, progress, fetch=fetch))
        checkpoint = adapted(checkpoint, plan.adapters.folders, merged)
    if checkpoint.files.listing is not None:
        screen.say(f"{reference} stays at its source: each worker reads its own part from there")
    if remark := fallback_remark(checkpoint.spec):
        screen.say(remark)
    return checkpoint


@dataclass(frozen=True, slots=True)
class _Start:
    """A cluster that is about to be started by somebody."""

    plan: ClusterPlan
    options: ClusterOptions
    keys: list[str]
    tls: ServerTls | None
    held: PidLock
    screen: Screen
    settings: Settings

    def open(self) -> Checkpoint:
        """What it is to serve."""
        return _open(self.plan, self.screen, self.settings)

    def served(self, checkpoint: Checkpoint) -> Served:
        from shardcompute.node.process.launch import Served

        return Served(checkpoint, self.plan.form, self.plan.cluster.chains or 1, self.plan.parallel)


def _run_candidate(start: _Start, store_url: str) -> None:
    from shardcompute.cli.serve.standby.candidate import run_candidate
    from shardcompute.cli.serve.standby.server import StandbyAddress

    if start.plan.workers is not None:
        raise UsageError(
            "a coordinator among several computes nothing itself: workers stay when it gives way",
            hint="start it with `shardcompute coordinator`, and let workers of this machine join with a token",
        )
    # Whoever takes over has no time for that.
    with phase("imports of the server"):
        for name in _SERVER:
            import_module(f"shardcompute.{name}")
    serving, plan, tls, held = start.plan.serving, start.plan, start.tls, start.held

    def listening(host: str, port: int) -> None:
        if tls is not None:
            held.update(api_certificate=tls.shown.own_pem)
        held.update(api_url=f"{_scheme(tls)}://{near_host(host)}:{port}")

    standby = StandbyAddress(
        serving.host,
        serving.port,
        _hosts(plan, start.settings),
        tls,
        listening,
        lambda certificate: held.update(api_certificate=certificate.own_pem),
    )
    lead = partial(_run_leader, start)
    run_candidate(start.options, store_url, plan.form, start.open, lead, standby, start.screen)


def _run_leader(
    start: _Start,
    checkpoint: Checkpoint,
    leadership: Leadership | None = None,
    prepared: PreparedModel | None = None,
) -> None:
    """Until a signal asks to stop or, where there are several coordinators, another leads."""
    with phase("imports of the server"):
        from shardcompute.api import create_app
        from shardcompute.api.access.sign_in import PageSessions
        from shardcompute.node.admin.admin import HISTORY_FILE, ClusterAdmin
        from shardcompute.node.cluster import Cluster
        from shardcompute.node.process import launch
        from shardcompute.node.telemetry.audit import AuditLog
        from shardcompute.node.telemetry.traces import tracing
        from shardcompute.security.api_keys import key_id_of
        from shardcompute.security.local_secret import local_secret
        from shardcompute.security.tokens import parse_token
        from shardcompute.web import page_routes

    plan, options, keys, tls = start.plan, start.options, start.keys, start.tls
    held, screen, settings = start.held, start.screen, start.settings
    served = replace(start.served(checkpoint), prepared=prepared)
    with contextlib.ExitStack() as stack:
        with phase("opening the cluster"):
            cluster = stack.enter_context(Cluster(options, leadership))
        if is_announced(plan.cluster.announce, plan.serving.host):
            stack.enter_context(_announced(plan, cluster, screen))
        if settings.dht:
            stack.enter_context(_published(plan, cluster, settings))
        stack.enter_context(tracing(settings, cluster.pool.requests))
        audit = AuditLog(options.folder)
        admin = stack.enter_context(
            ClusterAdmin(cluster, settings, history=options.folder / HISTORY_FILE, audit=audit)
        )
        audit.append("local", "cluster.start", cluster.name, detail=_settings_told(plan, options, tls))
        stack.callback(audit.append, "local", "cluster.stop", cluster.name)
        for name in launch.prepare(cluster, served):
            screen.say(f"{name} is not served any more")
        admin.restore(without=checkpoint.name)
        invited = cluster.access.create_token(
            life_s=launch.INVITATION_LIFE_S, max_uses=launch.INVITED_MACHINES
        )
        token = parse_token(invited)
        needs_key = bool(keys) or plan.serving.require_key or not is_loopback(plan.serving.host)
        audit.append("local", "token.create", token.token_id, detail={"max_uses": launch.INVITED_MACHINES})
        new_key = launch.first_key(cluster) if needs_key and not keys else None
        if new_key is not None:
            audit.append("local", "key.create", key_id_of(new_key), detail={"label": "made by up"})
        secret = stack.enter_context(local_secret(options.folder))
        sessions = PageSessions()
        held.update(
            name=token.cluster,
            cluster_port=launch.cluster_port(cluster),
            join_port=launch.join_port(token),
        )
        if plan.workers is not None:
            screen.say(f"starting {count_of(plan.workers.count, 'worker')} on this machine")
            with phase("starting workers"):
                stack.enter_context(launch.running_workers(cluster, plan.workers, screen.say))
            stack.callback(cluster.coordinator.stand_down)
        launch.serve_from_workers(cluster, served, plan.workers.count if plan.workers else 0)
        app = create_app(
            cluster.pool,
            api_keys=keys or None,
            verify_key=admin.find_key,
            needs_key=needs_key,
            local_secret=secret,
            sessions=sessions,
            hosts=_hosts(plan, settings),
            admin=admin,
            cors_origins=plan.serving.cors_origins(settings),
            image_urls=plan.serving.image_urls.value,
            page=page_routes(),
            receipts=cluster.pool.receipts,
            gives_receipts=options.has_receipts,
        )
        examples = plan.serving.https_choice.examples(tls, options.folder)
        welcome = _Welcome(invited, sessions, needs_key, new_key, examples)
        asyncio.run(_Foreground(plan, cluster, admin, app, tls, welcome, held, screen).serve())
        screen.say("stopping")


def is_announced(given: bool | None, host: str) -> bool:
    """As asked for; else where anybody could come who hears of it."""
    return not is_loopback(host) if given is None else given


@contextlib.contextmanager
def _published(plan: ClusterPlan, cluster: Cluster, settings: Settings) -> Iterator[None]:
    """Say in the hash table where this cluster is, for members that lost it, and keep what others say there."""
    from shardcompute.node.discovery.dht.publishing import Publisher
    from shardcompute.node.discovery.dht.records import Whereabout
    from shardcompute.node.discovery.dht.udp import DhtSocket

    def whereabout() -> Whereabout:
        nodes = cluster.coordinator.state.nodes.values()
        holders = sorted(node.address for node in nodes if node.is_live and (node.cached or node.shards))
        return Whereabout(cluster.urls, cluster.relay_urls(), tuple(holders))

    with (
        DhtSocket(plan.serving.host, settings.dht_port) as table,
        Publisher(table, cluster.sign_whereabout, whereabout, settings.dht),
    ):
        yield


@contextlib.contextmanager
def _announced(plan: ClusterPlan, cluster: Cluster, screen: Screen) -> Iterator[None]:
    """Where nobody asked for it, a network in which it cannot be done is no reason not to serve."""
    from shardcompute.node.discovery.nearby import NearbyCluster, announced, own_addresses
    from shardcompute.node.process.launch import cluster_port

    host = plan.serving.host
    hosts = (host,) if is_address(host) and not is_any_address(host) else own_addresses()
    shown = NearbyCluster(cluster.name, cluster.fingerprint, hosts, cluster.join_port, cluster_port(cluster))
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(announced(shown))
        except ShardComputeError as error:
            if plan.cluster.announce:
                raise
            screen.say(f"this cluster is not announced in its network: {error.message}", "dim")
        else:
            screen.say(
                "announced in this network: `shardcompute join` finds it, and `shardcompute pair` shows a code"
            )
        yield


def _settings_told(plan: ClusterPlan, options: ClusterOptions, tls: ServerTls | None) -> dict[str, object]:
    """What the audit log says of a start: how the cluster may be reached, and by whom."""
    serving = plan.serving
    return {
        "version": VERSION,
        "host": serving.host,
        "port": serving.port,
        "https": "off" if tls is None else tls.shown.pin,
        "require_key": serving.require_key,
        "allowed_hosts": ", ".join(serving.allowed_host or ()),
        "cors_origins": ", ".join(serving.cors_origin or ()),
        "image_urls": serving.image_urls.value,
        "model": serving.model,
        "cluster_port": options.port,
        "join_port": options.join_port,
        "recovers_journal": options.recovers_journal,
        "open": options.pool is not None,
    }


def _hosts(plan: ClusterPlan, settings: Settings) -> AllowedHosts:
    from shardcompute.api.access.hosts import hosts_of

    given = [*(plan.serving.allowed_host or ()), *settings.allowed_hosts]
    return hosts_of(plan.serving.host, [*given, plan.cluster.advertise or ""])


def _names(plan: ClusterPlan, settings: Settings) -> list[str]:
    """By which clients may call the API, for its certificate."""
    host = plan.serving.host
    given = [*(plan.serving.allowed_host or ()), *settings.allowed_hosts]
    return [host, reachable_host(host), *given, plan.cluster.advertise or ""]


@dataclass(frozen=True, slots=True)
class _Welcome:
    """What is said to whoever started the cluster: how to let others in."""

    invited: str
    sessions: PageSessions
    needs_key: bool
    new_key: str | None
    tls: TlsExamples | None = None

    def dashboard(self, url: str) -> list[str]:
        made = self.sessions.create_code()
        return dashboard(url, made.code, made.life_s)


class _Foreground:
    """Serves the API and says what happens meanwhile."""

    def __init__(
        self,
        plan: ClusterPlan,
        cluster: Cluster,
        admin: ClusterAdmin,
        app: Starlette,
        tls: ServerTls | None,
        welcome: _Welcome,
        held: PidLock,
        screen: Screen,
    ) -> None:
        self._plan = plan
        self._cluster = cluster
        self._app = app
        self._tls = tls
        self._welcome = welcome
        self._held = held
        self._screen = screen
        self._url = ""
        self._stop = asyncio.Event()
        self._has_greeted = False
        self._complaint: tuple[str, ...] = ()
        self._events: queue.SimpleQueue[EventView] = queue.SimpleQueue()
        admin.history.listen(self._events.put)

    async def serve(self) -> None:
        from shardcompute.api import serve

        async with asyncio.TaskGroup() as group:
            watcher = group.create_task(self._watch())
            try:
                await serve(
                    self._app,
                    self._plan.serving.host,
                    self._plan.serving.port,
                    on_listening=self._listening,
                    stop=self._stop,
                    tls=self._tls,
                    on_certificate=self._certified,
                )
            finally:
                watcher.cancel()

    def _listening(self, host: str, port: int) -> None:
        self._url = _api_url(self._plan, self._tls, host, port)
        if self._tls is not None:
            self._certified(self._tls.shown)
        self._held.update(api_url=f"{_scheme(self._tls)}://{near_host(host)}:{port}")
        if self._welcome.new_key is not None:
            self._say_all(new_key(self._welcome.new_key))
        if self._plan.workers is None:
            self._say_all([f"the API listens at {self._url}", *self._invitation()])

    def _certified(self, certificate: KeyedCertificate) -> None:
        """Commands on this machine trust what the API shows."""
        self._held.update(api_certificate=certificate.own_pem)

    async def _watch(self) -> None:
        from shardcompute.cli.serve.story import activity, progress_lines

        seen, warned = self._cluster.coordinator.state, False
        with status_line(self._screen) as show:
            while True:
                state = self._cluster.coordinator.state
                if self._cluster.is_deposed:
                    self._stop.set()
                self._say_all([*self._news(), *progress_lines(seen, state)])
                warned = self._say_warnings(warned)
                show(activity(state))
                if not self._has_greeted:
                    self._greet_or_complain(state)
                seen = state
                await asyncio.sleep(_LOOK_S)

    def _news(self) -> list[str]:
        """What happened since the last look, but for our own coming and going."""
        events = [self._events.get() for _ in range(self._events.qsize())]
        return [event.text for event in events if event.kind != "cluster"]

    def _say_warnings(self, was_warned: bool) -> bool:
        """Once when there is something to see to, and once when that is over."""
        warnings = self._cluster.record_status.warnings
        if warnings and not was_warned:
            self._say_all([f"warning: {each}" for each in warnings])
        elif was_warned and not warnings:
            self._screen.say("all that has happened is on record again")
        return bool(warnings)

    def _greet_or_complain(self, state: ClusterState) -> None:
        if self._cluster.pool.is_ready():
            self._has_greeted = True
            name = self._cluster.pool.models()[0].name
            welcome = self._welcome
            self._say_all(greeting(name, self._url, needs_key=welcome.needs_key, tls=welcome.tls))
            if any(getattr(route, "path", None) == "/" for route in self._app.routes):
                self._say_all(self._welcome.dashboard(self._url))
            self._say_all([*self._invitation(), "Ctrl-C stops it."])
            return
        self._complain(state)

    def _complain(self, state: ClusterState) -> None:
        """Say what is missing, once everybody who was started is there."""
        from shardcompute.control.explain import report_models

        expected = self._plan.workers.count if self._plan.workers is not None else 1
        if sum(node.is_live and node.can_work for node in state.nodes.values()) < expected:
            return
        for report in report_models(state, time.monotonic()):
            if report.status == "unservable" and report.reasons != self._complaint:
                self._complaint = report.reasons
                self._say_all([f"{report.model} does not fit yet:", *(f"  {r}" for r in report.reasons)])
                self._say_all(self._invitation())

    def _invitation(self) -> list[str]:
        from shardcompute.node.process.launch import INVITATION_LIFE_S, INVITED_MACHINES

        lines = invitation(
            self._welcome.invited,
            self._plan.serving.host,
            machines=INVITED_MACHINES,
            life_s=INVITATION_LIFE_S,
        )
        if not self._plan.cluster.open:
            return lines
        public = self._cluster.access.public_token()
        return [*lines, "open: anybody may join on probation with", f"  shardcompute join {public}"]

    def _say_all(self, lines: list[str]) -> None:
        for line in lines:
            self._screen.say(line)


def _scheme(tls: ServerTls | None) -> str:
    return "http" if tls is None else "https"


def _api_url(plan: ClusterPlan, tls: ServerTls | None, host: str, port: int) -> str:
    """Where clients on other machines find the API."""
    named = plan.cluster.advertise
    return f"{_scheme(tls)}://{bracketed(named) if named else reachable_host(host)}:{port}"


def _or(given: int | None, default: int) -> int:
    return default if given is None else given
