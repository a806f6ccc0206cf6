"""KV of sessions in host memory, paged by the machine's own memory management.

Each session reserves address space for its whole context, which costs nothing until it is touched, and pays for
pages of `PAGE_TOKENS` tokens as it grows. Keys and values of a layer therefore lie in one piece
`[context, heads, entries]`, and kernels read the used prefix in place. The budget counts pages.
"""

from __future__ import annotations

import mmap
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

import numpy as np

from shardcompute.backends.executor import KvUsage, refuse_pictures
from shardcompute.backends.host.pictures import SessionPictures
from shardcompute.backends.matrix import Array, Float32
from shardcompute.core.batch import PAGE_TOKENS, Segment
from shardcompute.core.errors import CapacityError, PromptTooLongError, RowGapError, UsageError
from shardcompute.core.kv_types import KvShape, KvType, kv_token_bytes
from shardcompute.core.pictures import PictureSpan

# Python names this flag from 3.13 on; without it, reserving more than the machine's memory would be refused.
_NO_RESERVE: int = getattr(mmap, "MAP_NORESERVE", 0x4000 if sys.platform == "linux" else 0)

_LARGEST_HALF = np.float32(65504)
_SMALLEST_SCALE = np.float32(1e-30)


@dataclass(slots=True)
class PageBudget:
    """Which session holds how many tokens, and whether more fit. Knows nothing of where they lie."""

    page_bytes: int
    total_pages: int
    context_length: int
    lengths: dict[int, int] = field(default_factory=dict)
    pages: dict[int, int] = field(default_factory=dict)

    @property
    def used_pages(self) -> int:
        return sum(self.pages.values())

    def check(self, segments: Sequence[Segment]) -> None:
        """Raise unless all these segments can be taken; changes nothing."""
        needed = 0
        seen: set[int] = set()
        for segment in segments:
            if segment.session in seen:
                raise UsageError(f"session {segment.session} has two segments in one batch")
            seen.add(segment.session)
            length = self.lengths.get(segment.session, 0)
            if segment.count < 1 or not 0 <= segment.logit_rows <= segment.count:
                raise UsageError(
                    f"a segment of {segment.count} rows cannot want {segment.logit_rows} of them"
                )
            if not 0 <= segment.start <= length:
                raise RowGapError(
                    f"session {segment.session} has {length} tokens; rows at position {segment.start} leave a gap"
                )
            if segment.stop > self.context_length:
                raise PromptTooLongError(
                    f"position {segment.stop} is past the context of {self.context_length} tokens",
                    hint="shorten the prompt or start with a larger --context",
                )
            needed += max(0, count_pages(segment.stop) - self.pages.get(segment.session, 0))
        if self.used_pages + needed > self.total_pages:
            raise CapacityError(
                f"KV memory is full: {needed} more pages of {PAGE_TOKENS} tokens are needed and "
                f"{self.total_pages - self.used_pages} of {self.total_pages} are free",
                hint="wait for other sessions to end, or give more with --kv-memory",
            )

    def take(self, segment: Segment) -> None:
        """Truncate the segment's session at `start` and extend it. Only after `check`."""
        self.lengths[segment.session] = segment.stop
        self.pages[segment.session] = count_pages(segment.stop)

    def adopt(self, source: int, target: int, length: int, *, is_moved: bool) -> None:
        """Count `target` as the beginning of `source`; CapacityError, before anything changes, where that cannot be."""
        if source == target or not 0 < length <= self.lengths.get(source, 0):
            raise CapacityError(f"session {source} does not hold {length} tokens to begin another with")
        freed = self.pages.get(target, 0) + (self.pages[source] if is_moved else 0)
        if self.used_pages - freed + count_pages(length) > self.total_pages:
            raise CapacityError(f"KV memory is full: {count_pages(length)} more pages are needed")
        self.release(target)
        if is_moved:
            self.release(source)
        self.lengths[target], self.pages[target] = length, count_pages(length)

    def release(self, session: int) -> None:
        self.lengths.pop(session, None)
        self.pages.pop(session, None)

    def usage(self) -> KvUsage:
        free = self.total_pages - self.used_pages
        return KvUsage(
            used_bytes=self.used_pages * self.page_bytes,
            total_bytes=self.total_pages * self.page_bytes,
            free_tokens=free * PAGE_TOKENS,
            sessions=len(self.lengths),
        )


def count_pages(tokens: int) -> int:
    return -(-tokens // PAGE_TOKENS)


class SessionKv(Protocol):
    """Where a backend keeps keys and values."""

    budget: PageBudget

    def adopt(self, source: int, target: int, length: int, *, is_moved: bool) -> None: ...

    def release(self, session: int) -> None: ...


class RowKv(SessionKv, Protocol):
    """Where rows can be read and written as they are kept: those of one token in one layer have `row_bytes`."""

    @property
    def format(self) -> str: ...

    @property
    def layers(self) -> int: ...

    @property
    def row_bytes(self) -> int: ...

    def take(self, segments: Sequence[Segment]) -> object: ...

    def read_rows(self, session: int, layers: range, rows: range) -> memoryview: ...

    def write_rows(self, session: int, layers: range, rows: range, content: memoryview) -> None: ...


Kv = TypeVar("Kv", bound=SessionKv)
Rows = TypeVar("Rows", bound=RowKv)


class KvSessions(Generic[Kv]):
    """What an `Executor` does with sessions that concerns their KV alone."""

    _kv: Kv
    _pictures: SessionPictures | None = None
    """None: this backend takes none."""

    def adopt(self, source: int, target: int, length: int, *, is_moved: bool = False) -> None:
        self._kv.adopt(source, target, length, is_moved=is_moved)
        if self._pictures is not None:
            self._pictures.forget(target)
            if is_moved:
                self._pictures.forget(source)

    def open_pictures(
        self, session: int, spans: Sequence[PictureSpan], patches: Sequence[bytes] | None
    ) -> None:
        if self._pictures is None:
            raise refuse_pictures("this backend")
        self._pictures.open(session, spans, patches)

    def close_session(self, session: int) -> None:
        self._kv.release(session)
        if self._pictures is not None:
            self._pictures.forget(session)

    def session_length(self, session: int) -> int:
        return self._kv.budget.lengths.get(session, 0)

    def sessions(self) -> list[int]:
        return list(self._kv.budget.lengths)

    def kv_usage(self) -> KvUsage:
        return self._kv.budget.usage()


class MovableSessions(KvSessions[Rows]):
    """`backends.executor.MovableKv` of an executor whose KV can be read and written by rows."""

    @property
    def kv_format(self) -> str:
        return self._kv.format

    @property
    def kv_layers(self) -> int:
        return self._kv.layers

    def kv_bytes(self, layers: int, rows: int) -> int:
        return layers * rows * self._kv.row_bytes

    def read_kv(self, session: int, layers: range, rows: range) -> memoryview:
        self._check_range(layers, rows)
        if rows.stop > self.session_length(session):
            raise RowGapError(f"session {session} has no rows up to {rows.stop}")
        return self._kv.read_rows(session, layers, rows)

    def write_kv(self, session: int, layers: range, rows: range, content: memoryview) -> None:
        self._check_range(layers, rows)
        size = self.kv_bytes(len(layers), len(rows))
        if content.nbytes != size:
            raise UsageError(
                f"{len(rows)} rows of {len(layers)} layers have {size} bytes, not {content.nbytes}"
            )
        length = self.session_length(session)
        if rows.stop > length:
            self._kv.take([Segment(session, length, rows.stop - length)])
        self._kv.write_rows(session, layers, rows, content)

    def cut_session(self, session: int, length: int) -> None:
        # Writing at `start` truncates: the last row that stays counts as written.
        self._kv.take([Segment(session, length - 1, 1)])

    def _check_range(self, layers: range, rows: range) -> None:
        if not 0 <= layers.start < layers.stop <= self._kv.layers or not 0 <= rows.start < rows.stop:
            raise UsageError(f"there are no rows {rows} of layers {layers} in {self._kv.layers} layers")


@dataclass(frozen=True, slots=True)
class KvRows:
    """Keys or values `[rows, groups, entries]` as they are kept (`KvShape.grouped`, usually heads): rounded, in
    `int8` with a scale for each group."""

    values: Array
    scales: Float32 | None = None


class HostKv:
    """Keys and values of all sessions of one slice. What is read of them is what was rounded when it was written."""

    def __init__(
        self,
        layers: int,
        shape: KvShape,
        *,
        context_length: int,
        budget_bytes: int,
        kv_type: KvType = "float32",
    ) -> None:
        self.kv_type = kv_type
        positions = count_pages(context_length) * PAGE_TOKENS
        self._shape = (layers, shape.parts, positions, *shape.grouped)
        self.row_bytes = kv_token_bytes(kv_type, shape)
        page_bytes = max(1, layers * self.row_bytes * PAGE_TOKENS)  # a slice without layers keeps nothing
        self.budget = PageBudget(page_bytes, max(budget_bytes // page_bytes, 0), context_length)
        if self.budget.total_pages < 1:
            raise CapacityError(
                f"{budget_bytes} bytes of KV memory do not hold one page ({page_bytes} bytes)",
                hint="give more with --kv-memory",
            )
        self._arrays: dict[int, Array] = {}
        self._scales: dict[int, Float32] = {}

    def __getitem__(self, session: int) -> Array:
        """`[layer, key or value, position, group, entry]` of a session; positions past its length are undefined."""
        return self._arrays[session]

    def scales(self, session: int) -> Float32 | None:
        """`[layer, key or value, position, group]` with which codes of `int8` are multiplied."""
        return self._scales.get(session)

    def read(self, session: int, layer: int, stop: int) -> Float32:
        """Keys and values `[parts, positions, group, entry]` up to `stop`, as numbers."""
        values: Float32 = self._arrays[session][layer, :, :stop].astype(np.float32)
        scales = self._scales.get(session)
        return values if scales is None else values * scales[layer, :, :stop, :, None]

    def take(self, segments: Sequence[Segment]) -> None:
        """Make room for a batch, all of it or none."""
        self.budget.check(segments)
        new = [segment.session for segment in segments if segment.session not in self._arrays]
        rooms = {session: self._reserve() for session in new}
        for session, (values, scales) in rooms.items():
            self._keep(session, values, scales)
        for segment in segments:
            self.budget.take(segment)

    def adopt(self, source: int, target: int, length: int, *, is_moved: bool) -> None:
        """See `Executor.adopt`."""
        self.budget.adopt(source, target, length, is_moved=is_moved)
        if is_moved:
            self._keep(target, self._arrays.pop(source), self._scales.pop(source, None))
            return
        values, scales = self._reserve()
        values[:, :, :length] = self._arrays[source][:, :, :length]
        if scales is not None:
            scales[:, :, :length] = self._scales[source][:, :, :length]
        self._keep(target, values, scales)

    def round(self, rows: Float32) -> KvRows:
        """Rows of keys or values `[rows, groups, entries]` as they will be kept."""
        if self.kv_type == "float16":
            return KvRows(np.clip(rows, -_LARGEST_HALF, _LARGEST_HALF).astype(np.float16))
        if self.kv_type == "int8":
            scales: Float32 = np.abs(rows).max(axis=-1) / np.float32(127)
            steps = np.maximum(scales, _SMALLEST_SCALE)[..., None]
            return KvRows(np.rint(rows / steps).astype(np.int8), scales)
        return KvRows(rows)

    def write(self, segment: Segment, layer: int, keys: KvRows, values: KvRows | None, row: int = 0) -> None:
        """The segment's rows, which begin at `row` of what was rounded. No values where keys are both."""
        room, scales = self._arrays[segment.session], self._scales.get(segment.session)
        rows = slice(row, row + segment.count)
        for part, rounded in enumerate((keys,) if values is None else (keys, values)):
            room[layer, part, segment.start : segment.stop] = rounded.values[rows]
            if scales is not None and rounded.scales is not None:
                scales[layer, part, segment.start : segment.stop] = rounded.scales[rows]

    @property
    def format(self) -> str:
        parts, groups, entries = self._shape[1], *self._shape[3:]
        return f"host {self.kv_type} {parts}x{groups}x{entries}"

    @property
    def layers(self) -> int:
        return self._shape[0]

    def read_rows(self, session: int, layers: range, rows: range) -> memoryview:
        """`[layer, key or value, row, …]` of these, values before scales."""
        here = (slice(layers.start, layers.stop), slice(None), slice(rows.start, rows.stop))
        content = self._arrays[session][here].tobytes()
        scales = self._scales.get(session)
        return memoryview(content if scales is None else content + scales[here].tobytes())

    def write_rows(self, session: int, layers: range, rows: range, content: memoryview) -> None:
        here = (slice(layers.start, layers.stop), slice(None), slice(rows.start, rows.stop))
        room, scales = self._arrays[session][here], self._scales.get(session)
        room[...] = np.frombuffer(content, room.dtype, room.size).reshape(room.shape)
        if scales is not None:
            kept = np.frombuffer(content, np.float32, offset=room.nbytes)
            scales[here] = kept.reshape(room.shape[:-1])

    def release(self, session: int) -> None:
        self.budget.release(session)
        self._arrays.pop(session, None)
        self._scales.pop(session, None)

    def _reserve(self) -> tuple[Array, Float32 | None]:
        values = _reserve(self._shape, np.dtype(self.kv_type))
        scales = _reserve(self._shape[:-1], np.dtype(np.float32)) if self.kv_type == "int8" else None
        return values, scales

    def _keep(self, session: int, values: Array, scales: Float32 | None) -> None:
        self._arrays[session] = values
        if scales is not None:
            self._scales[session] = scales


def _reserve(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """Zeroed address space; memory is taken page by page as it is written."""
    size = dtype.itemsize * int(np.prod(shape))
    if size == 0:
        return np.zeros(shape, dtype=dtype)
    try:
        if sys.platform != "win32":
            buffer = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE)
        else:
            buffer = mmap.mmap(-1, size)
    except (OSError, OverflowError) as error:
        raise CapacityError(
            f"the system has no {size} bytes of address space for one more session: {error}",
            hint="start with a smaller --context",
        ) from error
    return np.frombuffer(buffer, dtype=dtype).reshape(shape)
