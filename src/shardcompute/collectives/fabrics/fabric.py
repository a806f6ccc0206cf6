"""Fabrics: how frames of collectives get from rank to rank.

A fabric carries the frames of one world: between each two ranks in the order in which they were sent. Three of them:
threads of one process (`inproc`), any link of ours (`link_fabric`), and sockets that links have authenticated and left
to us (`socket_fabric`), which is the quick one. Algorithms know none of that: they say what a rank sends and what must
come, and `exchange` moves it all at once, so that ranks that send to each other never wait for each other's buffers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from shardcompute.collectives.elements import DTYPES
from shardcompute.collectives.fabrics.frames import (
    MOST_REASON_BYTES,
    SIGNALS,
    FrameKind,
    Head,
    Operation,
    pack_head,
    read_head,
    unpack_head,
)
from shardcompute.collectives.group import Array
from shardcompute.core.errors import LinkError
from shardcompute.core.fields import shorten


class PeerAbortedError(LinkError):
    """A rank has said that the world is over, because of `rank`; the message is its reason."""

    def __init__(self, rank: int, message: str) -> None:
        super().__init__(message)
        self.rank = rank


class PeerFailedError(LinkError):
    """What is wrong with one peer, by its rank in the world."""

    def __init__(self, peer: int, message: str, *, hint: str = "", is_late: bool = False) -> None:
        super().__init__(message, hint=hint)
        self.peer = peer
        self.is_late = is_late


@dataclass(slots=True)
class OutgoingFrame:
    """A frame to send; the elements are one run of memory, left unchanged until the exchange is over."""

    peer: int
    head: bytes
    body: memoryview


@dataclass(slots=True)
class ExpectedFrame:
    """A frame that must come from `peer`. With `body` it has exactly the head `expected`. Without, the sender says
    the shape (and the type, where `expected` names none), and `array` is made for it."""

    peer: int
    expected: bytes
    body: memoryview | None = None
    array: Array | None = None


class Fabric(Protocol):
    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    @property
    def epoch(self) -> int: ...

    def exchange(
        self, sends: Sequence[OutgoingFrame], receives: Sequence[ExpectedFrame], deadline: float
    ) -> None:
        """Send and receive all of it. `PeerFailedError` if a peer is gone, has not done its part at `deadline`
        (`time.monotonic`) or sends what it should not, `PeerAbortedError` if one has ended the world."""

    def end(self, farewell: bytes) -> None:
        """Tell all peers, without waiting for any, that the world is over; then carry nothing more."""

    def interrupt(self) -> None:
        """Wake whoever is in `exchange`, which then fails; from any thread."""

    def close(self) -> None:
        """Free what it holds. Nobody is in `exchange`."""


def farewell_frame(epoch: int, rank: int, reason: str) -> bytes:
    """What `Fabric.end` sends: which rank is to blame, and why."""
    text = reason.encode()[:MOST_REASON_BYTES]
    return pack_head(FrameKind.ABORT, Operation.FORM, 0, 0, epoch, 0, 0, rank, (), len(text)) + text


def judge_head(raw: bytes | bytearray | memoryview, receive: ExpectedFrame) -> Head | None:
    """The head of the frame that `receive` waits for; of one that ends the world; or None for a frame of an earlier
    epoch, which is to be skipped. `PeerFailedError` for everything else."""
    try:
        head = unpack_head(raw)
    except LinkError as error:
        raise PeerFailedError(receive.peer, error.message, hint=error.hint) from error
    expected = read_head(receive.expected)
    if head.epoch < expected.epoch:
        return None
    if head.epoch > expected.epoch:
        raise PeerFailedError(
            receive.peer,
            f"it has formed epoch {head.epoch}, this rank is at {expected.epoch}",
            hint="form the group again on every rank",
        )
    if head.kind == FrameKind.ABORT:
        return head
    is_free = receive.body is None and expected.operation not in SIGNALS
    is_right = (
        head.group == expected.group
        and head.rank == expected.rank
        and head.operation == expected.operation
        and head.sequence == expected.sequence
        and head.step == expected.step
        and (head.dtype == expected.dtype or (is_free and head.dtype and not expected.dtype))
        and (is_free or head.shape == expected.shape)
    )
    if not is_right:
        raise PeerFailedError(
            receive.peer,
            f"it is at {head.what} of group {head.group:08x} as rank {head.rank}, "
            f"where rank {expected.rank} of group {expected.group:08x} should be at {expected.what}",
            hint="all ranks must call the same collectives in the same order, with the same shapes",
        )
    return head


def frame_space(head: Head, receive: ExpectedFrame) -> memoryview:
    """Where the elements of a judged frame belong."""
    if receive.body is not None:
        return receive.body
    dtype = DTYPES[head.dtype] if head.dtype else np.dtype("uint8")
    receive.array = np.empty(head.shape if head.dtype else (0,), dtype=dtype)
    return bytes_of(receive.array)


def bytes_of(array: Array) -> memoryview:
    """The bytes of an array that is one run of memory."""
    return array.reshape(-1).view(np.uint8).data if array.size else memoryview(b"")


def read_reason(text: bytes | bytearray | memoryview) -> str:
    return shorten(bytes(text).decode("utf-8", "replace"), MOST_REASON_BYTES)
