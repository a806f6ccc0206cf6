"""Frames of collectives: a head of 64 bytes, then the elements of an array.

    offset  0  4 bytes   magic "SCc1"
            4  u8        kind: 1 elements, 2 abort
            5  u8        operation
            6  u8        element type
            7  u8        number of dimensions
            8  u32       group
           12  u32       epoch
           16  u32       sequence number of the call
           20  u16       step within the call
           22  u16       the sender's rank in the group
           24  u64       bytes that follow
           32  8 × u32   shape

All numbers are little-endian. A receiver knows what must come: it compares the head as a whole and reads it only where
that fails or the shape is the sender's to say. Nothing is allocated before its size was checked.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from math import prod

from shardcompute.collectives.elements import DTYPES
from shardcompute.core.errors import LinkError

MAGIC = b"SCc1"
_HEAD = struct.Struct("<4sBBBBIIIHHQ8I")
HEAD_BYTES = _HEAD.size
MOST_DIMENSIONS = 8
MOST_RANKS = 1 << 12
MOST_BODY_BYTES = 128 << 20
MOST_REASON_BYTES = 512
SEQUENCE_SPAN = 1 << 32
_ZEROS = (0,) * MOST_DIMENSIONS


class FrameKind(IntEnum):
    ELEMENTS = 1
    ABORT = 2


class Operation(IntEnum):
    ALL_REDUCE = 1
    REDUCE_SCATTER = 2
    ALL_GATHER = 3
    BROADCAST = 4
    BARRIER = 5
    SEND = 6
    FORM = 7


SIGNALS = (Operation.BARRIER, Operation.FORM)
"""Operations whose frames carry no elements."""


@dataclass(frozen=True, slots=True)
class Head:
    """`dtype` is the code of an element type (`collectives.elements`), 0 where there are none."""

    kind: int
    operation: int
    dtype: int
    group: int
    epoch: int
    sequence: int
    step: int
    rank: int
    shape: tuple[int, ...]
    body_bytes: int

    @property
    def what(self) -> str:
        """For people: the call, its number, and what it carries."""
        name = Operation(self.operation).name.lower()
        if not self.dtype:
            return f"{name} {self.sequence}"
        return f"{name} {self.sequence} ({DTYPES[self.dtype].name}{list(self.shape)}, step {self.step})"


def pack_head(
    kind: int,
    operation: int,
    dtype: int,
    group: int,
    epoch: int,
    sequence: int,
    step: int,
    rank: int,
    shape: Sequence[int],
    body_bytes: int,
) -> bytes:
    padded = (*shape, *_ZEROS[len(shape) :])
    return _HEAD.pack(
        MAGIC, kind, operation, dtype, len(shape), group, epoch, sequence, step, rank, body_bytes, *padded
    )


def read_head(raw: bytes | bytearray | memoryview) -> Head:
    """A head of our own making, as it is."""
    _, kind, operation, dtype, dimensions, group, epoch, sequence, step, rank, body_bytes, *shape = (
        _HEAD.unpack(raw)
    )
    return Head(
        kind, operation, dtype, group, epoch, sequence, step, rank, tuple(shape[:dimensions]), body_bytes
    )


def unpack_head(raw: bytes | bytearray | memoryview) -> Head:
    """`LinkError` unless it is a head that we could have written: known kinds and types, a size that follows from
    the shape and is within bounds."""
    magic = bytes(raw[: len(MAGIC)])
    if magic != MAGIC:
        raise LinkError(
            f"something came that is no frame of a collective (it starts with {magic!r})",
            hint="run the same release on every rank",
        )
    head = read_head(raw)
    is_known = head.kind in tuple(FrameKind) and head.operation in tuple(Operation)
    is_array = raw[7] <= MOST_DIMENSIONS and (not head.dtype or head.dtype in DTYPES)
    if not is_known or not is_array or head.rank >= MOST_RANKS:
        raise LinkError(
            "a frame of a collective came that cannot be read", hint="run the same release on every rank"
        )
    _check_size(head)
    return head


def _check_size(head: Head) -> None:
    if head.kind == FrameKind.ABORT:
        most, expected = MOST_REASON_BYTES, head.body_bytes
    else:
        expected = DTYPES[head.dtype].itemsize if head.dtype else 0
        expected *= prod(head.shape)
        most = MOST_BODY_BYTES
        if prod(count or 1 for count in head.shape) > MOST_BODY_BYTES:
            raise LinkError(f"an array of shape {list(head.shape)} is over the limit of {most} elements")
    if head.body_bytes > most:
        raise LinkError(
            f"a frame of {head.body_bytes} bytes is over the limit of {most}",
            hint="give collectives smaller arrays",
        )
    if head.body_bytes != expected:
        raise LinkError(f"a frame of {head.body_bytes} bytes came for an array of {expected}")
