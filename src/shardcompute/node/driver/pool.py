"""Driver pool: models served by chains, as the API sees them (`node.service.Service`) and as the coordinator does.

Each chain has a driver of its own; a request goes where its beginning was kept and there is little to do. A chain that
is being repaired keeps its sessions: they go on when it is back. A model that nobody can serve any more fails its
requests at once, with what is missing.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from shardcompute.core.errors import CapacityError, LinkError, UnknownModelError
from shardcompute.core.generation import Delta, GenerationRequest, Speculation
from shardcompute.core.units import format_bytes
from shardcompute.decoding.drafting import Drafter
from shardcompute.node.driver.chain_links import ChainAddress, DriverLinks, OnOverdue, OnRing, OnTimings
from shardcompute.node.driver.driver import Driver
from shardcompute.node.driver.generation import DeltaStream
from shardcompute.node.driver.hosted_client import HostedDriverClient, HostedDrivers, ResumableGeneration
from shardcompute.node.driver.limits import DriverLimits
from shardcompute.node.driver.receipts.collector import ReceiptCollector, check_receipt
from shardcompute.node.driver.receipts.store import ReceiptStore
from shardcompute.node.driver.repair_wait import QUIET_S
from shardcompute.node.driver.sessions.prefix_routing import ChainOffer, SentPrompts, choose_chain
from shardcompute.node.rpc.commands import Attach, Peer, Unservable
from shardcompute.node.rpc.frames import timings_of
from shardcompute.node.rpc.session_ids import choose_namespace, first_session
from shardcompute.node.service import KvUse, ServedModel, ServiceLoad, with_adapters
from shardcompute.node.telemetry.request_log import RequestLog
from shardcompute.node.telemetry.traffic import WireTraffic
from shardcompute.security.credentials import Credentials
from shardcompute.wire import Link, Message, StageTiming

if TYPE_CHECKING:
    from shardcompute.models.spec import VisionSpec
    from shardcompute.models.tokenizer import Tokenizer

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PoolModel:
    """A model that this pool was asked to serve."""

    name: str
    tokenizer: Tokenizer
    vocab_size: int
    context_length: int
    created_s: int
    digest: str
    size_bytes: int
    speculation: Speculation = field(default_factory=Speculation)
    """For requests that do not say."""
    drafters: Sequence[Drafter] = ()
    """Beside the one that every driver has."""
    has_draft_head: bool = False
    """Whether last stages draft."""
    draft_head_problem: str = ""
    """Why they do not although somebody made a draft head."""
    adapters: tuple[str, ...] = ()
    """Those that every stage has beside its weights."""
    vision: VisionSpec | None = None
    """How it sees; None: it takes text alone."""


@dataclass(slots=True)
class _PoolChain:
    """A chain that is driven here."""

    model: str
    driver: Driver
    is_connected: bool = False
    """Not while it is being repaired."""
    timings: Sequence[StageTiming] = ()
    """Of its newest step, stage by stage."""


PATIENCE_S = 10.0
"""So long streams wait for a model that nobody can serve any more; new requests are refused at once."""


class DriverPool:
    """Drivers of all chains. Methods may be called from any thread, `generate` from an event loop."""

    def __init__(
        self,
        dial: Callable[[Peer], Link],
        url: str,
        on_link_broken: Callable[[str], None],
        *,
        max_sessions: int = 64,
        max_waiting: int = 256,
        patience_s: float = PATIENCE_S,
        quiet_s: float = QUIET_S,
        hosted: HostedDrivers | None = None,
        on_step: OnTimings | None = None,
        on_overdue: OnOverdue = lambda overdue: None,
        on_ring: OnRing = lambda chain, epoch, step_s, wire_s: None,
        credentials: Callable[[], Credentials] | None = None,
        on_receipt: Callable[[str, bytes], None] = lambda receipt, packed: None,
        on_asked: Callable[[GenerationRequest], None] = lambda request: None,
        prepare: Callable[[str, GenerationRequest], GenerationRequest] = lambda chain, request: request,
    ) -> None:
        """`hosted` knows the chains that workers drive; without it all of them are driven here. `on_step`
        hears how stages spent their time on each step, `on_ring` what many of them took, `on_overdue` of steps whose
        results are missed. Streams
        wait `patience_s` for a model that nobody can serve any more, and `quiet_s` for one whose loading comes no
        further. With `credentials` answers can have receipts, of which `on_receipt` hears, also of those that were made
        on other machines, and `on_asked` of the requests that are to have one. `prepare` may change
        a request for the chain that it goes to."""
        self._prepare = prepare
        self._on_asked = on_asked
        self._on_receipt = on_receipt
        self.url = url
        self._hosted = hosted
        self._on_step = on_step
        if hosted is not None:
            hosted.on_step = self._keep_hosted_timings
            hosted.on_receipt = self._keep_hosted_receipt
        self.receipts = ReceiptStore()
        self._collector = (
            None if credentials is None else ReceiptCollector(credentials, self.receipts, on_made=on_receipt)
        )
        self.session_namespace = choose_namespace()
        self.requests = RequestLog(stage_times=self._stage_times)
        self._links = DriverLinks(
            dial, on_link_broken, self._keep_timings, on_overdue, self._collector, on_ring
        )
        self._lock = threading.Lock()
        self._models: dict[str, PoolModel] = {}
        self._chains: dict[str, _PoolChain] = {}
        self._unservable: dict[str, tuple[str, str]] = {}
        """What is missing, and what to do about it."""
        self._sent_prompts: dict[str, SentPrompts] = {}
        """By chain, of those that workers drive."""
        self._successors: dict[str, str] = {}
        """Of models that take no new requests: what is about to be served instead."""
        self._patience_s = patience_s
        self._quiet_s = quiet_s
        self._traffic = WireTraffic()
        self._max_sessions = max_sessions
        self._max_waiting = max_waiting
        self._spared: frozenset[str] = frozenset()
        """Chains that are to be dropped once they have nobody left."""

    def add_model(self, model: PoolModel) -> None:
        with self._lock:
            self._models[model.name] = model
            drivers = [chain.driver for chain in self._chains.values() if chain.model == model.name]
        for driver in drivers:
            driver.expect_head_drafts(model.has_draft_head)

    def all_models(self) -> list[PoolModel]:
        with self._lock:
            return list(self._models.values())

    def find_driver(self, chain: str) -> Driver | None:
        with self._lock:
            known = self._chains.get(chain)
        return None if known is None else known.driver

    def host_of(self, chain: str) -> str | None:
        """The worker that drives a chain in this process' place; None: it is driven here."""
        host = self._host(chain)
        return None if host is None else host.node

    def chains(self) -> set[str]:
        """The chains that have a driver here."""
        with self._lock:
            return set(self._chains)

    def remove_model(self, name: str) -> None:
        with self._lock:
            self._models.pop(name, None)
            self._unservable.pop(name, None)
            # The chains stay until they are retired: somebody may want the model again before that.
            drivers = [chain.driver for chain in self._chains.values() if chain.model == name]
        for driver in drivers:
            driver.fail_all(CapacityError(f"{name} is no longer served here", hint="load it again"))

    def take(self, message: Message, body: memoryview, sender: str) -> None:
        """What stages send."""
        self._links.take(message, body, sender)

    def timings(self) -> dict[str, Sequence[StageTiming]]:
        """Of each chain's newest step, stage by stage."""
        with self._lock:
            return {name: chain.timings for name, chain in self._chains.items() if chain.timings}

    def close(self) -> None:
        with self._lock:
            chains, self._chains = list(self._chains.values()), {}
        for chain in chains:
            chain.driver.close()
        if self._hosted is not None:
            self._hosted.close()
        self._links.close()

    def drop_prefixes(self) -> None:
        """Give up what is kept of ended sessions."""
        with self._lock:
            chains = list(self._chains.values())
        for chain in chains:
            chain.driver.drop_prefixes()

    # For the coordinator (see `command_executor`)

    def serves(self, model: str) -> bool:
        with self._lock:
            return model in self._models

    def open_chain(self, command: Attach) -> None:
        """Dial the first stage of a new epoch. Raises LinkError."""
        address = ChainAddress(command.chain, command.epoch, command.first, tuple(command.nodes))
        self._links.open(address)

    def running_sessions(self, chain: str) -> list[int]:
        driver = self.find_driver(chain)
        return [] if driver is None else driver.running_sessions()

    def activate_chain(self, command: Attach) -> None:
        """Use an epoch that was opened. Raises LinkError when it is lost already."""
        with self._lock:
            model = self._models.get(command.model)
            if model is None:
                raise CapacityError(f"{command.model} is not served here any more")
            chain = self._chains.get(command.chain)
            if chain is None:
                limits = DriverLimits(
                    model.vocab_size,
                    model.context_length,
                    self._max_sessions,
                    self._max_waiting,
                    model.speculation,
                    model.has_draft_head,
                    model.vision,
                )
                first = first_session(self.session_namespace)
                driver = Driver(
                    model.tokenizer,
                    limits,
                    first_session=first,
                    drafters=model.drafters,
                    receipts=self._collector,
                    quiet_s=self._quiet_s,
                )
                chain = self._chains[command.chain] = _PoolChain(command.model, driver)
            self._unservable.pop(command.model, None)
            # What the stages of another shape took says nothing about these.
            chain.timings = ()
        self._links.activate(command, chain.driver)
        chain.is_connected = True

    def share_chain(self, chain: str, epoch: int, kv_tokens: int) -> None:
        self._links.share(chain, epoch, kv_tokens)

    def unreachable(self) -> set[str]:
        """The first stages of chains in use to which the link is lost."""
        return self._links.unreachable()

    def misses(self, chain: str, epoch: int, sequence: int) -> bool:
        """Whether a step of this epoch is under way still."""
        return self._links.misses(chain, epoch, sequence)

    def redial_chain(self, chain: str, node: str) -> bool:
        """End the link to a chain's first stage, as if it had broken; False where it does not lead to this node."""
        return self._links.redial(chain, node)

    def fence_chain(self, chain: str, epoch: int) -> None:
        with self._lock:
            if (known := self._chains.get(chain)) is not None:
                known.is_connected = False
        self._links.fence(chain, epoch)

    def retire_chain(self, chain: str) -> None:
        with self._lock:
            known = self._chains.pop(chain, None)
            self._sent_prompts.pop(chain, None)
        self._links.forget(chain)
        if known is not None:
            known.driver.close()
        if self._hosted is not None:
            self._hosted.unhost(chain)

    def host_chain(self, chain: str, node: str, url: str, name: str = "") -> None:
        if self._hosted is None:
            raise LinkError("this node hands no generations over")
        self._hosted.host(chain, node, url, name)

    def unhost_chain(self, chain: str, node: str) -> None:
        if self._hosted is not None:
            self._hosted.unhost(chain, node)

    def progressed(self, chain: str, progress: tuple[int, float], waits_for: str) -> None:
        """A chain is being loaded, so far: those who wait for it may go on waiting."""
        driver = self.find_driver(chain)
        if driver is not None:
            driver.progressed(progress, waits_for)

    def report_unservable(self, command: Unservable) -> None:
        """A model cannot be served: what waits for it fails after a while, and new requests at once."""
        why, broken = "; ".join(command.reasons), set(command.broken)
        missing = format_bytes(command.missing_bytes)
        message = f"{command.model} does not fit the machines there are: {missing} are missing ({why})"
        hint = (
            f"join a machine that offers {missing}, give the workers more with --max-memory, "
            "or serve it with smaller --weights"
        )
        error = CapacityError(message, hint=hint)
        log.warning("%s", error)
        with self._lock:
            of_model = {name: chain for name, chain in self._chains.items() if chain.model == command.model}
            if not any(chain.is_connected for chain in of_model.values()):
                self._unservable[command.model] = message, hint
                broken = set(of_model)
            drivers = [self._chains[name].driver for name in broken if name in self._chains]
        for driver in drivers:
            # Machines that are out of reach for a moment come back; those who wait for them may stall that long.
            driver.fail_later(error, self._patience_s)

    # For the API (see `service.Service`)

    def models(self) -> Sequence[ServedModel]:
        with self._lock:
            models = list(self._models.values())
        return with_adapters(
            (
                ServedModel(
                    each.name,
                    each.context_length,
                    each.created_s,
                    each.digest,
                    each.size_bytes,
                    vision=each.vision,
                ),
                each.adapters,
            )
            for each in models
        )

    def draft_heads(self) -> dict[str, str]:
        """The models whose last stages are to draft, each with why they cannot ("": they can)."""
        with self._lock:
            models = list(self._models.values())
        return {m.name: m.draft_head_problem for m in models if m.has_draft_head or m.draft_head_problem}

    def codec(self, model: str) -> Tokenizer:
        return self._find(model)[0].tokenizer

    def is_ready(self) -> bool:
        """Whether requests are taken: also while a chain is being repaired, when they wait for it."""
        with self._lock:
            return any(
                chain.is_connected or chain.model not in self._unservable for chain in self._chains.values()
            )

    def obstacle(self) -> CapacityError | None:
        if self.is_ready():
            return None
        with self._lock:
            missing = next(iter(self._unservable.values()), None)
            names = " and ".join(self._models)
        if missing is not None:
            return CapacityError(missing[0], hint=missing[1])
        if not names:
            return CapacityError("no model is served here yet", hint="load one: shardcompute load MODEL")
        return _loading(names)

    def pause(self, model: str, successor: str) -> None:
        """Take no new requests for a model, which is about to give way to another; those that run go on."""
        with self._lock:
            self._successors[model] = successor

    def resume(self, model: str) -> None:
        with self._lock:
            self._successors.pop(model, None)

    def chains_of(self, model: str) -> set[str]:
        """The chains of a model that have a driver here."""
        with self._lock:
            return {name for name, chain in self._chains.items() if chain.model == model}

    def answering(self, model: str) -> int:
        """How many requests for a model run or wait here."""
        return sum(self.sessions_of(model).values())

    def sessions_of(self, model: str) -> dict[str, int]:
        """How many requests run or wait on each of a model's chains."""
        with self._lock:
            drivers = [(name, chain.driver) for name, chain in self._chains.items() if chain.model == model]
        return {name: self._busyness(name, driver) for name, driver in drivers}

    def spare(self, chains: Collection[str]) -> None:
        """Send these nobody new, as long as there are others."""
        with self._lock:
            self._spared = frozenset(chains)

    def load(self) -> ServiceLoad:
        with self._lock:
            drivers = {name: chain.driver for name, chain in self._chains.items()}
        loads = {chain: driver.load() for chain, driver in drivers.items()}
        routers = {chain: driver.speculation() for chain, driver in drivers.items()}
        if self._hosted is not None:
            for chain in loads:
                loads[chain], routers[chain] = self._hosted.load(chain, loads[chain], routers[chain])
        used = sum(load.used_tokens for load in loads.values())
        capacity = sum(load.capacity_tokens for load in loads.values())
        fraction = min(1.0, used / capacity) if capacity else 0.0
        return ServiceLoad(
            running=sum(load.running for load in loads.values()),
            waiting=sum(load.waiting for load in loads.values()),
            kv_used_fraction=fraction,
            traffic=self._traffic.hops(),
            routers=routers,
            stages=self._traffic.stages(),
            kv=[KvUse(chain, load.used_tokens, load.capacity_tokens) for chain, load in loads.items()],
        )

    async def generate(self, model: str, request: GenerationRequest) -> AsyncIterator[Delta]:
        found, adapter = self._find(model)
        name, request = found.name, replace(request, adapter=adapter)
        chain, driver = self._choose_driver(name, request)
        request = self._prepare(chain, request)
        deltas = DeltaStream()
        check_receipt(request, self._collector)
        if request.receipt:
            self.receipts.expect(request.receipt, request.caller)
            self._on_asked(request)
        with self.requests.open(name, chain, request) as entry:

            def begun(session: int) -> None:
                entry.session = session
                extra = {"request": entry.id, "session": session, "chain": chain}
                log.debug("request %s is session %d of chain %s", entry.id, session, chain, extra=extra)

            generation = ResumableGeneration(chain, request, driver, deltas.emit, begun)
            generation.start(self._host(chain))
            entry.has_started = generation.has_started
            try:
                async for delta in deltas:
                    entry.saw(delta)
                    yield delta
            finally:
                generation.cancel()

    def _find(self, name: str) -> tuple[PoolModel, str]:
        """The model that a name means, and the adapter of it, "" for none."""
        with self._lock:
            if name in self._models:
                return self._models[name], ""
            if name == "default" and self._models:
                return next(iter(self._models.values())), ""
            base, _, adapter = name.rpartition(":")
            if base in self._models and adapter in self._models[base].adapters:
                return self._models[base], adapter
        known = ", ".join(model.name for model in self.models())
        raise UnknownModelError(
            f"the model {name!r} is not served here", hint=f"use one of: {known or 'none yet'}"
        )

    def _choose_driver(self, model: str, request: GenerationRequest) -> tuple[str, Driver]:
        """The chain of the model that has the least to do for this request and others (see `prefix_routing`), and its
        driver; one being repaired only where there is no other."""
        with self._lock:
            if model in self._successors:
                raise _giving_way(model, self._successors[model])
            if model in self._unservable:
                message, hint = self._unservable[model]
                raise CapacityError(message, hint=hint)
            chains = {name: chain for name, chain in self._chains.items() if chain.model == model}
            connected = {name: chain for name, chain in chains.items() if chain.is_connected}
            usable = connected or chains
            taking = {name: chain for name, chain in usable.items() if name not in self._spared}
            drivers = {name: chain.driver for name, chain in (taking or usable).items()}
        if not drivers:
            raise _loading(model)
        if len(drivers) == 1:
            return next(iter(drivers.items()))
        offers = {
            name: ChainOffer(self._kept_tokens(name, driver, request), self._busyness(name, driver))
            for name, driver in drivers.items()
        }
        chosen = choose_chain(offers, len(request.prompt))
        if self._host(chosen) is not None:
            with self._lock:
                self._sent_prompts.setdefault(chosen, SentPrompts()).add(request)
        return chosen, drivers[chosen]

    def _kept_tokens(self, chain: str, driver: Driver, request: GenerationRequest) -> int:
        if self._host(chain) is None:
            return driver.kept_tokens(request)
        with self._lock:
            sent = self._sent_prompts.get(chain)
            return 0 if sent is None else sent.kept_tokens(request)

    def _stage_times(self, chain: str) -> Sequence[StageTiming]:
        with self._lock:
            known = self._chains.get(chain)
        return () if known is None else known.timings

    def _host(self, chain: str) -> HostedDriverClient | None:
        return None if self._hosted is None else self._hosted.find(chain)

    def _busyness(self, chain: str, driver: Driver) -> int:
        load, host = driver.load(), self._host(chain)
        return load.running + load.waiting + (0 if host is None else host.count(chain))

    def _keep_hosted_timings(self, chain: str, timings: Sequence[StageTiming]) -> None:
        """A worker that drives a chain tells of its stages, and of nobody else."""
        self._keep_timings(chain, timings_of(timings, self._links.nodes_of(chain)))

    def _keep_hosted_receipt(self, receipt: str, packed: bytes) -> None:
        """A worker that drives a chain has made a receipt, which it signed."""
        self.receipts.put(receipt, packed)
        self._on_receipt(receipt, packed)

    def _keep_timings(self, chain: str, timings: Sequence[StageTiming]) -> None:
        self._traffic.count(timings, chain)
        with self._lock:
            if (known := self._chains.get(chain)) is not None:
                known.timings = timings
        if self._on_step is not None:
            self._on_step(chain, timings)


def _loading(model: str) -> CapacityError:
    return CapacityError(
        f"{model} is still being loaded",
        hint="try again in a few seconds; shardcompute status shows how far it is",
    )


def _giving_way(model: str, successor: str) -> CapacityError:
    what = "reloaded in another form" if model == successor else f"replaced by {successor}"
    return CapacityError(
        f"{model} is being {what} and takes no new requests", hint="try again in a few seconds"
    )


def now_s() -> int:
    return int(time.time())
