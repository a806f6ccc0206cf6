"""Process groups: what ranks that compute one thing together say to each other.

A group is one rank's view of it. All ranks call the same collectives in the same order, from one thread at a time;
each call is numbered, and whoever is at another call, type or shape than its peers is told so instead of being given
wrong numbers. Sums are made in one fixed order (`algorithms.order`): every rank has the same bits, whichever algorithm
carried them, however long the array is that a number stands in.

Arrays are numpy's, of the types in `collectives.elements`; `uint16` holds bfloat16. What goes in is left unchanged,
what comes out is the caller's own.

A `CollectiveError` ends the world of the group: this rank tells the others, every later call raises at once, and the
ranks that are left form a new world under the next epoch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, Self, TypeAlias

import numpy as np
import numpy.typing as npt

from shardcompute.core.errors import UsageError

Array: TypeAlias = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class GroupStats:
    """What a rank has moved in a group so far: bytes of arrays, without the heads of frames. `calls` by operation;
    `busy_s` is time spent inside of them, waiting for others included."""

    bytes_sent: int = 0
    bytes_received: int = 0
    frames_sent: int = 0
    calls: Mapping[str, int] = field(default_factory=dict)
    busy_s: float = 0.0


class Group(Protocol):
    @property
    def rank(self) -> int:
        """This rank's place in the group, from 0."""

    @property
    def size(self) -> int: ...

    @property
    def epoch(self) -> int:
        """Which forming of the world this is; frames of earlier ones are refused."""

    @property
    def stats(self) -> GroupStats: ...

    def all_reduce(self, array: Array, out: Array | None = None) -> Array:
        """The sum over all ranks, for all; `array` has one shape and type everywhere. Written to `out` where given,
        which may be `array` itself."""

    def reduce_scatter(self, array: Array, counts: Sequence[int] | None = None) -> Array:
        """The rows of the sum that are this rank's: `counts` of the first axis for each rank, even shares (the first
        ranks have one more) unless given."""

    def all_gather(self, array: Array) -> list[Array]:
        """The arrays of all ranks by rank, for all. Shapes may differ, the type may not."""

    def gather_columns(self, array: Array, widths: Sequence[int], out: Array | None = None) -> Array:
        """What all ranks have, side by side along the last axis, for all: `widths` of it by rank, which all know. An
        all-gather whose shapes need not be said, so that nothing is copied twice. Written to `out` where given."""

    def broadcast(self, array: Array | None, root: int = 0, timeout_s: float | None = None) -> Array:
        """The root's array, for all; the others' `array` is not looked at. They wait `timeout_s` for it, where given,
        instead of the time that collectives have."""

    def barrier(self) -> None:
        """Return once every rank has come here."""

    def send(self, array: Array, to: int) -> None:
        """To one rank, which `receive`s it."""

    def receive(self, source: int, timeout_s: float | None = None) -> Array:
        """What a rank has sent; `timeout_s` as with `broadcast`."""

    def split(self, ranks: Sequence[int]) -> Self:
        """The group of some ranks of this one, in the order given, of which this is one. Nothing is sent: each of
        them calls it, the others need not. Groups of one world are used from one thread."""

    def abort(self, reason: str) -> None:
        """End the world of this group and tell the others why."""

    def close(self) -> None:
        """Free what the world holds, for all groups of this rank; others that wait for it are told that it left. From
        any thread: a call under way fails."""


def even_counts(count: int, shares: int) -> list[int]:
    """`count` things in as even shares as can be; the first have one more."""
    least, more = divmod(count, shares)
    return [least + (index < more) for index in range(shares)]


def columns_space(array: Array, widths: Sequence[int], rank: int, out: Array | None) -> Array:
    """Where `gather_columns` writes. `UsageError` where a rank's array or `out` is not as wide as `widths` say."""
    if array.ndim == 0 or len(widths) <= rank or array.shape[-1] != widths[rank]:
        raise UsageError(
            f"rank {rank} has an array of shape {list(array.shape)} where widths are {list(widths)}",
            hint="give the width of every rank's array, in the order of ranks",
        )
    shape = (*array.shape[:-1], sum(widths))
    if out is None:
        return np.empty(shape, dtype=array.dtype)
    if out.shape != shape or out.dtype != array.dtype or not out.flags.c_contiguous:
        raise UsageError(
            f"{array.dtype}{list(shape)} cannot be written to {out.dtype}{list(out.shape)}",
            hint="give `out` the shape and type of what is gathered, in one run of memory",
        )
    return out


def as_contiguous(array: Array) -> Array:
    """The array as one run of memory, itself if it is one."""
    return array if array.flags.c_contiguous else np.ascontiguousarray(array)
