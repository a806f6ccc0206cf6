"""Executor for CPUs: runs a network through ONNX Runtime."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from shardcompute.backends.executor import ExecutorOptions, Network, SynchronousSteps
from shardcompute.backends.host.pictures import SessionPictures
from shardcompute.backends.kv import HostKv, MovableSessions
from shardcompute.backends.matrix import Array, Float32
from shardcompute.backends.ort.buffers import give_back_rows
from shardcompute.backends.ort.graph import LOADING_ROOM, shrink_scratch_memory, use_threads
from shardcompute.backends.ort.ops import OrtOps
from shardcompute.backends.ort.program import Graph, RowPadding, Run, TakeWanted, Value, assign_buffers
from shardcompute.backends.ort.table import EmbeddingTable, StoredTable
from shardcompute.backends.ort.tower import OrtTower
from shardcompute.core.batch import Segment, count_rows
from shardcompute.core.errors import BackendError, UsageError
from shardcompute.core.pictures import PictureSpan
from shardcompute.core.process_memory import give_back_large_blocks, join_pages, return_freed_memory

_PROBED_ROWS = 16
# The cheapest first; the last is not tried.
_PADDINGS = tuple(
    RowPadding(least, multiple) for least, multiple in ((1, 1), (2, 1), (2, 2), (4, 4), (8, 8), (16, 16))
)
_FEW_ROWS, _MANY_ROWS = 16, 128


class OrtExecutor(MovableSessions[HostKv], SynchronousSteps):
    """A slice of a model as a program of graphs; embedding and KV live here, on the host.

    Rows come out with the same bits whatever other rows they are computed with. Where this machine's kernels treat
    a row alone or odd rows differently, a probe at start finds it out and steps are padded as `padding` says.
    """

    def __init__(self, network: Network, options: ExecutorOptions) -> None:
        use_threads(options.threads)
        give_back_large_blocks()
        # Not the network itself: it has the files that its weights were read from, and perhaps the weights.
        self._is_first, self._is_last = network.is_first, network.is_last
        self._hidden, self._vocab_size = network.hidden, network.vocab_size
        self._options = options
        self._kv = HostKv(
            network.layer_count,
            network.kv_shape,
            context_length=options.context_length,
            budget_bytes=options.kv_bytes,
            kv_type=options.kv_type,
        )
        capacity = options.max_rows + _PROBED_ROWS
        self._positions = np.zeros((1, capacity), dtype=np.int64)
        self._adapters = np.zeros((1, capacity), dtype=np.int64)
        self._ops = OrtOps(options.context_length, self._positions, self._adapters, options.kv_type)
        self._pictures: SessionPictures = self._open_pictures(network)
        self._table: EmbeddingTable | StoredTable | None = (
            network.load_embedding(self._ops) if network.is_first else None
        )
        self._input = self._ops.source(network.hidden)
        self._normed: Value | None = None
        self._final: Value | None = None
        self._output = self._record(network, self._input)
        self._rows = self._logit_rows = 0
        ends = (self._input, self._output, self._final, self._normed)
        kept = [value for value in ends if value is not None]
        narrow = options.max_logit_rows + _PROBED_ROWS
        assign_buffers(self._ops.steps, kept, capacity, narrow)
        self._steps = self._ops.steps
        values = [self._input, *(value for step in self._steps for value in step.outputs())]
        self._buffers = list({id(value.buffer): value.buffer for value in values}.values())
        self._grown_rows = 0
        """Of prompts, since scratch memory was given back: each number of rows takes some that others cannot use."""
        self.padding = self._probe_rows()
        give_back_rows(self._buffers, 0)
        LOADING_ROOM.release()
        return_freed_memory()
        join_pages()

    def step(self, segments: Sequence[Segment], inputs: Array, *, keeps_hidden: bool = False) -> Array:
        rows = count_rows(segments)
        if rows > self._options.max_rows:
            raise UsageError(f"a step takes at most {self._options.max_rows} rows, not {rows}")
        logit_rows = sum(segment.logit_rows for segment in segments)
        if logit_rows > self._options.max_logit_rows:
            raise UsageError(
                f"a step gives at most {self._options.max_logit_rows} rows of logits, not {logit_rows}"
            )
        self._check_inputs(inputs, rows)
        self._pictures.check(segments)
        self._kv.take(segments)
        self._input.buffer[:rows] = inputs if self._table is None else self._table.rows(inputs)
        row = 0
        for segment in segments:
            self._positions[0, row : row + segment.count] = np.arange(segment.start, segment.stop)
            self._adapters[0, row : row + segment.count] = segment.adapter
            row += segment.count
        padded = self.padding.padded(rows)
        self._positions[0, rows:padded] = self._adapters[0, rows:padded] = 0
        self._fit_scratch(rows)
        run = Run(segments, padded, self._kv)
        if self._pictures.are_in(segments):
            self._place_pictures(run, rows)
        for step in self._steps:
            if run.rows:
                step.run(run)
        self._rows, self._logit_rows = rows, logit_rows
        return self._output.buffer[: logit_rows if self._is_last else rows]

    def hidden_rows(self) -> Array:
        if self._normed is None:
            raise UsageError("only the last stage of a model has final hidden states")
        return self._normed.buffer[: self._logit_rows]

    def final_rows(self) -> Array:
        if self._final is None:
            raise UsageError("only the last stage of a model has final states")
        return self._final.buffer[: self._rows]

    def needs_encoding(self, spans: Sequence[PictureSpan], patches: Sequence[bytes]) -> bool:
        return self._pictures.needs_encoding(spans, patches)

    def encode_pictures(self, spans: Sequence[PictureSpan], patches: Sequence[bytes]) -> None:
        self._pictures.encode(spans, patches)

    def adopt(self, source: int, target: int, length: int, *, is_moved: bool = False) -> None:
        super().adopt(source, target, length, is_moved=is_moved)
        for kernel in self._ops.kernels:
            kernel.forget(target)
            if is_moved:
                kernel.forget(source)

    def close_session(self, session: int) -> None:
        super().close_session(session)
        for kernel in self._ops.kernels:
            kernel.forget(session)

    def rest(self) -> None:
        if self._grown_rows:
            self._give_back_scratch()

    def close(self) -> None:
        self._steps.clear()
        if self._table is not None:
            self._table.close()
        return_freed_memory()

    def _open_pictures(self, network: Network) -> SessionPictures:
        pictures, encode, scale = network.pictures, None, 1.0
        if pictures is not None and network.is_first:
            # Rows are multiplied by it in the program, as embedded tokens are.
            encode, scale = OrtTower(pictures).encode, pictures.row_scale
        rows, context = self._options.max_rows, self._options.context_length
        return SessionPictures(pictures, encode, max_rows=rows, context_length=context, scale=scale)

    def _place_pictures(self, run: Run, rows: int) -> None:
        """Rows, positions and sights of a step that has pictures."""
        for place, values in self._pictures.rows(run.segments):
            self._input.buffer[place] = values
        run.ends = [self._pictures.ends(segment) for segment in run.segments]
        turns = self._pictures.positions(run.segments)
        self._positions[0, :rows] = turns[0]
        mixed = np.nonzero((turns != turns[0]).any(axis=0))[0]
        for tables in self._ops.mixed_turns:
            tables.place(turns, mixed)
            self._positions[0, mixed] = tables.first + mixed

    def _fit_scratch(self, rows: int) -> None:
        """Once prompts are done and their answers begin; not between the pieces of a prompt."""
        if rows > _FEW_ROWS:
            self._grown_rows += rows
        elif self._grown_rows > _MANY_ROWS:
            self._give_back_scratch()

    def _give_back_scratch(self) -> None:
        self._grown_rows = 0
        shrink_scratch_memory()
        give_back_rows(self._buffers, _FEW_ROWS)
        for step in self._steps:
            if isinstance(step, Graph):
                step.forget_bindings(_FEW_ROWS)
        return_freed_memory()

    def _record(self, network: Network, x: Value) -> Value:
        ops = self._ops
        shared = network.load_shared(ops)
        if network.is_first:
            x = network.embed(ops, self._table, x)
        for i in range(network.layer_count):
            x = network.layer(ops, shared, network.load_layer(ops, i), i, x)
        if network.is_last:
            weights = network.load_head(ops)
            self._final = x
            self._normed = network.normed(ops, weights, x)
            ops.keep(self._normed)
            x = network.head(ops, weights, self._normed)
        ops.finish(x)
        return x

    def _check_inputs(self, inputs: Array, rows: int) -> None:
        expected = (rows,) if self._is_first else (rows, self._hidden)
        if inputs.shape != expected:
            raise UsageError(f"this step's input must have the shape {expected}, not {inputs.shape}")
        if self._is_first and rows and not 0 <= inputs.min() <= inputs.max() < self._vocab_size:
            raise UsageError(f"a token id is outside the vocabulary of {self._vocab_size}")

    def _probe_rows(self) -> RowPadding:
        """The least to which steps must be padded for rows to be independent.

        Behind the choice of logit rows it is another one: a head of another form need not pay for the layers'.
        """
        probed: dict[frozenset[str], RowPadding] = {}
        # What adapters add is to be probed, too.
        self._adapters[0, :_PROBED_ROWS] = 1
        padding, choice = RowPadding(), None
        for step in self._steps:
            if isinstance(step, TakeWanted):
                choice = step
            elif isinstance(step, Graph):
                if step.forms not in probed:
                    probed[step.forms] = _probe_graph(step)
                if choice is None:
                    padding = padding.joined(probed[step.forms])
                else:
                    choice.padding = choice.padding.joined(probed[step.forms])
        self._adapters[:] = 0
        return padding


def _probe_graph(step: Graph) -> RowPadding:
    noise = np.random.default_rng(0)
    for value in step.takes:
        value.buffer[:_PROBED_ROWS] = noise.standard_normal((_PROBED_ROWS, value.width), dtype=np.float32)
    inputs = {id(value.buffer): value.buffer[:_PROBED_ROWS].copy() for value in step.takes}

    def outputs(rows: int) -> list[Float32]:
        for value in step.takes:
            value.buffer[:_PROBED_ROWS] = inputs[id(value.buffer)]
        step.run(Run((), rows, None))  # type: ignore[arg-type]  # graphs do not look at KV
        return [value.buffer[:rows].copy() for value in step.makes]

    whole = outputs(_PROBED_ROWS)
    if not all(np.isfinite(each).all() for each in whole):
        raise BackendError(
            "a graph on random input gives numbers that are none",
            hint="check the model's file; if it is right, report this with the model's name and the processor",
        )
    equal = {
        rows
        for rows in range(1, _PROBED_ROWS)
        if all(np.array_equal(part, full[:rows]) for part, full in zip(outputs(rows), whole, strict=True))
    }
    for padding in _PADDINGS[:-1]:
        if {padding.padded(rows) for rows in range(1, _PROBED_ROWS)} <= equal | {_PROBED_ROWS}:
            return padding
    return _PADDINGS[-1]
