"""Steps of few rows as CUDA graphs, one per bucket of rows.

A graph replays launches with the addresses they were captured with, so a bucket keeps its inputs in place: token
ids or hidden rows, and the rows' positions, owners, page tables and logit rows, packed into one upload. Rows that
only fill a bucket point at the scratch page. A bucket is captured when it is first used.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from shardcompute.backends.torch.fused import FusedOps
from shardcompute.backends.torch.kernels.launch import Places
from shardcompute.backends.torch.kv import PagedKv
from shardcompute.backends.torch.plan import StepPlan

BUCKETS = (1, 2, 4, 8, 16, 32, 64)
Forward = Callable[[torch.Tensor], torch.Tensor]


@dataclass(slots=True)
class _Bucket:
    rows: int
    packed: torch.Tensor
    inputs: torch.Tensor
    places: Places
    graph: torch.cuda.CUDAGraph | None = None
    output: torch.Tensor | None = None


class GraphedSteps:
    """Runs `forward`, which computes with `ops`, through graphs. `width` is the hidden width, or None for ids."""

    def __init__(
        self, ops: FusedOps, kv: PagedKv, forward: Forward, width: int | None, dtype: torch.dtype
    ) -> None:
        self._ops = ops
        self._kv = kv
        self._forward = forward
        self._width = width
        self._dtype = dtype
        self._buckets: dict[int, _Bucket] = {}
        self._pool = torch.cuda.graph_pool_handle()
        self._is_possible = True

    def run(self, plan: StepPlan, inputs: torch.Tensor) -> torch.Tensor | None:
        """The step's result for its rows (logit rows for logits), or None if it cannot be run as a graph."""
        rows = next((rows for rows in BUCKETS if rows >= plan.rows), None)
        if rows is None or not self._is_possible:
            return None
        bucket = self._buckets.get(rows) or self._capture(rows)
        if bucket.graph is None or bucket.output is None:
            return None
        self._fill(bucket, plan, inputs)
        bucket.graph.replay()
        return bucket.output

    def close(self) -> None:
        self._buckets.clear()

    def _capture(self, rows: int) -> _Bucket:
        bucket = self._new_bucket(rows)
        self._ops.place(bucket.places)
        # The first run compiles kernels and sizes workspaces, which a capture may not do.
        self._ops.has_waited = False
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._forward(bucket.inputs)
        torch.cuda.current_stream().wait_stream(stream)
        self._buckets[rows] = bucket
        if self._ops.has_waited:
            self._is_possible = False
            return bucket
        bucket.graph, bucket.output = self._record(bucket)
        return bucket

    def _record(self, bucket: _Bucket) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
        graph = torch.cuda.CUDAGraph()
        # Garbage collected meanwhile may free device memory or graphs of others, which ends a capture.
        gc.collect()
        is_collecting = gc.isenabled()
        gc.disable()
        try:
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                output = self._forward(bucket.inputs)
        finally:
            if is_collecting:
                gc.enable()
        return graph, output

    def _new_bucket(self, rows: int) -> _Bucket:
        device, pages = self._kv.pool.device, self._kv.table_width
        packed = torch.zeros(rows * (4 + pages), dtype=torch.int32, device=device)
        ids, positions, owners, logit_rows = packed[: 4 * rows].view(4, rows)
        tables = packed[4 * rows :].view(rows, pages)
        tables.fill_(self._kv.scratch)
        hidden = (
            None
            if self._width is None
            else torch.zeros((rows, self._width), dtype=self._dtype, device=device)
        )
        places = Places(positions, owners, tables, logit_rows)
        return _Bucket(rows, packed, ids if hidden is None else hidden, places)

    def _fill(self, bucket: _Bucket, plan: StepPlan, inputs: torch.Tensor) -> None:
        rows, pages = bucket.rows, self._kv.table_width
        packed = np.full(rows * (4 + pages), self._kv.scratch, dtype=np.int32)
        heads = packed[: 4 * rows].reshape(4, rows)
        heads[:] = 0
        heads[1, : plan.rows] = plan.positions
        # Padding rows own the table behind the last segment's, which names scratch pages alone.
        heads[2] = min(len(plan.segments), rows - 1)
        heads[2, : plan.rows] = plan.owners
        heads[3, : len(plan.logit_rows)] = plan.logit_rows
        packed[4 * rows :].reshape(rows, pages)[: len(plan.tables)] = plan.tables
        is_host = inputs.device.type == "cpu"
        if self._width is None and is_host:
            heads[0, : plan.rows] = inputs.numpy()
        bucket.packed.copy_(torch.from_numpy(packed), non_blocking=True)
        if self._width is not None or not is_host:
            bucket.inputs[: plan.rows].copy_(inputs, non_blocking=True)
