"""Steps of few rows as CUDA graphs, one per bucket of rows.

A graph replays launches with the addresses they were captured with, so a bucket keeps its inputs in place: token
ids or hidden rows, and the rows' positions, owners, page tables and logit rows, packed into one upload. Rows that
only fill a bucket point at the scratch page. Steps with rows of pictures are no graphs: prompts hardly ever are.
All graphs are captured before the first step, the largest first, and share their memory: what one computes is gone
when the next is replayed.
"""

from __future__ import annotations

import gc
import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from shardcompute.backends.torch.fused import FusedOps
from shardcompute.backends.torch.kernels.launch import Places
from shardcompute.backends.torch.kv import PagedKv
from shardcompute.backends.torch.plan import SHORT_SEGMENT, StepPlan, cut_blocks
from shardcompute.backends.torch.steps import Computed
from shardcompute.core.batch import row_adapters
from shardcompute.core.phases import phase

log = logging.getLogger(__name__)
BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
_DISTINCT_ROWS = (1, 16, 24, 48, 96, 192, 320)
"""Steps that between them need all kernels, also those of steps that are too large for a graph."""
_ROWS_PER_BLOCK = 16
"""A block of a long segment has, in the mean, at least so many rows: 66 of them may touch three pages."""
Forward = Callable[[torch.Tensor, torch.Tensor | None], Computed]
"""(inputs, for each logit row the slot that keeps its token) → results"""


@dataclass(slots=True)
class _Bucket:
    rows: int
    packed: torch.Tensor
    inputs: torch.Tensor
    places: Places
    slots: torch.Tensor
    graph: torch.cuda.CUDAGraph | None = None
    output: Computed | None = None


class GraphedSteps:
    """Runs `forward`, which computes with `ops`, through graphs. `width` is the hidden width, or None for ids."""

    def __init__(
        self,
        ops: FusedOps,
        kv: PagedKv,
        forward: Forward,
        width: int | None,
        dtype: torch.dtype,
        *,
        unused_slot: int,
    ) -> None:
        self._ops = ops
        self._kv = kv
        self._forward = forward
        self._width = width
        self._dtype = dtype
        self._unused_slot = unused_slot
        self._buckets: dict[tuple[int, bool], _Bucket] = {}
        """By rows, and whether some of them may have adapters."""
        self._pool = torch.cuda.graph_pool_handle()
        self._compiling: threading.Thread | None = None
        self.held_bytes = 0
        """Device memory that the graphs, and what was set up for them, keep."""

    def capture(self, max_rows: int) -> None:
        """Capture every bucket that steps of up to `max_rows` rows may need."""
        wanted = [rows for rows in BUCKETS if rows < max_rows]
        wanted += [rows for rows in BUCKETS if rows >= max_rows][:1]
        if self._compiling is not None:
            with phase("waiting for kernels"):
                self._compiling.join()
                torch.cuda.synchronize(self._kv.pool.device)
        with phase("capturing graphs"):
            self._capture_all(wanted)

    def _capture_all(self, wanted: Sequence[int]) -> None:
        before = torch.cuda.memory_reserved(self._kv.pool.device)
        # Garbage collected meanwhile may free device memory or graphs of others, which ends a capture.
        gc.collect()
        is_collecting = gc.isenabled()
        gc.disable()
        try:
            kinds = (True, False) if self._ops.has_adapters else (False,)
            if not all(self._capture(rows, is_adapted) for rows in reversed(wanted) for is_adapted in kinds):
                self._buckets.clear()
        finally:
            if is_collecting:
                gc.enable()
        # What the first runs took beside the captures.
        torch.cuda.empty_cache()
        self.held_bytes = max(0, torch.cuda.memory_reserved(self._kv.pool.device) - before)

    def compile_ahead(self, forward: Forward, max_rows: int) -> None:
        """Begin to compile kernels, beside what goes on, by a step of a part of the network; `capture` waits for that.
        Nothing else may compute with the same Ops meanwhile."""
        torch.cuda.synchronize(self._kv.pool.device)
        self._compiling = threading.Thread(
            target=self._compile, args=(forward, max_rows), name="compile kernels", daemon=True
        )
        self._compiling.start()

    def run(self, plan: StepPlan, inputs: torch.Tensor, slots: Sequence[int]) -> Computed | None:
        """The step's results, at least for its rows, or None if it cannot be run as a graph."""
        rows = next((rows for rows in BUCKETS if rows >= plan.rows), None)
        bucket = None if rows is None else self._buckets.get((rows, plan.has_adapters))
        if bucket is None or bucket.graph is None:
            return None
        self._fill(bucket, plan, inputs, slots)
        bucket.graph.replay()
        return bucket.output

    def close(self) -> None:
        self._buckets.clear()

    def _capture(self, rows: int, is_adapted: bool) -> bool:
        bucket = self._new_bucket(rows, is_adapted)
        self._ops.place(bucket.places)
        # The first run compiles kernels and sizes workspaces, which a capture may not do.
        self._ops.has_waited = False
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._forward(bucket.inputs, bucket.slots)
        torch.cuda.current_stream().wait_stream(stream)
        if self._ops.has_waited:
            return False
        bucket.graph, output = self._record(bucket)
        bucket.output = _borrow_all(output)
        self._buckets[rows, is_adapted] = bucket
        return True

    def _record(self, bucket: _Bucket) -> tuple[torch.cuda.CUDAGraph, Computed]:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            output = self._forward(bucket.inputs, bucket.slots)
        return graph, output

    def _compile(self, forward: Forward, max_rows: int) -> None:
        device = self._kv.pool.device
        try:
            with (
                phase("compiling kernels"),
                torch.inference_mode(),
                torch.cuda.device(device),
                torch.cuda.stream(torch.cuda.Stream()),
            ):
                for rows in (rows for rows in _DISTINCT_ROWS if rows <= max_rows):
                    bucket = self._new_bucket(rows)
                    self._ops.place(bucket.places)
                    forward(bucket.inputs, bucket.slots)
                torch.cuda.current_stream().synchronize()
        except Exception:
            # What is wrong is said where kernels are first needed.
            log.debug("kernels were not compiled ahead", exc_info=True)

    def _new_bucket(self, rows: int, is_adapted: bool = False) -> _Bucket:
        device, pages = self._kv.pool.device, self._kv.table_width
        packed = torch.zeros(_packed_size(rows, pages), dtype=torch.int32, device=device)
        parts = _unpack(packed, rows, pages)
        parts["tables"].fill_(self._kv.scratch)
        parts["slots"].fill_(self._unused_slot)
        hidden = (
            None
            if self._width is None
            else torch.zeros((rows, self._width), dtype=self._dtype, device=device)
        )
        places = Places(
            parts["positions"],
            parts["turns"],
            parts["owners"],
            parts["tables"],
            parts["logit_rows"],
            short=parts.get("short"),
            blocks=parts.get("blocks"),
            adapters=parts["adapters"] if is_adapted else None,
        )
        return _Bucket(rows, packed, parts["ids"] if hidden is None else hidden, places, parts["slots"])

    def _fill(self, bucket: _Bucket, plan: StepPlan, inputs: torch.Tensor, slots: Sequence[int]) -> None:
        """Send a step's inputs to where the graph reads them, from memory that it may read later."""
        rows, pages = bucket.rows, self._kv.table_width
        host = torch.empty(_packed_size(rows, pages), dtype=torch.int32, pin_memory=True)
        packed = host.numpy()
        parts = _unpack(packed, rows, pages)
        packed[: 9 * rows] = 0
        parts["positions"][: plan.rows] = plan.positions
        parts["turns"][:, : plan.rows] = plan.positions if plan.turns is None else plan.turns
        # Padding rows own the table behind the last segment's, which names scratch pages alone.
        parts["owners"][:] = min(len(plan.segments), rows - 1)
        parts["owners"][: plan.rows] = plan.owners
        parts["logit_rows"][: len(plan.logit_rows)] = plan.logit_rows
        if bucket.places.adapters is not None:
            parts["adapters"][: plan.rows] = row_adapters(plan.segments)
        parts["slots"][: len(slots)] = slots
        parts["slots"][len(slots) :] = self._unused_slot
        parts["tables"][:] = self._kv.scratch
        parts["tables"][: len(plan.tables)] = plan.tables
        if "short" in parts:
            blocks = cut_blocks(plan)
            parts["blocks"][:] = 0
            parts["blocks"][: len(blocks)] = blocks
            parts["short"][:] = -1
            parts["short"][: plan.short_rows] = np.arange(plan.short_rows)
        is_packed = self._width is None and inputs.device.type == "cpu"
        if is_packed:
            parts["ids"][: plan.rows] = inputs.numpy()
        bucket.packed.copy_(host, non_blocking=True)
        if not is_packed:
            bucket.inputs[: plan.rows].copy_(inputs, non_blocking=True)


def _packed_size(rows: int, pages: int) -> int:
    lists = 0 if rows <= SHORT_SEGMENT else rows + 2 * (rows // _ROWS_PER_BLOCK)
    return rows * (9 + pages) + lists


def _unpack(packed: Any, rows: int, pages: int) -> dict[str, Any]:
    """Views of what is packed into one upload. Steps as short as a short segment have no lists of rows and blocks."""
    names = ("ids", "positions", "owners", "logit_rows", "slots", "adapters")
    parts = {name: packed[at * rows : (at + 1) * rows] for at, name in enumerate(names)}
    parts["turns"] = packed[6 * rows : 9 * rows].reshape(3, rows)
    end = (9 + pages) * rows
    parts["tables"] = packed[9 * rows : end].reshape(rows, pages)
    if rows > SHORT_SEGMENT:
        parts["short"] = packed[end : end + rows]
        parts["blocks"] = packed[end + rows :].reshape(-1, 2)
    return parts


@dataclass(frozen=True, slots=True)
class _DeviceMemory:
    """Memory of a tensor, known by its address alone."""

    __cuda_array_interface__: dict[str, Any]


def _borrow_all(computed: Computed) -> Computed:
    given = (computed.normed, computed.best, computed.final)
    optional = (None if each is None else _borrow(each) for each in given)
    return Computed(_borrow(computed.result), *optional)


def _borrow(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory, not kept: graphs captured later may use it too."""
    raw = tensor.contiguous().view(torch.uint8)
    if raw.data_ptr() != tensor.data_ptr():
        raise ValueError("a captured result must lie in one piece")
    interface = {"shape": tuple(raw.shape), "typestr": "|u1", "data": (raw.data_ptr(), False), "version": 2}
    borrowed = torch.as_tensor(_DeviceMemory(interface), device=tensor.device)
    return borrowed.view(tensor.dtype).view(tensor.shape)
