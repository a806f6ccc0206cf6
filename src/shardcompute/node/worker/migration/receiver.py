"""KV receiver: what other stages send of the sessions that a loaded shard, not in use yet, is to go on with.

Only the nodes that the coordinator has named are heard, for the layers that it has named, and only where rows lie as
they do here. Sizes are known before a body is taken, each has its digest, and memory is that of the shard's own KV
budget: a session for which there is no room is refused, and replayed. A copy that ends early is dropped whole.
"""

from __future__ import annotations

import hashlib
import logging
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial

from shardcompute.backends.executor import MovableKv
from shardcompute.control.state import ShardPlace
from shardcompute.core.errors import CapacityError, LinkError, ShardComputeError
from shardcompute.core.fields import shorten
from shardcompute.core.phases import phase
from shardcompute.core.rate_limited_log import RateLimitedLog
from shardcompute.node.rpc.commands import ExpectKv
from shardcompute.node.rpc.frames import opening_of
from shardcompute.node.worker.migration.ledgers import ReceiveLedger, RowSpan
from shardcompute.node.worker.migration.sender import Perform
from shardcompute.runtime.stage import StageRuntime
from shardcompute.wire import (
    KvAccepted,
    KvEnded,
    KvOffer,
    KvPiece,
    KvSealed,
    Link,
    Message,
    Refused,
    unpack_ids,
)

log = logging.getLogger(__name__)
_OFFER_S = 10.0
_QUIET_S = 30.0
"""A sender that says nothing for so long is gone."""
_SEAL_S = 3.0
"""So long a chain that moves waits for the last rows, before it does without all of them."""
LAST_ROWS = "last rows of sessions"
"""The phase in which a chain that moves waits for them."""
_TAKE_S = 30.0
"""So long what has come is kept for a chain that does not move after all."""


@dataclass(eq=False, slots=True)
class ReceivedKv:
    """One copy: what its sources have sent so far. All but `settled` and `sealed` belongs to the computing thread."""

    number: int
    first_layer: int
    runtime: StageRuntime
    kv: MovableKv
    sources: Mapping[tuple[str, int, int], int]
    """By node and layers, its place in the ledger."""
    ledger: ReceiveLedger
    sealed: threading.Event = field(default_factory=threading.Event)
    """All sources have said their last word, or the copy is over."""
    settled: threading.Event = field(default_factory=threading.Event)
    """It was taken or dropped: nothing is written any more."""

    def write(self, source: int, layers: range, message: KvPiece, body: memoryview) -> None:
        self._check_open()
        rows = RowSpan(message.session, message.start, message.start + message.count)
        if not self.ledger.check(source, rows):
            self.ledger.took(source, rows)
            return
        # A session's tokens come with its last layer, and with them all that picks need.
        has_tokens = self.runtime.is_last and layers.stop == self.first_layer + self.kv.kv_layers
        if has_tokens and not message.ids:
            raise LinkError("rows of a last layer came without their tokens")
        here = range(layers.start - self.first_layer, layers.stop - self.first_layer)
        try:
            self.kv.write_kv(rows.session, here, range(rows.start, rows.stop), body)
        except CapacityError as error:
            log.info("session %d is not taken over: %s", rows.session, error.message)
            self.ledger.refuse(source, rows)
            self.runtime.close_sessions([rows.session])
            return
        if message.opened is not None and (has_tokens or not self.runtime.is_last):
            self.runtime.take_over(opening_of(message.opened))
        if has_tokens:
            self.runtime.follow(rows.session, rows.start, unpack_ids(message.ids).tolist())
        self.ledger.took(source, rows)

    def end(self, source: int, message: KvEnded) -> None:
        self._check_open()
        self.runtime.close_sessions(self.ledger.ended(source, message.sessions))

    def seal(self, source: int, message: KvSealed) -> None:
        self._check_open()
        self.ledger.seal(source, message.lengths)
        if self.ledger.is_sealed:
            self.sealed.set()

    def install(self) -> None:
        """Go on with what has come whole, and forget the rest."""
        whole = {} if self.settled.is_set() else self.ledger.whole()
        self.settled.set()
        held = self.runtime.session_lengths()
        whole = {id: min(length, held.get(id, 0)) for id, length in whole.items() if held.get(id, 0)}
        self.runtime.close_sessions([id for id in held if id not in whole])
        for id, length in whole.items():
            self.kv.cut_session(id, length)

    def drop(self) -> None:
        if not self.settled.is_set():
            self.settled.set()
            self.runtime.reset()
        self.sealed.set()

    def _check_open(self) -> None:
        if self.settled.is_set():
            raise LinkError("the copy is over")


class KvReceiver:
    """Of all shards of a worker. Methods may be called from any thread."""

    def __init__(self, perform: Perform) -> None:
        self._perform = perform
        self._lock = threading.Lock()
        self._limited_log = RateLimitedLog(log)
        self._copies: dict[ShardPlace, ReceivedKv] = {}

    def expect(self, command: ExpectKv, runtime: StageRuntime | None) -> None:
        """LinkError where sessions cannot be taken over."""
        place, kv = (command.chain, command.start, command.stop, None), None
        if runtime is not None:
            kv = runtime.movable_kv
        if runtime is None or kv is None:
            raise LinkError("what computes these layers here cannot take sessions over")
        ranges = [range(each.start, each.stop) for each in command.sources]
        sources = {
            (each.node.node, each.start, each.stop): index for index, each in enumerate(command.sources)
        }
        ledger = ReceiveLedger(range(command.start, command.stop), ranges)
        if kv.kv_layers != command.stop - command.start:
            raise LinkError(f"{kv.kv_layers} layers are held here, not {command.start} to {command.stop}")
        self.drop(place)
        self._perform(runtime.reset)
        copy = ReceivedKv(command.number, command.start, runtime, kv, sources, ledger)
        with self._lock:
            self._copies[place] = copy

    def serve(self, link: Link) -> None:
        """Take what a source sends, until it has sealed it. Whatever else ends the link drops the copy."""
        offer, _ = _receive(link, _OFFER_S)
        if not isinstance(offer, KvOffer):
            raise LinkError(f"{link.peer} sent {type(offer).__name__} instead of an offer")
        found = self._find(offer, link.peer)
        if isinstance(found, str):
            self._limited_log.warning(link.peer, "%s offers sessions in vain: %s", link.peer, found)
            link.send(Refused(shorten(found)))
            return
        place, copy, source = found
        link.send(KvAccepted())
        try:
            self._take_all(link, copy, source, range(offer.start, offer.stop))
        except ShardComputeError as error:
            log.warning("what %s sends of chain %s is dropped: %s", link.peer, offer.chain, error.message)
            self._drop(place, copy)
            raise
        if copy.sealed.is_set() and not copy.settled.wait(_TAKE_S):
            log.info("chain %s has not moved: what was sent of its sessions is dropped", offer.chain)
            self._drop(place, copy)

    def take(self, place: ShardPlace, number: int) -> ReceivedKv | None:
        """What a copy has brought, to be installed in the computing thread; None where it has failed."""
        with self._lock:
            copy = self._copies.get(place)
        if copy is None or copy.number != number:
            return None
        with phase(LAST_ROWS, is_brief=True):
            is_whole = copy.sealed.wait(_SEAL_S) and not copy.settled.is_set()
        with self._lock:
            if self._copies.get(place) is copy:
                del self._copies[place]
        if not is_whole:
            self._perform(copy.drop)
            log.warning("chain %s: the last rows of its sessions did not come: they are replayed", place[0])
            return None
        return copy

    def drop(self, place: ShardPlace) -> None:
        """What was sent for a shard is of no use any more."""
        with self._lock:
            copy = self._copies.get(place)
        if copy is not None:
            self._drop(place, copy)

    def release(self, place: ShardPlace) -> None:
        """The shard is about to be freed, with all that was sent for it."""
        with self._lock:
            copy = self._copies.pop(place, None)
        if copy is not None:
            copy.settled.set()
            copy.sealed.set()

    def _drop(self, place: ShardPlace, copy: ReceivedKv) -> None:
        with self._lock:
            if self._copies.get(place) is copy:
                del self._copies[place]
        self._perform(copy.drop)

    def _find(self, offer: KvOffer, peer: str) -> tuple[ShardPlace, ReceivedKv, int] | str:
        with self._lock:
            copies = [(place, copy) for place, copy in self._copies.items() if place[0] == offer.chain]
        for place, copy in copies:
            source = copy.sources.get((peer, offer.start, offer.stop))
            if copy.number == offer.number and source is not None:
                if copy.kv.kv_format != offer.format:
                    return f"rows are kept as {offer.format!r} there and as {copy.kv.kv_format!r} here"
                return place, copy, source
        return "nobody has announced that"

    def _take_all(self, link: Link, copy: ReceivedKv, source: int, layers: range) -> None:
        while True:
            message, body = _receive(link, _QUIET_S)
            if isinstance(message, KvPiece):
                _check_rows(message, body, copy.kv, layers)
                self._perform(partial(copy.write, source, layers, message, body))
            elif isinstance(message, KvEnded):
                self._perform(partial(copy.end, source, message))
            elif isinstance(message, KvSealed):
                self._perform(partial(copy.seal, source, message))
                link.send(KvAccepted())
                return
            else:
                raise LinkError(f"{type(message).__name__} came among rows of KV")


def _receive(link: Link, timeout_s: float) -> tuple[Message, memoryview]:
    try:
        return link.receive(timeout_s)
    except TimeoutError:
        raise LinkError(f"{link.peer} said nothing for {timeout_s:g} s") from None


def _check_rows(message: KvPiece, body: memoryview, kv: MovableKv, layers: range) -> None:
    """LinkError for a body that is not what it was, or not of these rows."""
    size = kv.kv_bytes(len(layers), message.count)
    if body.nbytes != size:
        raise LinkError(f"{message.count} rows of {len(layers)} layers have {size} bytes, not {body.nbytes}")
    if hashlib.sha256(body).digest() != message.sha256:
        raise LinkError(f"rows of session {message.session} were damaged on the way")
    opened = message.opened
    if opened is not None and (opened.session != message.session or opened.prefix_length or opened.pictures):
        raise LinkError(f"session {message.session} was opened in a way that cannot be taken over")
