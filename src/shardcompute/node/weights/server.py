"""Serves weights over links of role "weights": a coordinator its models, a worker what it has fetched.

One thread per link answers requests one after the other; a client keeps several under way. Nothing is believed:
offsets are checked against the card, a request may ask for 8 MiB at most, and whatever cannot be had is answered
by `FetchFailed`. A request for no bytes of a tensor asks for its hash, which is computed once.
"""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping

from shardcompute.core.errors import LinkClosedError, LinkError, ShardComputeError
from shardcompute.core.fields import shorten
from shardcompute.node.weights.pinned_hashes import PinnedHashes
from shardcompute.weights.card import encode_card
from shardcompute.weights.served import ServedWeights
from shardcompute.weights.shard_cache import CachedTensors, ShardCache
from shardcompute.weights.sources.rate import RateLimit
from shardcompute.wire import Body, Goodbye, Link, Message, Ping, Pong, WireLimits
from shardcompute.wire.control import CardReply, FetchFailed, FetchModel, FetchTensor, TensorBytes

log = logging.getLogger(__name__)
MAX_REQUEST_BYTES = 8 << 20
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
        if request.offset + request.length > entry.size_bytes:
            reason = (
                f"bytes {request.offset} to {request.offset + request.length} of {request.tensor!r} do not "
                f"exist: it has {entry.size_bytes}"
            )
            return _failed(request.number, reason), ()
        if request.length == 0:
            return TensorBytes(request.number, 0, self._agreed_digest(served, request, peer)), ()
        with self._reads:
            content = served.tensors.read_bytes(request.tensor, request.offset, request.length)
        with self._lock:
            digest = self._digests.get((served.card.fingerprint, request.tensor), b"")
        return TensorBytes(request.number, len(content), digest), (content,)

    def _agreed_digest(self, served: ServedWeights, request: FetchTensor, peer: str) -> bytes:
        """The hash of a tensor. What workers read at the model's source is not read here: the first who has read it
        says what its hash is, and only where another has found something else it is looked up."""
        source, tensor = served.card.source, request.tensor
        if source is None or tensor not in source.places:
            return self._digest(served, tensor)
        key = (served.card.fingerprint, tensor)
        with self._lock:
            self._recall(served.card.fingerprint)
            known = self._digests.get(key)
            if known is None and request.claim:
                known = request.claim
                self._pin(key, known)
                self._claimants[key] = peer
            claimant = self._claimants.get(key)
        if known is None or request.claim in (b"", known) or claimant is None:
            return known or b""
        digest = self._hash(served, tensor)
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
        for tensor, digest in self._pinned.read(fingerprint).items():
            self._digests[fingerprint, tensor] = digest
            self._claimants[fingerprint, tensor] = "an earlier reader"

    def _pin(self, key: tuple[str, str], digest: bytes) -> None:
        """Needs the lock."""
        self._digests[key] = digest
        if self._pinned is not None:
            self._pinned.add(*key, digest)

    def _digest(self, served: ServedWeights, tensor: str) -> bytes:
        """The SHA-256 of a whole tensor."""
        key = (served.card.fingerprint, tensor)
        with self._lock:
            known = self._digests.get(key)
        if known is not None:
            return known
        digest = self._hash(served, tensor)
        with self._lock:
            return self._digests.setdefault(key, digest)

    def _hash(self, served: ServedWeights, tensor: str) -> bytes:
        size = served.card.entries[tensor].size_bytes
        digest = hashlib.sha256()
        for start in range(0, size, MAX_REQUEST_BYTES):
            with self._reads:
                part = served.tensors.read_bytes(tensor, start, min(MAX_REQUEST_BYTES, size - start))
            digest.update(part)
        return digest.digest()


def _failed(number: int, reason: str) -> FetchFailed:
    return FetchFailed(number, shorten(reason))
