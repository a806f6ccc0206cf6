"""Shard loader of a worker: fetches layers, opens them within its memory, and frees them again.

Draft heads come after the layers that they belong to, and are given up first where others need the memory.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

from shardcompute.backends.device_memory import (
    device_memory_error,
    free_caches,
    is_out_of_memory,
    within_memory,
)
from shardcompute.backends.executor import ExecutorOptions, rows_of_step
from shardcompute.backends.footprint import holding_of
from shardcompute.control.sizes import StageBytes, describe_card, sums_of
from shardcompute.control.state import LayerShape, Shard
from shardcompute.core.errors import (
    BackendError,
    CapacityError,
    DeviceMemoryError,
    LinkError,
    ShardComputeError,
    SourceError,
)
from shardcompute.core.fields import shorten
from shardcompute.core.phases import phase
from shardcompute.core.process_memory import release_code, return_freed_memory
from shardcompute.core.settings import Settings
from shardcompute.core.units import format_bytes
from shardcompute.models.spec import Stage
from shardcompute.node.rpc.commands import HoldLayers, LoadLayers, Peer, TakeDraftHead
from shardcompute.node.weights.client import RemoteTensors, fetch_card, open_remote_shard
from shardcompute.node.weights.draft_heads import draft_head_bytes, open_head_drafter
from shardcompute.node.weights.originals import open_original
from shardcompute.node.weights.pieces import Supplier
from shardcompute.node.weights.seeding import fetch_layers
from shardcompute.node.worker.memory.offer import MemoryOffer, RecoveryPolicy
from shardcompute.node.worker.ranks.shares import ShareOpening, of_whole_layers
from shardcompute.node.worker.receipts.claims import ClaimStage
from shardcompute.node.worker.speed_probe import ShardSpeed, measure_shard, shape_of_card
from shardcompute.node.worker.stages.service_pace import ServicePace
from shardcompute.node.worker.stages.stage_server import StageServer
from shardcompute.node.worker.stages.stage_slots import ShardKey
from shardcompute.runtime.shard import can_draft
from shardcompute.runtime.stage import StageRuntime
from shardcompute.weights.adapter_pack import adapter_names
from shardcompute.weights.card import Card
from shardcompute.weights.served import served_vocabulary
from shardcompute.weights.shard_cache import ShardCache
from shardcompute.weights.sources.rate import RateLimit
from shardcompute.wire import Link
from shardcompute.wire.control import MOST_DRAFT_HEADS, DraftHeadReport

if TYPE_CHECKING:
    from shardcompute.weights.sources.hub import Hub

log = logging.getLogger(__name__)
_RETRY_DELAYS_S = (0.5, 1.0, 2.0)
_NO_ROOM = "no memory is left for it"
_KEPT_AFTER_SHORTAGE = 0.85
"""So much of what memory ran out with is offered again: clearly less, so that other layers are planned here, and
less by more each time."""
OnProgress = Callable[[float], None]
"""Hears which fraction of a shard is there."""


@dataclass(frozen=True, slots=True)
class ShardOptions:
    """On what shards are computed, and how many bytes all that is held may take: the process itself, and held weights,
    scratch and KV of shards. What is left of that is for draft heads and activation logs."""

    memory_bytes: int
    threads: int
    backend: str
    device: str
    alternatives: tuple[str, ...] = ()
    """Other backends that compute a model which asks for one of them."""
    process_bytes: int = 0
    """Of these bytes, what the process takes before there is any shard."""
    overhead_s: float = 0.0
    """What a frame takes whatever is in it, as it was probed."""
    room_timeout_s: float = 10.0
    """So long a shard waits for what is no longer wanted to be unloaded."""
    reads_originals: bool = False
    """Whether models that are served from this machine are read from where they lie (`weights.originals`)."""
    sources: Settings | None = None
    """Which hub, mirrors and token weights are read with that lie there; None: all come from other nodes."""
    recovery: RecoveryPolicy = field(default_factory=RecoveryPolicy)
    """When memory that ran out is offered again."""
    find_holders: Callable[[], Sequence[str]] = lambda: ()
    """Where nodes are said to be that hold weights; asked when all who are known cannot give them."""
    claim: ClaimStage | None = None
    """What stages say in receipts that they are; None: they sign for nothing."""


@dataclass(frozen=True, slots=True)
class MeasuredShard:
    """How fast the layers are that were just loaded, and by which shape others know that."""

    shape: LayerShape
    speed: ShardSpeed


@dataclass(frozen=True, slots=True)
class _Drafting:
    """How a last stage is computed, and so what drafts for it; and how many tokens it remembers."""

    backend: str
    options: ExecutorOptions
    kv_tokens: int


@dataclass(frozen=True, slots=True)
class _Held:
    shard: Shard
    log_bytes: int
    """Of its size, what is kept for its activation log."""
    draft_head: DraftHeadReport | None = None
    """Of a model that has one, if this is its last stage."""
    drafting: _Drafting | None = None
    """If this is a last stage, and leads where there are ranks."""

    @property
    def draft_head_bytes(self) -> int:
        return 0 if self.draft_head is None else self.draft_head.size_bytes

    @property
    def size_bytes(self) -> int:
        return self.shard.size_bytes + self.draft_head_bytes


class ShardLoader:
    """Owns what of a worker's memory shards take; `stages` computes with them. Methods may be called from any thread.

    `dial` opens a link over which weights come.
    """

    def __init__(
        self,
        stages: StageServer,
        cache: ShardCache,
        dial: Callable[[Peer], Link],
        options: ShardOptions,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stages = stages
        self._cache = cache
        self._dial = dial
        self._options = options
        self._clock = clock
        self._offer = MemoryOffer(options.memory_bytes, options.recovery)
        rate = options.sources.download_rate if options.sources is not None else None
        self._rate = None if rate is None else RateLimit(rate)
        self._held: dict[ShardKey, _Held] = {}
        self._lock = threading.Lock()
        self._freed = threading.Condition(self._lock)
        self._loading = threading.Lock()
        """One at a time: two loads beside each other need the memory of both at their peak."""
        self._closing = threading.Event()
        self._reserved_bytes = 0

    @contextlib.contextmanager
    def reserved(self, size_bytes: int, what: str) -> Iterator[None]:
        """Memory for something besides layers, which layers do not get inside the block. CapacityError where what is
        offered does not suffice."""
        with self._lock:
            room_bytes = self._offer.size_bytes - self._used_bytes()
            if size_bytes > room_bytes:
                raise CapacityError(
                    f"{what} needs {format_bytes(size_bytes)}, and of this worker's memory "
                    f"{format_bytes(max(0, room_bytes))} are left",
                    hint="give this worker more with --max-memory, or spread the work over more of them",
                )
            self._reserved_bytes += size_bytes
        try:
            yield
        finally:
            with self._freed:
                self._reserved_bytes -= size_bytes
                self._freed.notify_all()

    @contextlib.contextmanager
    def tensors_of(self, origin: Peer, model: str) -> Iterator[tuple[Card, RemoteTensors]]:
        """A served model's tensors, to be read for something else than serving its layers."""
        card = self._fetch_card(origin, model)
        supplier = Supplier(origin.node, partial(self._dial, origin), is_origin=True)
        with self._tensors(card, [supplier]) as tensors:
            yield card, tensors

    def hold(self, command: HoldLayers) -> None:
        """Fetch layers to the disk alone, slowly, for others. What its disk has no room for raises SourceError."""
        *_, origin = command.sources
        card = self._fetch_card(origin, command.model)
        suppliers = [
            Supplier(each.node, partial(self._dial, each), each is origin) for each in command.sources
        ]
        fetch_layers(
            card,
            Stage(command.start, command.stop, card.spec.layer_count),
            suppliers,
            self._cache,
            hubs=self._open_hubs(card),
            bytes_per_s=command.bytes_per_s,
        )

    @contextlib.contextmanager
    def held(self) -> Iterator[tuple[Shard, ...]]:
        """What is in memory; nothing comes there or goes inside the block."""
        with self._lock:
            yield tuple(held.shard for held in self._held.values())

    def load(self, command: LoadLayers, on_progress: OnProgress) -> MeasuredShard | None:
        """Have these layers in memory. Returns how fast they are, None where they were there already.

        Raises CapacityError where they do not fit, LinkError or SourceError where they cannot be had. A
        DeviceMemoryError says that less fits than was thought: all of this load is freed, and `memory_bytes` is less
        until memory has been free for a while (`measured`).
        """
        key = command.place
        with self._loading:
            if key in self._held:
                return None
            try:
                with phase("loading layers"):
                    return self._load(command, key, on_progress)
            finally:
                with self._lock:
                    self._share_rest(self._offer.size_bytes)

    def kv_used_bytes(self) -> int:
        """What conversations fill of the KV memory of all shards."""
        return sum(each.used_bytes for each in self._stages.kv_usages())

    def draft_heads(self) -> tuple[DraftHeadReport, ...]:
        """How the last stages that are here stand with draft heads."""
        with self._lock:
            heads = [held.draft_head for held in self._held.values() if held.draft_head is not None]
        return tuple(heads[:MOST_DRAFT_HEADS])

    @property
    def memory_bytes(self) -> int:
        """What weights and KV of all shards may take."""
        with self._lock:
            return self._offer.size_bytes

    @property
    def is_offering_all(self) -> bool:
        """Whether that is what this worker was given."""
        with self._lock:
            return self._offer.is_full

    def measure_in_s(self) -> float | None:
        """How long until `measured` is to be told what is free; None while all is offered."""
        with self._lock:
            return self._offer.measure_in_s(self._clock())

    def measured(self, spare_bytes: int | None) -> bool:
        """So much may be taken besides what is held (None: nobody knows). True where more is offered for it."""
        with self._lock:
            possible_bytes = None if spare_bytes is None else self._used_bytes() + spare_bytes
            is_raised = self._offer.measured(possible_bytes, self._clock())
            if is_raised:
                self._share_rest(self._offer.size_bytes)
            return is_raised

    def shrink(self, size_bytes: int) -> int:
        """Memory ran out with this much besides what is held: offer less than that, and never less than what is held.
        Returns what is offered now."""
        with self._lock:
            used_bytes = self._used_bytes()
            shortages = self._offer.count_shortage(self._clock())
            self._offer.lower(used_bytes + int(size_bytes * _KEPT_AFTER_SHORTAGE**shortages))
            return self._offer.size_bytes

    def give_up(self, key: ShardKey) -> Shard | None:
        """Unload what memory ran out with while it served, and offer less from now on. None: it is gone already."""
        with self._lock:
            held = self._held.get(key)
        if held is None:
            return None
        self.unload(key)
        self.shrink(held.size_bytes)
        return held.shard

    def take_draft_head(self, command: TakeDraftHead) -> None:
        """Draft with the model's draft head as it is now. BackendError with why that cannot be; nothing is drafted
        with any more then."""
        key = command.place
        with self._lock:
            held = self._held.get(key)
        if held is None or held.drafting is None:
            raise BackendError(f"no last stage of chain {command.chain} that could draft is here")
        card = self._fetch_card(command.origin, held.shard.model)
        if not draft_head_bytes(card):
            raise BackendError(f"{card.model} has no draft head")
        supplier = Supplier(command.origin.node, partial(self._dial, command.origin), is_origin=True)
        with self._loading:
            # There may be no room for two of them.
            self._stages.draft_with(key, None)
            self._note_draft_head(key)
        self._add_draft_head(key, card, [supplier], held.drafting)
        with self._lock:
            held = self._held.get(key)
        problem = "it was unloaded" if held is None or held.draft_head is None else held.draft_head.problem
        if problem:
            raise BackendError(f"the draft head of {card.model} is not used: {problem}")

    def unload(self, key: ShardKey) -> None:
        self._stages.remove(key)
        with self._freed:
            self._held.pop(key, None)
            self._share_rest(self._offer.size_bytes)
            self._freed.notify_all()

    def close(self) -> None:
        """Wait for memory and for others no more."""
        self._closing.set()
        with self._freed:
            self._freed.notify_all()

    def _load(self, command: LoadLayers, key: ShardKey, on_progress: OnProgress) -> MeasuredShard:
        *_, origin = command.sources
        with phase("fetching the card"):
            card = self._fetch_card(origin, command.model)
        stage = Stage(command.start, command.stop, card.spec.layer_count)
        parts = self._parts(card, command)
        size = parts.total_bytes
        self._await_room(size)
        backend = self._backend_of(command)
        max_rows, max_logit_rows = rows_of_step(backend, self._options.device)
        options = ExecutorOptions(
            kv_bytes=parts.kv_bytes,
            max_rows=max_rows,
            max_logit_rows=max_logit_rows,
            context_length=min(command.context_length, card.spec.context_length),
            threads=self._options.threads,
            device=self._options.device,
            kv_type=command.kv_type,
        )
        suppliers = [
            Supplier(each.node, partial(self._dial, each), each is origin) for each in command.sources
        ]
        ranked = None if command.tensor is None else ShareOpening(card, stage, command.tensor, options)
        runtime, speed = self._open_measured(
            size,
            lambda: self._open_stage(card, stage, suppliers, backend, options, on_progress, ranked),
            lambda opened: self._measure(opened, card, stage, options, ranked),
            card.model,
        )
        shape = shape_of_card(card)
        # Keys and values are read like weights: by that, a token before a row adds to the row's time.
        read_bytes = shape.work_bytes * stage.count + (card.head_bytes if stage.is_last else 0)
        kv_token_bytes = card.spec.kv_bytes_per_token_and_layer(command.kv_type) * stage.count
        release_code()
        drafting: _Drafting | None = None
        if stage.is_last and (command.tensor is None or command.tensor.rank == 0):
            drafting = _Drafting(backend, options, parts.kv_bytes // max(1, kv_token_bytes))
        drafts = drafting is not None and draft_head_bytes(card) > 0
        if drafts and can_draft(card.spec, backend):
            runtime.await_drafter()
        claims = self._options.claim
        claim = None if claims is None else claims(card, stage, backend, command.kv_type)
        if ranked is None:
            pace = ServicePace(speed.stage, speed.stage.row_s * kv_token_bytes / read_bytes)
            self._stages.add(key, runtime, pace, claim)
        else:
            self._stages.add_rank(key, runtime, ranked.share, ranked.leader, claim)
        with self._lock:
            shard = Shard(command.chain, command.model, command.start, command.stop, size, command.tensor)
            self._held[key] = _Held(shard, parts.log_bytes, drafting=drafting)
        if drafting is not None and drafts:
            # Not before the stage is there: a chain that waits for it can do without.
            self._note_draft_head(key)
            add = partial(self._add_draft_head, key, card, suppliers, drafting)
            threading.Thread(target=add, name="draft head", daemon=True).start()
        part = 1.0 if ranked is None else ranked.part
        return MeasuredShard(shape, speed if part == 1.0 else of_whole_layers(speed, part))

    def _measure(
        self,
        runtime: StageRuntime,
        card: Card,
        stage: Stage,
        options: ExecutorOptions,
        ranked: ShareOpening | None,
    ) -> ShardSpeed:
        """A share is measured alone: what its group takes besides is known when it is in one."""
        most_rows = min(options.context_length, options.max_rows)
        if ranked is None:
            return measure_shard(runtime, card, stage, most_rows, self._options.overhead_s)
        ranked.leader.bind(ranked.share.pretended())
        try:
            return measure_shard(runtime, card, stage, most_rows, self._options.overhead_s)
        finally:
            ranked.leader.unbind()

    def _open_measured(
        self,
        size_bytes: int,
        open_stage: Callable[[], StageRuntime],
        measure: Callable[[StageRuntime], ShardSpeed],
        model: str,
    ) -> tuple[StageRuntime, ShardSpeed]:
        """A stage that has computed: what runs out of memory in its first steps would do so in service."""

        def open_and_measure() -> tuple[StageRuntime, ShardSpeed]:
            runtime = open_stage()
            try:
                with phase("measuring layers"):
                    return runtime, measure(runtime)
            except BaseException:
                runtime.close()
                raise

        try:
            return within_memory(
                open_and_measure, free_caches, f"{format_bytes(size_bytes)} of {model} were loaded"
            )
        except DeviceMemoryError:
            self.shrink(size_bytes)
            raise

    def _parts(self, card: Card, command: LoadLayers) -> StageBytes:
        """What these layers will take, in the costs of this worker's backend: what placement has counted, too."""
        model = describe_card(
            card,
            kv_tokens=command.kv_tokens,
            kv_type=command.kv_type,
            context_length=command.context_length,
        )
        holding = self.holding(self._backend_of(command))
        return sums_of(model, holding, command.tensor).parts(command.start, command.stop)

    def holding(self, backend: str) -> str:
        """What holds shards here that this backend computes, see `backends.footprint`."""
        return holding_of(backend, self._options.device)

    def _backend_of(self, command: LoadLayers) -> str:
        asked = command.backend in self._options.alternatives
        return command.backend if asked else self._options.backend

    def _open_stage(
        self,
        card: Card,
        stage: Stage,
        suppliers: Sequence[Supplier],
        backend: str,
        options: ExecutorOptions,
        on_progress: OnProgress,
        ranked: ShareOpening | None = None,
    ) -> StageRuntime:
        def progress(done: int, total: int) -> None:
            on_progress(done / total if total else 1.0)

        with self._tensors(card, suppliers, progress) as tensors:
            rank = None if ranked is None else ranked.rank
            executor = open_remote_shard(card, stage, tensors, backend=backend, options=options, rank=rank)
            if ranked is not None:
                executor = ranked.opened(executor)
            with phase("reading the vocabulary"):
                vocabulary = served_vocabulary(tensors) if stage.is_last else None
        return StageRuntime(
            executor,
            is_first=stage.is_first,
            is_last=stage.is_last,
            vocabulary=vocabulary,
            max_rows=options.max_rows,
            max_logit_rows=options.max_logit_rows,
            adapters=adapter_names(card.entries),
        )

    @contextlib.contextmanager
    def _tensors(
        self,
        card: Card,
        suppliers: Sequence[Supplier],
        progress: Callable[[int, int], None] | None = None,
    ) -> Iterator[RemoteTensors]:
        """The tensors of a card: from the original file where that is on this machine, else from afar."""
        original = open_original(card) if self._options.reads_originals else None
        with contextlib.ExitStack() as opened:
            if original is not None:
                log.info("%s is read from %s", card.model, original.name)
                opened.enter_context(original)
            tensors = RemoteTensors(
                card,
                suppliers,
                self._cache,
                hubs=[opened.enter_context(hub) for hub in self._open_hubs(card)],
                rate=self._rate,
                original=original,
                progress=progress,
                more=self._holders,
            )
            opened.enter_context(tensors)
            yield tensors
            if original is not None:
                original.check()

    def _holders(self) -> list[Supplier]:
        """Whoever is there must show a worker's certificate; what it sends is believed by its hash."""
        return [Supplier(url, partial(self._dial, Peer("", url))) for url in self._options.find_holders()]

    def _open_hubs(self, card: Card) -> list[Hub]:
        if card.source is None or self._options.sources is None:
            return []
        from shardcompute.weights.sources.hub import open_hubs

        try:
            return open_hubs(self._options.sources)
        except SourceError as error:
            log.warning("weights of %s come from other nodes, not from their source: %s", card.model, error)
            return []

    def _fetch_card(self, origin: Peer, model: str) -> Card:
        """A moment without the coordinator is no reason to give up."""
        for delay_s in _RETRY_DELAYS_S:
            try:
                return fetch_card(partial(self._dial, origin), model)
            except LinkError:
                if self._closing.wait(delay_s):
                    raise
        return fetch_card(partial(self._dial, origin), model)

    # Memory

    def _await_room(self, size_bytes: int) -> None:
        """What is no longer wanted here is unloaded in a moment; CapacityError if that does not suffice."""
        with self._freed:
            memory_bytes = self._offer.size_bytes
            if self._used_bytes() + size_bytes > memory_bytes:
                self._drop_draft_heads()
            can_fit = self._options.process_bytes + size_bytes <= memory_bytes
            if can_fit and self._freed.wait_for(
                lambda: self._closing.is_set() or self._used_bytes() + size_bytes <= memory_bytes,
                self._options.room_timeout_s,
            ):
                self._share_rest(memory_bytes - size_bytes)
                return
            used_bytes, process_bytes = self._used_bytes(), self._options.process_bytes
            raise CapacityError(
                f"{format_bytes(size_bytes)} do not fit: of {format_bytes(memory_bytes)} this worker's process takes "
                f"{format_bytes(process_bytes)}, other layers {format_bytes(used_bytes - process_bytes)}",
                hint="give this worker more with --max-memory: "
                f"{format_bytes(used_bytes + size_bytes)} are the least that works",
            )

    def _share_rest(self, memory_bytes: int) -> None:
        """Give activation logs what is kept for them and what layers and draft heads leave of this. Needs the lock."""
        kept_bytes = sum(held.log_bytes for held in self._held.values())
        self._stages.limit_logs(kept_bytes + max(0, memory_bytes - self._used_bytes()))

    def _used_bytes(self) -> int:
        held_bytes = sum(held.size_bytes for held in self._held.values())
        return self._options.process_bytes + self._reserved_bytes + held_bytes

    def _add_draft_head(
        self,
        key: ShardKey,
        card: Card,
        suppliers: Sequence[Supplier],
        drafting: _Drafting,
    ) -> None:
        """Let a last stage draft, where there is memory left for that."""
        try:
            with self._loading, self._tensors(card, suppliers) as tensors:
                with self._lock:
                    room_bytes = self._offer.size_bytes - self._used_bytes()
                opened = open_head_drafter(
                    card,
                    tensors,
                    backend=drafting.backend,
                    options=drafting.options,
                    room_bytes=room_bytes,
                    holding=self.holding(drafting.backend),
                    kv_tokens=drafting.kv_tokens,
                )
                if opened is None:
                    log.info("no memory is left for a draft head of %s", card.model)
                    self._lack_draft_head(key, _NO_ROOM)
                    return
                drafter, size_bytes = opened
                self._note_draft_head(key, size_bytes)
                self._stages.draft_with(key, drafter)
            return_freed_memory()
            release_code()
        except ShardComputeError as error:
            log.warning("no draft head of %s is used: %s", card.model, error)
            self._lack_draft_head(key, error.message)
        except Exception as error:
            # Whatever it is, the chain answers without drafts, and its operator is to see why.
            told = device_memory_error(error, "a draft head was loaded") if is_out_of_memory(error) else error
            self._lack_draft_head(key, str(told) or type(error).__name__)
            if told is error:
                raise
            log.warning("no draft head of %s is used: %s", card.model, told)
            free_caches()

    def _lack_draft_head(self, key: ShardKey, problem: str) -> None:
        self._note_draft_head(key, problem=problem)
        # It is not waited for any more.
        self._stages.draft_with(key, None)

    def _note_draft_head(self, key: ShardKey, size_bytes: int = 0, problem: str = "") -> None:
        """What the coordinator hears of it with the next heartbeat."""
        with self._lock:
            held = self._held.get(key)
            if held is not None:
                report = DraftHeadReport(held.shard.chain, size_bytes, shorten(problem))
                self._held[key] = replace(held, draft_head=report)
                self._share_rest(self._offer.size_bytes)

    def _drop_draft_heads(self) -> None:
        for key, held in self._held.items():
            if held.draft_head_bytes:
                dropped = DraftHeadReport(held.shard.chain, problem=_NO_ROOM)
                self._held[key] = replace(held, draft_head=dropped)
                self._stages.draft_with(key, None)
