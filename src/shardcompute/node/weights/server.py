"""Serves weights over links of role "weights": a coordinator its models, a worker what it has fetched.

One thread per link answers requests one after the other; a client keeps several under way. Nothing is believed:
offsets are checked against the card, a request may ask for 8 MiB at most, and whatever cannot be had is answered
by `FetchFailed`. A request for no bytes of a tensor asks for its hash, or that of a part of it, which is computed once.
"""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping

from shardcompute.core.errors import LinkClosedError, LinkError, ShardComputeError
from shardcompute.core.fields import shorten
from shardcompute.node.weights.pinned_hashes import PinnedHashes
from shardcompute.weights.card import encode_card
from shardcompute.weights.formats.tensor_file import Span
from shardcompute.weights.served import ServedWeights
from shardcompute.weights.shard_cache import CachedTensors, ShardCache
from shardcompute.weights.sources.rate import RateLimit
from shardcompute.wire import Body, Goodbye, Link, Message, Ping, Pong, WireLimits
from shardcompute.wire.control import CardReply, FetchFailed, FetchModel, FetchTensor, TensorBytes

log = logging.getLogger(__name__)
MAX_REQUEST_BYTES = 8 << 20
_MOST_PARTS = 1024
"""Of so many parts of a tensor hashes are kept, far more than ranks read; others are computed when asked for."""
_PART = "\0"
# Leaves room in a header of the default limits for what stands beside the card.
_MAX_CARD_BYTES = WireLimits().max_header_bytes - 4096


class CachedModels(Mapping[str, ServedWeights]):
    """What a worker can serve to others, by fingerprint: whatever its cache holds at that moment."""

    def __init__(self, cache: ShardCache) -> None:
        self._cache = cache

    def __getitem__(self, fingerprint: str) -> ServedWeights:
        shard = self._cache.find(fingerprint)
        if shard is None:
            raise KeyError(fingerprint)
        return ServedWeights(shard.card, CachedTensors(shard))

    def __iter__(self) -> Iterator[str]:
        return iter([shard.card.fingerprint for shard in self._cache.shards()])

    def __len__(self) -> int:
        return len(self._cache.shards())


class WeightsServer:
    """Answers for `models`, which may change while it serves. They are asked for by key, name or fingerprint."""

    def __init__(
        self,
        models: Mapping[str, ServedWeights],
        *,
        concurrent_reads: int = 4,
        pinned: PinnedHashes | None = None,
        rate: RateLimit | None = None,
        pause: Callable[[float], object] = time.sleep,
    ) -> None:
        """`rate` bounds what goes out over all links together."""
        self._rate = rate
        self._pause = pause
        self._models = models
        self._pinned = pinned
        self._recalled: set[str] = set()
        self._reads = threading.BoundedSemaphore(concurrent_reads)
        self._lock = threading.Lock()
        self._digests: dict[tuple[str, str], bytes] = {}
        self._parts: Counter[tuple[str, str]] = Counter()
        self._claimants: dict[tuple[str, str], str] = {}
        """Who said so, where a hash is no more than what a worker has found."""
        self._sent_bytes: dict[str, int] = {}

    def sent_bytes(self) -> dict[str, int]:
        """Of weights, by the node that they went to."""
        with self._lock:
            return dict(self._sent_bytes)

    def serve(self, link: Link) -> None:
        """Serve one link until it ends."""
        with link:
            try:
                while True:
                    message, _ = link.receive()
                    if isinstance(message, Goodbye):
                        return
                    reply, body = self._answer(message, link.peer)
                    link.send(reply, body)
                    if isinstance(reply, TensorBytes):
                        self._note_sent(link.peer, reply.size)
            except LinkClosedError:
                return
            except LinkError as error:
                log.info("the link for weights to %s ended: %s", link.peer, error)

    def _note_sent(self, peer: str, size_bytes: int) -> None:
        with self._lock:
            self._sent_bytes[peer] = self._sent_bytes.get(peer, 0) + size_bytes
        wait_s = 0.0 if self._rate is None else self._rate.spend(size_bytes)
        if wait_s > 0:
            self._pause(wait_s)

    def _answer(self, message: Message, peer: str) -> tuple[Message, Body]:
        if isinstance(message, Ping):
            return Pong(message.nonce, message.sent_s), ()
        if not isinstance(message, FetchModel | FetchTensor):
            raise LinkError(f"{type(message).__name__} came on a link for weights")
        try:
            served = self._find(message.model)
            if served is None:
                return _failed(message.number, f"there is no model {message.model!r} here"), ()
            if isinstance(message, FetchModel):
                return self._card(message, served), ()
            return self._tensor(message, served, peer)
        except ShardComputeError as error:
            return _failed(message.number, str(error)), ()

    def _find(self, model: str) -> ServedWeights | None:
        found = self._models.get(model)
        if found is not None:
            return found
        served = list(self._models.values())
        return next((each for each in served if model in (each.card.fingerprint, each.card.model)), None)

    def _card(self, request: FetchModel, served: ServedWeights) -> Message:
        card = encode_card(served.card)
        if len(card) > _MAX_CARD_BYTES:
            return _failed(request.number, f"the card of {request.model} has {len(card)} bytes, too many")
        return CardReply(request.number, card)

    def _tensor(self, request: FetchTensor, served: ServedWeights, peer: str) -> tuple[Message, Body]:
        entry = served.card.entries.get(request.tensor)
        if entry is None:
            return _failed(request.number, f"{request.model} has no tensor {request.tensor!r}"), ()
        if request.length > MAX_REQUEST_BYTES:
            reason = f"{request.length} bytes at once are more than {MAX_REQUEST_BYTES}"
            return _failed(request.number, reason), ()
        stop = request.offset + (request.length or request.hashed)
        if stop > entry.size_bytes:
            reason = f"bytes {request.offset} to {stop} of {request.tensor!r} do not exist: it has {entry.size_bytes}"
            return _failed(request.number, reason), ()
        if request.length == 0:
            return TensorBytes(request.number, 0, self._agreed_digest(served, request, peer)), ()
        with self._reads:
            content = served.tensors.read_bytes(request.tensor, request.offset, request.length)
        return TensorBytes(request.number, len(content)), (content,)

    def _agreed_digest(self, served: ServedWeights, request: FetchTensor, peer: str) -> bytes:
        """The hash of a tensor, or of a part. What workers read at the model's source is not read here: the first who
        has read it says what its hash is, and only where another has found something else it is looked up."""
        source, tensor, span = served.card.source, request.tensor, _hashed_span(served, request)
        key = (served.card.fingerprint, _label(served, tensor, span))
        if source is None or tensor not in source.places:
            return self._digest(served, key, tensor, span)
        with self._lock:
            self._recall(served.card.fingerprint)
            known = self._digests.get(key)
            if known is None and request.claim and self._may_keep(key, tensor):
                known = request.claim
                self._pin(key, known)
                self._claimants[key] = peer
            claimant = self._claimants.get(key)
        if known is None and request.claim:
            return self._hash(served, tensor, span)
        if known is None or request.claim in (b"", known) or claimant is None:
            return known or b""
        digest = self._hash(served, tensor, span)
        for node in [node for node, said in ((claimant, known), (peer, request.claim)) if said != digest]:
            log.warning("%s has read bytes of %s of %s that are not its own", node, tensor, served.card.model)
        with self._lock:
            self._pin(key, digest)
            self._claimants.pop(key, None)
        return digest

    def _recall(self, fingerprint: str) -> None:
        """What was pinned before the last restart. Needs the lock."""
        if self._pinned is None or fingerprint in self._recalled:
            return
        self._recalled.add(fingerprint)
        for label, digest in self._pinned.read(fingerprint).items():
            self._digests[fingerprint, label] = digest
            self._claimants[fingerprint, label] = "an earlier reader"
            self._may_keep((fingerprint, label), label.partition(_PART)[0])

    def _pin(self, key: tuple[str, str], digest: bytes) -> None:
        """Needs the lock."""
        self._digests[key] = digest
        if self._pinned is not None:
            self._pinned.add(*key, digest)

    def _may_keep(self, key: tuple[str, str], tensor: str) -> bool:
        """Whether one more hash is kept; counts it. Needs the lock."""
        if key[1] == tensor:
            return True
        self._parts[key[0], tensor] += 1
        return self._parts[key[0], tensor] <= _MOST_PARTS

    def _digest(self, served: ServedWeights, key: tuple[str, str], tensor: str, span: Span) -> bytes:
        """The SHA-256 of a tensor, or of a part of it."""
        with self._lock:
            known = self._digests.get(key)
        if known is not None:
            return known
        digest = self._hash(served, tensor, span)
        with self._lock:
            if key not in self._digests and self._may_keep(key, tensor):
                self._digests[key] = digest
        return digest

    def _hash(self, served: ServedWeights, tensor: str, span: Span) -> bytes:
        digest = hashlib.sha256()
        for start in range(*span, MAX_REQUEST_BYTES):
            with self._reads:
                part = served.tensors.read_bytes(tensor, start, min(MAX_REQUEST_BYTES, span[1] - start))
            digest.update(part)
        return digest.digest()


def _hashed_span(served: ServedWeights, request: FetchTensor) -> Span:
    if not request.hashed:
        return 0, served.card.entries[request.tensor].size_bytes
    return request.offset, request.offset + request.hashed


def _label(served: ServedWeights, tensor: str, span: Span) -> str:
    """Under what a hash is kept: a tensor's name, and which part of it that is."""
    is_whole = span == (0, served.card.entries[tensor].size_bytes)
    return tensor if is_whole else f"{tensor}{_PART}{span[0]}-{span[1]}"


def _failed(number: int, reason: str) -> FetchFailed:
    return FetchFailed(number, shorten(reason))
