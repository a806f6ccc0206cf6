"""Share pair: two machines that multiply the halves of what a client has split, each checked, neither of them knowing.

What a machine sees is uniform, whatever the client computes. It does see when rows come, how many, and for which map.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from shardcompute.core.closing import Closing
from shardcompute.core.errors import BackendError, LinkError, UsageError, WrongProductError
from shardcompute.node.rpc.commands import Peer
from shardcompute.trust.shares.fixed_point import Ring, RingMatrix
from shardcompute.trust.shares.freivalds import ProductCheck, make_check
from shardcompute.trust.shares.ring import join, split
from shardcompute.wire import Link, Refused, ShareOpen, ShareOpened, ShareProducts, ShareRows
from shardcompute.wire.messages import MOST_SHARE_BYTES, SHARE_BYTES

_OPEN_S = 600.0
_ANSWER_S = 120.0
Answer = TypeVar("Answer", ShareOpened, ShareProducts)


@dataclass(frozen=True, slots=True)
class SharedLayers:
    """What of which model is computed on shares, and who gives the weights of it."""

    model: str
    origin: Peer
    start: int
    stop: int
    has_head: bool = False


@dataclass(slots=True)
class ShareTraffic:
    """What went over the lines to both machines, and how many products were asked for."""

    products: int = 0
    sent_bytes: int = 0
    received_bytes: int = 0


class SharePair(Closing):
    """A `runtime.shared_maps.ShareMultiplier` over two links. One caller at a time."""

    def __init__(self, dial: Callable[[Peer], Link], machines: Sequence[Peer], layers: SharedLayers) -> None:
        """Raises where one of them cannot be reached, has no room, or they have different weights."""
        if len(machines) != 2 or machines[0].node == machines[1].node:
            raise UsageError("shares need two machines", hint="name two different ones")
        self.traffic = ShareTraffic()
        self._links: list[Link] = []
        self._checks: list[ProductCheck] = []
        self._number = 0
        with contextlib.ExitStack() as on_error:
            on_error.callback(self.close)
            self._links += [dial(machine) for machine in machines]
            order = ShareOpen(
                layers.model,
                layers.origin.node,
                layers.origin.url,
                layers.start,
                layers.stop,
                layers.has_head,
            )
            for link in self._links:
                link.send(order)
            opened = [self._receive(link, ShareOpened, _OPEN_S)[0].digests for link in self._links]
            if opened[0] != opened[1]:
                raise BackendError(
                    f"{self._links[0].peer} and {self._links[1].peer} have different weights of {layers.model}",
                    hint="run one release on both of them",
                )
            self._digests = opened[0]
            on_error.pop_all()

    @property
    def machines(self) -> tuple[str, ...]:
        return tuple(link.peer for link in self._links)

    @property
    def map_count(self) -> int:
        return len(self._digests)

    def expect(self, number: int, matrix: RingMatrix) -> None:
        if number != len(self._checks):
            raise UsageError(f"map {number} was loaded where {len(self._checks)} comes next")
        if matrix.digest() != self._digests[number]:
            raise BackendError(
                "the machines have other weights than this one",
                hint="open the model here that the cluster serves, in the same --weights form",
            )
        self._checks.append(make_check(matrix))

    def multiply(self, number: int, rows: Ring) -> Ring:
        check = self._checks[number]
        widest = max(rows.shape[1], len(check.bits))
        most = max(1, MOST_SHARE_BYTES // (SHARE_BYTES * widest))
        parts = [self._multiply_few(number, check, rows[at : at + most]) for at in range(0, len(rows), most)]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def close(self) -> None:
        for link in self._links:
            with contextlib.suppress(LinkError):
                link.close()

    def _multiply_few(self, number: int, check: ProductCheck, rows: Ring) -> Ring:
        halves = split(np.ascontiguousarray(rows))
        self._number += 1
        asked = ShareRows(self._number, number, *rows.shape)
        for link, half in zip(self._links, halves, strict=True):
            link.send(asked, [half.astype("<u8", copy=False).data.cast("B")])
        products = []
        for link in self._links:
            told, body = self._receive(link, ShareProducts, _ANSWER_S)
            if told.number != self._number or (told.rows, told.width) != (len(rows), len(check.bits)):
                raise self._wrong(link, "it answered with products of another shape")
            products.append(np.frombuffer(body, dtype="<u8").reshape(told.rows, told.width))
        for link, half, product in zip(self._links, halves, products, strict=True):
            if not check.accepts(half, product):
                raise self._wrong(link, "its products are not those of the rows that it was sent")
        self.traffic.products += 1
        self.traffic.sent_bytes += 2 * rows.nbytes
        self.traffic.received_bytes += sum(each.nbytes for each in products)
        return join(products[0], products[1])

    def _wrong(self, link: Link, why: str) -> WrongProductError:
        self.close()
        return WrongProductError(
            f"{link.peer} computed wrongly on shares: {why}",
            hint=f"nothing of it was used; ask other machines, and see to {link.peer}",
        )

    def _receive(self, link: Link, kind: type[Answer], patience_s: float) -> tuple[Answer, memoryview]:
        try:
            message, body = link.receive(patience_s)
        except TimeoutError:
            raise LinkError(
                f"{link.peer} has not answered for {patience_s:g} s", hint="see `shardcompute status`"
            ) from None
        if isinstance(message, Refused):
            raise BackendError(f"{link.peer} does not compute on shares: {message.reason}")
        if not isinstance(message, kind):
            raise LinkError(f"{link.peer} sent {type(message).__name__} where shares were expected")
        return message, body
