"""Share host of a worker: multiplies clients' shares with the linear maps of layers, without learning what they share.

A client opens layers on a link of its own, and they are gone with that link. What they take of the worker's memory is
reserved like that of layers which are served.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator
from typing import TypeVar

import numpy as np

from shardcompute.core.errors import CapacityError, LinkError, ShardComputeError, UsageError
from shardcompute.core.fields import shorten
from shardcompute.models.layout import Layout
from shardcompute.models.spec import ModelSpec, Stage
from shardcompute.node.rpc.commands import Peer
from shardcompute.node.worker.shard_loader import ShardLoader
from shardcompute.runtime.shared_maps import load_maps, refuse_sharing
from shardcompute.security.certificates import read_peer
from shardcompute.security.names import Role
from shardcompute.trust.shares.fixed_point import RingMatrix
from shardcompute.trust.shares.ring import multiply
from shardcompute.weights.served import shard_source
from shardcompute.wire import Link, Refused, ShareOpen, ShareOpened, ShareProducts, ShareRows
from shardcompute.wire.messages import MOST_SHARE_BYTES, SHARE_BYTES

log = logging.getLogger(__name__)
_MOST_CLIENTS = 4
_IDLE_S = 3600.0
"""So long a client may be silent."""
_WEIGHT_BYTES = 8
_SCRATCH_BYTES = 18 * MOST_SHARE_BYTES
"""Rows cut into limbs, their sums, and what is sent: of the largest frame."""
Asked = TypeVar("Asked", ShareOpen, ShareRows)


class ShareHost:
    """At most so many clients at a time, each with layers of its own."""

    def __init__(self, loader: ShardLoader) -> None:
        self._loader = loader
        self._multiply = multiply
        self._places = threading.BoundedSemaphore(_MOST_CLIENTS)
        self._multiplying = threading.Lock()

    def serve(self, link: Link) -> None:
        """A client's link, until it ends."""
        try:
            with self._opened(link) as maps:
                link.send(ShareOpened([each.digest() for each in maps]))
                while True:
                    self._answer(link, maps)
        except LinkError:
            raise
        except ShardComputeError as error:
            log.info("shares of %s are not computed: %s", link.peer, error)
            with contextlib.suppress(LinkError):
                link.send(Refused(shorten(str(error))))

    @contextlib.contextmanager
    def _opened(self, link: Link) -> Iterator[list[RingMatrix]]:
        order, _ = _received(link, ShareOpen)
        if Role.WORKER in read_peer(link.certificate).roles:
            raise UsageError("workers have nothing to share", hint="ask as a driver")
        if not self._places.acquire(blocking=False):
            raise CapacityError(
                f"this worker computes on shares for {_MOST_CLIENTS} clients already", hint="try again later"
            )
        try:
            with contextlib.ExitStack() as held:
                origin = Peer(order.origin_node, order.origin_url)
                with self._loader.tensors_of(origin, order.model) as (card, tensors):
                    stage = _stage_of(order, card.spec.layer_count)
                    refuse_sharing(card.spec, stage)
                    need = shared_bytes(card.spec, card.layout, stage, has_head=order.has_head)
                    what = f"computing on shares of layers {stage.start} to {stage.stop}"
                    held.enter_context(self._loader.reserved(need, what))
                    tensors.prefetch(stage, None)
                    source = shard_source(card, tensors, stage)
                    maps = list(load_maps(card.spec, stage, source, has_head=order.has_head))
                log.info("layers %d to %d of %s on shares", stage.start, stage.stop, order.model)
                yield maps
        finally:
            self._places.release()

    def _answer(self, link: Link, maps: list[RingMatrix]) -> None:
        asked, body = _received(link, ShareRows)
        if asked.map >= len(maps):
            raise UsageError(
                f"there is no map {asked.map} of {len(maps)}", hint="run one release on all nodes"
            )
        matrix = maps[asked.map]
        if asked.width != matrix.inputs:
            raise UsageError(
                f"rows of {asked.width} are none of a map with {matrix.inputs} inputs",
                hint="run one release on all nodes",
            )
        if SHARE_BYTES * asked.rows * matrix.outputs > MOST_SHARE_BYTES:
            raise UsageError(f"{asked.rows} rows are too many at once", hint="run one release on all nodes")
        rows = np.frombuffer(body, dtype="<u8").reshape(asked.rows, asked.width)
        with self._multiplying:
            products = self._multiply(rows, matrix)
        body_out = products.astype("<u8", copy=False).data.cast("B")
        link.send(ShareProducts(asked.number, asked.rows, matrix.outputs), [body_out])


def shared_bytes(spec: ModelSpec, layout: Layout, stage: Stage, *, has_head: bool) -> int:
    """What the maps of a stage take in integers, at most, and multiplying with them."""
    places = [place for layer in layout.layers[stage.start : stage.stop] for place in layer.values()]
    weights = sum(int(np.prod(place.shape)) for place in places)
    if has_head:
        weights += spec.vocab_size * spec.hidden
    return _WEIGHT_BYTES * weights + _SCRATCH_BYTES


def _stage_of(order: ShareOpen, layers: int) -> Stage:
    if not order.start < order.stop <= layers or (order.has_head and order.stop != layers):
        raise UsageError(
            f"the model has no layers {order.start} to {order.stop}", hint=f"it has {layers}, from 0 on"
        )
    return Stage(order.start, order.stop, layers)


def _received(link: Link, kind: type[Asked]) -> tuple[Asked, memoryview]:
    try:
        message, body = link.receive(_IDLE_S)
    except TimeoutError:
        raise LinkError(f"{link.peer} has shared nothing for {_IDLE_S:g} s") from None
    if not isinstance(message, kind):
        raise LinkError(f"{link.peer} sent {type(message).__name__} where shares were expected")
    return message, body
