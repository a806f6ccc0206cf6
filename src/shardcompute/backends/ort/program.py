"""A shard as a straight list of steps over shared buffers.

Graphs hold what works row by row; attention, experts, exchanges between ranks and the choice of rows stand between
them. A value that crosses from one step to a later one has a buffer `[max_rows, width]`; buffers are reused once a
value is dead.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import onnxruntime

from shardcompute.backends.kv import HostKv, KvRows
from shardcompute.backends.matrix import Array, Float32
from shardcompute.backends.ops import RankGroup
from shardcompute.backends.ort.attention import AttentionKernel, KeyRange
from shardcompute.backends.ort.buffers import reserve_rows
from shardcompute.core.batch import Segment, count_rows, logit_row_indices

_KEPT_BINDINGS = 32
# A graph's scratch memory grows with its rows; more at once are hardly faster, and come out with the same bits.
_GRAPH_ROWS = 128


@dataclass(slots=True, eq=False)
class Value:
    """An activation `[rows, width]` that some step makes and later steps use."""

    name: str
    width: int
    maker: object
    is_narrow: bool = False
    """Behind the choice of logit rows: few rows."""
    buffer: Float32 = field(default_factory=lambda: np.empty((0, 0), dtype=np.float32))


@dataclass(slots=True)
class Run:
    """One step of the program under way: the batch, its row count, and each attention kernel's key ranges."""

    segments: Sequence[Segment]
    rows: int
    kv: HostKv
    ranges: dict[AttentionKernel, list[list[tuple[int, int, KeyRange]]]] = field(default_factory=dict)
    ends: Sequence[Array | None] = ()
    """Where what each row of a segment sees ends (`SessionPictures.ends`); empty: behind itself."""
    windows: Sequence[tuple[int, int]] = ()
    """Blocks of patches, while a picture is encoded."""

    @property
    def own_rows(self) -> int:
        """Rows that somebody waits for, up to the choice of logit rows: without those that only fill a step up."""
        return min(self.rows, count_rows(self.segments)) if self.segments else self.rows


class ProgramStep(Protocol):
    def inputs(self) -> Iterable[Value]: ...

    def outputs(self) -> Iterable[Value]: ...

    def run(self, run: Run) -> None: ...


@dataclass(slots=True, eq=False)
class Graph:
    """A row-wise graph. `tables` are inputs that are the same in every step, bound where they lie."""

    session: onnxruntime.InferenceSession
    takes: list[Value]
    makes: list[Value]
    input_names: list[str]
    tables: dict[str, Array]
    row_numbers: dict[str, Array]
    """Inputs of whole numbers `[1, rows]` that the executor fills: positions, adapters."""
    forms: frozenset[str]
    bindings: dict[tuple[int, int], onnxruntime.IOBinding] = field(default_factory=dict)

    def inputs(self) -> Iterable[Value]:
        return self.takes

    def outputs(self) -> Iterable[Value]:
        return self.makes

    def run(self, run: Run) -> None:
        for first in range(0, run.rows, _GRAPH_ROWS):
            place = (first, min(_GRAPH_ROWS, run.rows - first))
            binding = self.bindings.get(place)
            if binding is None:
                if len(self.bindings) >= _KEPT_BINDINGS:
                    self.bindings.clear()
                binding = self.bindings[place] = self._bind(*place)
            self.session.run_with_iobinding(binding)

    def forget_bindings(self, most_rows: int) -> None:
        """Those of more rows than these, which hardly come again in the same number."""
        for place in [each for each in self.bindings if sum(each) > most_rows]:
            del self.bindings[place]

    def _bind(self, first: int, rows: int) -> onnxruntime.IOBinding:
        binding = self.session.io_binding()
        for name, value in zip(self.input_names, self.takes, strict=True):
            place = value.buffer[first:].ctypes.data
            binding.bind_input(name, "cpu", 0, np.float32, (1, rows, value.width), place)
        for value in self.makes:
            place = value.buffer[first:].ctypes.data
            binding.bind_output(value.name, "cpu", 0, np.float32, (1, rows, value.width), place)
        for name, table in self.tables.items():
            binding.bind_input(name, "cpu", 0, np.float32, table.shape, table.ctypes.data)
        for name, numbers in self.row_numbers.items():
            binding.bind_input(name, "cpu", 0, np.int64, (1, rows), numbers[0, first:].ctypes.data)
        return binding


@dataclass(slots=True, eq=False)
class Attend:
    """Appends keys and values to the sessions' KV and attends."""

    kernel: AttentionKernel
    layer: int
    q: Value
    k: Value
    v: Value | None
    out: Value
    kv_shape: tuple[int, int]

    def inputs(self) -> Iterable[Value]:
        return (self.q, self.k) if self.v is None else (self.q, self.k, self.v)

    def outputs(self) -> Iterable[Value]:
        return (self.out,)

    def run(self, run: Run) -> None:
        if self.kernel not in run.ranges:
            ends = run.ends or [None] * len(run.segments)
            run.ranges[self.kernel] = list(map(self.kernel.ranges, run.segments, ends))
        kv, layer, q, out = run.kv, self.layer, self.q.buffer, self.out.buffer
        shape = (-1, *self.kv_shape)
        rows = count_rows(run.segments)
        keys = kv.round(self.k.buffer[:rows].reshape(shape))
        values = None if self.v is None else kv.round(self.v.buffer[:rows].reshape(shape))
        row = 0
        for segment, groups in zip(run.segments, run.ranges[self.kernel], strict=True):
            session = segment.session
            kv.write(segment, layer, keys, values, row)
            scales = kv.scales(session)
            room = KvRows(kv[session][layer], None if scales is None else scales[layer])
            for first, count, seen in groups:
                self.kernel.run(session, layer, room, q, out, row + first, count, seen)
            row += segment.count


@dataclass(frozen=True, slots=True)
class RowPadding:
    """To how many rows graphs are padded for rows to have the same bits in any number: some kernels treat a row alone,
    or an odd one, in another way."""

    least: int = 1
    multiple: int = 1

    def padded(self, rows: int) -> int:
        """Also of the rows that are left where a graph runs `_GRAPH_ROWS` at a time."""
        left = rows % _GRAPH_ROWS
        return rows - left + max(self.least, -(-left // self.multiple) * self.multiple) if left else rows

    def joined(self, other: RowPadding) -> RowPadding:
        """What suits both; the numbers are powers of two."""
        return RowPadding(max(self.least, other.least), max(self.multiple, other.multiple))


@dataclass(slots=True, eq=False)
class TakeWanted:
    """Keeps only the rows whose logits are wanted; the steps behind it see fewer rows."""

    x: Value
    out: Value
    padding: RowPadding = field(default_factory=RowPadding)

    def inputs(self) -> Iterable[Value]:
        return (self.x,)

    def outputs(self) -> Iterable[Value]:
        return (self.out,)

    def run(self, run: Run) -> None:
        logit_rows = logit_row_indices(run.segments)
        self.out.buffer[: len(logit_rows)] = self.x.buffer[logit_rows]
        run.rows = self.padding.padded(len(logit_rows))


@dataclass(slots=True, eq=False)
class RankExchange:
    """Puts together what all ranks have of a value: its sum, or their parts side by side. Of the batch's own rows:
    ranks may pad their steps differently."""

    x: Value
    out: Value
    group: RankGroup
    widths: Sequence[int] | None = None
    """Of all ranks' parts; None where they are added up."""

    def inputs(self) -> Iterable[Value]:
        return (self.x,)

    def outputs(self) -> Iterable[Value]:
        return (self.out,)

    def run(self, run: Run) -> None:
        segments = run.segments
        rows = sum(each.logit_rows for each in segments) if self.x.is_narrow else count_rows(segments)
        own = self.x.buffer[:rows]
        if self.widths is None:
            self.group.all_reduce(own, self.out.buffer[:rows])
        else:
            self.group.gather_columns(own, self.widths, self.out.buffer[:rows])


def assign_buffers(
    steps: Sequence[ProgramStep], kept: Sequence[Value], max_rows: int, narrow_rows: int
) -> None:
    """Give every value a buffer, reusing those of dead values. `kept` never die."""
    last_use: dict[int, int] = {}
    for index, step in enumerate(steps):
        for value in (*step.inputs(), *step.outputs()):
            last_use[id(value)] = index
    immortal = {id(value) for value in kept}
    free: dict[tuple[int, bool], list[Float32]] = {}

    def allocate(value: Value) -> Float32:
        rows = narrow_rows if value.is_narrow else max_rows
        return reserve_rows(rows, value.width)

    for value in kept:
        value.buffer = allocate(value)
    for index, step in enumerate(steps):
        for value in step.outputs():
            if id(value) in immortal:
                continue
            pool = free.setdefault((value.width, value.is_narrow), [])
            value.buffer = pool.pop() if pool else allocate(value)
        for value in {id(v): v for v in (*step.inputs(), *step.outputs())}.values():
            if last_use[id(value)] == index and id(value) not in immortal:
                free.setdefault((value.width, value.is_narrow), []).append(value.buffer)
