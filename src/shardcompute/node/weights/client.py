"""Weights from afar: a `TensorFile` whose bytes come from the coordinator and from peers, piece by piece.

`prefetch` brings all that a shard needs into the cache on disk, many pieces under way at once; reading then finds
it there. Without a cache, or once the disk is full, each tensor is fetched when it is read and kept in memory
until the next one. A tensor, or the part of it that a tensor rank reads, is believed only when its SHA-256 is what the
origin says: if not, what peers sent of it is fetched again from others, and a peer whose bytes turn out to be wrong is
not asked again.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from shardcompute.backends.executor import Executor, ExecutorOptions
from shardcompute.core.closing import Closing
from shardcompute.core.errors import CorruptModelError, LinkError, SourceError, UnknownModelError, UsageError
from shardcompute.models.families import is_fallback
from shardcompute.models.spec import Stage
from shardcompute.models.tensor_rank import TensorRank
from shardcompute.node.weights.originals import Original
from shardcompute.node.weights.pieces import (
    PIECE_BYTES,
    RETRY_DELAYS_S,
    Piece,
    PieceQueue,
    PieceSource,
    SourceLine,
    Supplier,
    fetch_pieces,
)
from shardcompute.node.weights.share_ranges import ranges_bytes, stage_ranges
from shardcompute.node.weights.stores import BufferStore, CacheStore, Incoming, Store
from shardcompute.runtime.fallback import open_served_fallback
from shardcompute.runtime.llamacpp import open_served_stage
from shardcompute.runtime.shard import build_executor, refuse_adapters, refuse_ranks
from shardcompute.weights.adapter_pack import served_adapters
from shardcompute.weights.card import Card, decode_card, row_range
from shardcompute.weights.formats.bytes import ByteSource, check_range
from shardcompute.weights.formats.tensor_file import Span, TensorEntry
from shardcompute.weights.served import shard_source
from shardcompute.weights.shard_cache import CachedShard, ShardCache
from shardcompute.weights.sources.rate import RateLimit
from shardcompute.wire import Link
from shardcompute.wire.control import CardReply, FetchFailed, FetchModel

if TYPE_CHECKING:
    from shardcompute.weights.sources.hub import Hub

log = logging.getLogger(__name__)
OnProgress = Callable[[int, int], None]
"""Told how many bytes are here and how many the shard needs, at every full percent and, while bytes arrive, every few
seconds."""
_TELL_S = 5.0


def fetch_card(dial: Callable[[], Link], model: str, timeout_s: float = 60.0) -> Card:
    """What `model` consists of, from whoever serves it."""
    with dial() as link:
        link.send(FetchModel(0, model))
        try:
            message, _ = link.receive(timeout_s)
        except TimeoutError:
            raise LinkError(
                f"{link.peer} did not say within {timeout_s:g} s what {model} consists of",
                hint="the node may be overloaded; try again",
            ) from None
        if isinstance(message, FetchFailed):
            raise UnknownModelError(
                f"{link.peer} cannot give {model}: {message.reason}", hint="check the model's name"
            )
        if not isinstance(message, CardReply):
            raise LinkError(
                f"{link.peer} answered with {type(message).__name__} when asked for a model's card"
            )
        return decode_card(message.card)


def open_remote_shard(
    card: Card,
    stage: Stage,
    tensors: RemoteTensors,
    *,
    backend: str = "onnx",
    options: ExecutorOptions,
    rank: TensorRank | None = None,
) -> Executor:
    """Fetch a stage and load it, or a tensor rank's share of it; `tensors` may be closed afterwards."""
    if rank is not None:
        refuse_ranks("transformers" if is_fallback(card.spec) else backend)
    tensors.prefetch(stage, rank)
    if card.stage_adapters(stage):
        refuse_adapters(backend, options.device)
    if is_fallback(card.spec):
        return open_served_fallback(card, tensors, stage, options)
    if backend == "llamacpp":
        return open_served_stage(card, tensors, stage, options)
    source = shard_source(card, tensors, stage)
    adapters = served_adapters(tensors, card.layout, stage)
    return build_executor(
        card.spec, stage, source, backend=backend, options=options, adapters=adapters, rank=rank
    )


class RemoteTensors(Closing):
    """The tensors of a card. Reading may be done from any thread, one read at a time.

    Raises `CorruptModelError` for bytes that are wrong wherever they come from, `SourceError` if they come from
    nowhere.
    """

    def __init__(
        self,
        card: Card,
        sources: Sequence[Supplier],
        cache: ShardCache | None = None,
        *,
        hubs: Sequence[Hub] = (),
        rate: RateLimit | None = None,
        original: Original | None = None,
        progress: OnProgress | None = None,
        more: Callable[[], Sequence[Supplier]] = lambda: (),
        retry_delays_s: Sequence[float] = RETRY_DELAYS_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """What the `original` has is read from there, and neither fetched nor kept. A model that has a source is read
        from these `hubs`, and from its origin only where they fail; all together no faster than `rate`. `more` is asked
        once, when nobody of these has what is needed."""
        if not any(source.is_origin for source in sources):
            raise UsageError(
                "weights need an origin to be checked against", hint="name the coordinator as one"
            )
        names = [*(hub.host for hub in hubs if card.source is not None), *(each.name for each in sources)]
        self.name = f"{card.model} from {', '.join(names)}"
        self.entries: Mapping[str, TensorEntry] = card.entries
        self.metadata: Mapping[str, Any] = {}
        self._card = card
        self._cache: CachedShard | None = None
        self._is_caching = cache is not None
        self._original = original
        self._more: Callable[[], Sequence[Supplier]] | None = more
        self._line_to: Callable[[Supplier], PieceSource] = lambda source: SourceLine(
            source, card.fingerprint, retry_delays_s, rate
        )
        self._lines: list[PieceSource] = [self._line_to(each) for each in sources]
        self._order: Mapping[str, tuple[int, int]] = {}
        if card.source is not None:
            from shardcompute.node.weights.hub_line import HubLine, file_order

            self._order = file_order(card.source)
            self._lines += [HubLine(hub, card.source, rate, delays_s=retry_delays_s) for hub in hubs]
        self._on_progress = progress
        self._clock = clock
        self._told = -1
        self._told_bytes = 0
        self._told_s = 0.0
        self._wanted: dict[str, tuple[Span, ...]] = {}
        self._recent: BufferStore | None = None
        self._reading = threading.Lock()
        self._counting = threading.Lock()
        self._done_bytes = 0
        self._total_bytes = 0
        if cache is not None:
            try:
                self._cache = cache.open(card)
            except SourceError as error:
                self._stop_caching(error)

    def prefetch(self, stage: Stage, rank: TensorRank | None = None) -> None:
        """Bring what a stage needs into the cache, or what a tensor rank's share of it does."""
        needed = stage_ranges(self._card, stage, rank)
        ranges = {name: spans for name, spans in needed.items() if not self._has_original(name)}
        self._wanted.update(ranges)
        self._done_bytes, self._total_bytes = 0, ranges_bytes(needed)
        cache = self._cache
        if cache is None or not self._is_caching:
            self._count(0)
            return
        parts = [(name, span) for name, spans in ranges.items() for span in spans]
        missing = [each for each in parts if not cache.is_verified(*each)]
        self._count(self._verified_bytes(parts))
        self._fetch([CacheStore(cache, self.entries[name], span) for name, span in missing])
        self._done_bytes = self._verified_bytes(parts)

    def read_bytes(self, name: str, offset: int, length: int) -> memoryview:
        entry = self.entries[name]
        check_range(name, entry.size_bytes, offset, length)
        if not length:
            return memoryview(bytearray())
        if self._original is not None and self._has_original(name):
            content = self._original.read_bytes(name, offset, length)
            self._count(length)
            return content
        with self._reading:
            # It may be read bit by bit, but is checked at once.
            part = self._part_around(name, (offset, offset + length))
            if self._cache is not None and self._cache.is_verified(name, part):
                found = self._cache.read(name, offset, length)
                if found is not None:
                    return found
            recent = self._recent
            if recent is None or (recent.entry.name, recent.span) != (name, part):
                self._recent = None
                recent = self._fetch_part(entry, part)
            if part == (offset, offset + length):
                self._recent = None
                return recent.content
            self._recent = recent
            return memoryview(bytearray(recent.content[offset - part[0] : offset - part[0] + length]))

    def read_rows(self, name: str, start: int = 0, stop: int | None = None) -> memoryview:
        return self.read_bytes(name, *row_range(self.entries[name], start, stop))

    def lasting(self, name: str) -> ByteSource | None:
        """A tensor that is on this machine's disk, in the original file or checked in the cache."""
        if self._original is not None and self._has_original(name):
            return self._original.lasting(name)
        return None if self._cache is None else self._cache.lasting(name)

    def close(self) -> None:
        """End the links."""
        self._recent = None
        for line in self._lines:
            line.say_goodbye()

    def _has_original(self, name: str) -> bool:
        return self._original is not None and name in self._original.entries

    # Fetching

    def _fetch_part(self, entry: TensorEntry, span: Span) -> BufferStore:
        store = BufferStore(entry, span, self._cache, self._keep)
        self._fetch([store])
        return store

    def _part_around(self, name: str, span: Span) -> Span:
        """What is fetched and checked together with these bytes: what is wanted of a tensor, else just them."""
        wanted = self._wanted.get(name, ())
        return next((each for each in wanted if each[0] <= span[0] and span[1] <= each[1]), span)

    def _verified_bytes(self, parts: Sequence[tuple[str, Span]]) -> int:
        cache = self._cache
        return sum(span[1] - span[0] for name, span in parts if cache and cache.is_verified(name, span))

    def _fetch(self, stores: Sequence[Store]) -> None:
        """Fill the stores. Those on disk stay as they are, without complaint, when it is full."""
        counted = self._done_bytes
        try:
            self._fetch_from_known(stores)
        except SourceError as error:
            if not self._ask_for_more():
                raise
            log.info("%s; others are asked that are said to hold it", error.message)
            self._done_bytes = counted
            self._fetch_from_known(stores)

    def _ask_for_more(self) -> bool:
        """Whether there are others to ask, which nobody has told of before."""
        more, self._more = self._more, None
        known = {line.name for line in self._lines}
        found = [each for each in (more() if more is not None else ()) if each.name not in known]
        self._lines += [self._line_to(each) for each in found]
        return bool(found)

    def _fetch_from_known(self, stores: Sequence[Store]) -> None:
        incoming: dict[str, list[Incoming]] = {}
        missing: list[tuple[Incoming, list[Span]]] = []
        for store in stores:
            each = Incoming(store)
            incoming.setdefault(store.entry.name, []).append(each)
            gaps = each.begin()
            missing.append((each, gaps))
            self._count(each.size_bytes - sum(stop - start for start, stop in gaps))

        def deliver(
            queue: PieceQueue, line: PieceSource, piece: Piece, body: memoryview, digest: bytes
        ) -> None:
            each = next(one for one in incoming[piece.tensor] if one.holds(piece))
            if piece.size_bytes:
                try:
                    each.take(line, (piece.start, piece.stop), body)
                except SourceError as error:
                    self._stop_caching(error)
                    queue.stop()
                    return
                self._count(len(body))
            if each.arrived(piece, digest, may_be_unpinned=piece.tensor in self._order):
                self._judge(each, queue)

        # Whether peers may be asked for a tensor depends on whether its hash is known.
        located = [each for each, _ in missing if each.store.entry.name in self._order]
        fetch_pieces(self._lines, [_hash_of(each) for each in located], deliver)
        wanted = [(each, gaps) for each, gaps in missing if gaps or not each.is_known]
        wanted.sort(key=lambda one: self._order.get(one[0].store.entry.name, (-1, 0)))
        fetch_pieces(
            self._lines, [piece for each, spans in wanted for piece in _pieces(each, spans)], deliver
        )

    def _judge(self, each: Incoming, queue: PieceQueue) -> None:
        """All of it has come: believe it, or fetch it again from others."""
        entry = each.store.entry
        digest = each.store.sha256()
        is_located = entry.name in self._order
        if is_located and digest not in (None, each.expected) and not each.has_claimed:
            # What is known of it is what another has found, or nothing: tell what was found here.
            each.has_claimed = True
            queue.add([_hash_of(each, digest or b"")])
            return
        if digest == each.expected:
            for line in each.liars():
                if not line.is_dropped:
                    log.warning("%s sent wrong bytes of %s and is not asked again", line.name, entry.name)
                line.drop()
                # Others would leave to it what it can give.
                queue.give_back(line, (), SourceError(f"{line.name} sent wrong bytes of {entry.name}"))
            self._confirm(each.store, each.expected)
            return
        if each.is_all_from_origins or not queue.exclude(each.peers, entry.name):
            each.store.discard()
            raise CorruptModelError(
                f"{entry.name!r} of {self._card.model} arrived damaged: its SHA-256 is not {each.expected.hex()}",
                hint="check the coordinator's disk and fetch the model there again"
                if self._card.source is None
                else "the hub gives others other bytes than the coordinator; check for a proxy or a mirror between",
            )
        self._count(-each.size_bytes)
        queue.add(_pieces(each, each.begin_again()))

    def _confirm(self, store: Store, digest: bytes) -> None:
        try:
            store.confirm(digest)
        except SourceError as error:
            self._stop_caching(error)

    def _keep(self, name: str, start: int, content: memoryview) -> None:
        """Put fetched bytes on disk for as long as there is room."""
        if self._cache is not None and self._is_caching:
            try:
                self._cache.write(name, start, content)
            except SourceError as error:
                self._stop_caching(error)

    def _stop_caching(self, error: SourceError) -> None:
        with self._counting:
            was_caching, self._is_caching = self._is_caching, False
        if was_caching:
            log.warning("weights are not kept on disk and will be fetched again next time: %s", error)

    def _count(self, count_bytes: int) -> None:
        with self._counting:
            self._done_bytes += count_bytes
            done, total = min(max(self._done_bytes, 0), self._total_bytes), self._total_bytes
            told = 100 * done // total if total else 100
            now_s = self._clock()
            is_late = done > self._told_bytes and now_s - self._told_s >= _TELL_S
            if self._on_progress is not None and (told != self._told or is_late):
                self._told, self._told_bytes, self._told_s = told, done, now_s
                self._on_progress(done, total)


def _pieces(each: Incoming, missing: Sequence[Span]) -> Iterator[Piece]:
    """What to ask for: the missing ranges, and the hash."""
    name = each.store.entry.name
    for start, stop in missing:
        while start < stop:
            last = min(stop, (start // PIECE_BYTES + 1) * PIECE_BYTES)
            yield Piece(name, start, last, needs_origin=each.is_unpinned)
            start = last
    if not each.is_known:
        yield _hash_of(each)


def _hash_of(each: Incoming, claim: bytes = b"") -> Piece:
    return Piece(each.store.entry.name, *each.store.span, needs_origin=True, is_hash=True, claim=claim)
