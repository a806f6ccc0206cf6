"""Executor over llama.cpp: a stage file's layers as one slice of a chain.

Rows come out with the same bits whatever rows they are computed with: alone or in a batch, one by one or many at
once, on any number of threads. What this machine's kernels do with one row and with several is probed at start:
where they differ (float32 and 16-bit weights), a row that would be alone is computed with a neighbour that is
forgotten at once. It has no tensor ranks: llama.cpp has no hook in a layer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from shardcompute.backends.executor import ExecutorOptions, SynchronousSteps, refuse_final_rows
from shardcompute.backends.kv import KvSessions
from shardcompute.backends.llamacpp.stage_context import (
    ROWS_AT_ONCE,
    ComputedRows,
    SequenceRows,
    StageContext,
    StageFile,
)
from shardcompute.backends.llamacpp.stream_kv import StreamKv, groups, plan_streams
from shardcompute.backends.matrix import Array, Float32
from shardcompute.core.batch import Segment, count_rows
from shardcompute.core.errors import BackendError, UsageError

_PROBED_ROWS = 16
_KEPT_ROWS = 8
_ONE = np.ones(1, bool)
_PROBED_COUNTS = (2, 3, 4, 5, 8, 16)


class LlamaCppExecutor(KvSessions[StreamKv], SynchronousSteps):
    """See Executor. The file may be deleted once this is made, where the system lets a mapped file go."""

    def __init__(self, file: StageFile, options: ExecutorOptions) -> None:
        self._file = file
        self._options = options
        self._normed: Float32 | None = None
        """The hidden states that the last step kept."""
        width = file.vocab_size if file.is_last else file.hidden
        self._kept_room: Float32 = np.empty((_KEPT_ROWS, width), np.float32)
        plan = plan_streams(options.kv_bytes, file.token_bytes, options.context_length)
        self._context = StageContext(
            file,
            streams=plan.streams,
            stream_tokens=plan.stream_tokens,
            threads=options.threads,
            on_gpu=options.device != "cpu",
        )
        self._kv = StreamKv(self._context, plan, file.token_bytes, options.context_length)
        try:
            self.least_rows = self._probe_rows()
        except BaseException:
            self.close()
            raise

    def step(self, segments: Sequence[Segment], inputs: Array, *, keeps_hidden: bool = False) -> Array:
        if keeps_hidden and not self._file.is_last:
            raise UsageError("only the last slice keeps its hidden states")
        rows = count_rows(segments)
        logit_rows = sum(segment.logit_rows for segment in segments)
        self._check(rows, logit_rows, inputs)
        self._kv.budget.check(segments)
        output = self._room_for(logit_rows if self._file.is_last else rows)
        self._normed = np.empty((logit_rows, self._file.hidden), np.float32) if keeps_hidden else None
        try:
            self._compute(segments, inputs, output)
        except BaseException:
            # Nobody knows what of them is there: better nothing than something wrong.
            for segment in segments:
                self._kv.release(segment.session)
            raise
        return output

    def _room_for(self, rows: int) -> Float32:
        """Where a step puts its rows. Few have the same room in every step: fresh memory costs as much as the copy."""
        if rows <= len(self._kept_room):
            return self._kept_room[:rows]
        return np.empty((rows, self._kept_room.shape[1]), np.float32)

    def hidden_rows(self) -> Array:
        if self._normed is None:
            raise UsageError("the last step kept no hidden states")
        return self._normed

    def final_rows(self) -> Array:
        raise refuse_final_rows("llama.cpp")

    def close(self) -> None:
        self._context.close()

    def _compute(self, segments: Sequence[Segment], inputs: Array, output: Float32) -> None:
        first_row, first_output = 0, 0
        for group in groups(segments, self._kv.streams):
            streams = self._kv.place([segment.session for segment in group])
            pieces = []
            for segment in group:
                self._kv.take(segment)
                wanted = segment.logit_rows if self._file.is_last else segment.count
                pieces.append(
                    _PlacedSegment(streams[segment.session], segment, first_row, first_output, wanted)
                )
                first_row += segment.count
                first_output += wanted
            if len(segments) == 1 and segments[0].count == segments[0].logit_rows == 1:
                self._run_one(pieces[0], inputs, output)
                continue
            pieces.sort(key=lambda piece: piece.stream)
            for wave in _waves(pieces):
                self._run(wave, inputs, output)

    def _run_one(self, piece: _PlacedSegment, inputs: Array, output: Float32) -> None:
        """The only row of a step: what one stream consists of, with nothing to gather."""
        alone = [SequenceRows(piece.stream, piece.segment.start, 1)]
        computed = self._compute_padded(alone, inputs, _ONE)
        output[:] = computed.outputs
        if self._normed is not None and computed.normed is not None:
            self._normed[:] = computed.normed

    def _run(self, wave: Sequence[tuple[_PlacedSegment, int, int]], inputs: Array, output: Float32) -> None:
        """Compute rows `[first, last)` of each of these pieces at once, and put them where they belong."""
        rows = np.concatenate([np.arange(piece.row + first, piece.row + last) for piece, first, last in wave])
        targets = np.concatenate([piece.targets(first, last) for piece, first, last in wave])
        sequences = [
            SequenceRows(piece.stream, piece.segment.start + first, last - first)
            for piece, first, last in wave
        ]
        computed = self._compute_padded(sequences, inputs[rows], targets >= 0)
        targets = targets[targets >= 0]
        output[targets] = computed.outputs
        if self._normed is not None and computed.normed is not None:
            self._normed[targets] = computed.normed

    def _compute_padded(self, sequences: list[SequenceRows], inputs: Array, wanted: Array) -> ComputedRows:
        """With a neighbour for a row that must not be alone: the next position of its sequence, taken back at once.

        The head must not be alone with a row either, so that the logits of a second one are made, too.
        """
        keeps_hidden = self._normed is not None and bool(wanted.any())
        if self.least_rows == 1:
            return self._context.compute(sequences, inputs, wanted, keeps_hidden=keeps_hidden)
        alone = sequences[0] if len(inputs) < self.least_rows else None
        if alone is not None:
            sequences = [SequenceRows(alone.number, alone.start, self.least_rows)]
            inputs = np.concatenate([inputs] * self.least_rows)
            wanted = np.append(wanted, [False] * (self.least_rows - len(wanted)))
        computed = wanted.copy()
        if self._file.is_last and 0 < computed.sum() < self.least_rows:
            computed[np.flatnonzero(~computed)[: self.least_rows - computed.sum()]] = True
        result = self._context.compute(sequences, inputs, computed, keeps_hidden=keeps_hidden)
        if alone is not None:
            self._context.truncate(alone.number, alone.start + alone.count)
        return result.of(wanted[computed] if self._file.is_last else wanted)

    def _check(self, rows: int, logit_rows: int, inputs: Array) -> None:
        options = self._options
        if rows > options.max_rows or logit_rows > options.max_logit_rows:
            raise UsageError(
                f"a step takes at most {options.max_rows} rows and gives {options.max_logit_rows} rows of "
                f"logits, not {rows} and {logit_rows}"
            )
        expected = (rows,) if self._file.is_first else (rows, self._file.hidden)
        if inputs.shape != expected:
            raise UsageError(f"this step's input must have the shape {expected}, not {inputs.shape}")
        if self._file.is_first and rows and not 0 <= inputs.min() <= inputs.max() < self._file.vocab_size:
            raise UsageError(f"a token id is outside the vocabulary of {self._file.vocab_size}")

    def _probe_rows(self) -> int:
        """How many rows a computation must have at least for every row to be the same in all of them."""
        noise = np.random.default_rng(0)
        inputs: Array
        if self._file.is_first:
            inputs = noise.integers(0, self._file.vocab_size, _PROBED_ROWS)
        else:
            inputs = noise.standard_normal((_PROBED_ROWS, self._file.hidden), dtype=np.float32)
        ones = self._probe(inputs, 1)
        together = [self._probe(inputs[:count], count) for count in _PROBED_COUNTS]
        if all(np.array_equal(each, ones[: len(each)]) for each in together):
            return 1
        pairs = self._probe(inputs, 2)
        if all(np.array_equal(each, pairs[: len(each)]) for each in together):
            return 2
        raise BackendError(
            "llama.cpp's kernels for this model's number types give a row other bits in other company here",
            hint="use --backend onnx, or a file of this model in Q8_0 or Q4_0",
        )

    def _probe(self, inputs: Array, count: int) -> Array:
        """These rows of one sequence, `count` at a time."""
        outputs = []
        for start in range(0, len(inputs), count):
            part = inputs[start : start + count]
            wanted = np.ones(len(part), bool)
            # The head rounds what it is given, so that small differences show there alone.
            computed = self._context.compute(
                [SequenceRows(0, start, len(part))], part, wanted, keeps_hidden=self._file.is_last
            )
            parts = (computed.outputs,) if computed.normed is None else (computed.outputs, computed.normed)
            outputs.append(np.concatenate(parts, axis=1))
        self._context.truncate(0, 0)
        return np.concatenate(outputs)


class _PlacedSegment:
    """A segment in its stream: where its rows lie in the step's inputs and outputs."""

    def __init__(self, stream: int, segment: Segment, row: int, output: int, wanted: int) -> None:
        self.stream = stream
        self.segment = segment
        self.row = row
        self._output = output
        self._wanted = wanted

    def targets(self, first: int, last: int) -> Array:
        """The output row of each of these rows, -1 for those that nobody wants."""
        indices = np.arange(first, last) - (self.segment.count - self._wanted)
        return np.where(indices >= 0, indices + self._output, -1)


def _waves(pieces: Sequence[_PlacedSegment]) -> Iterator[list[tuple[_PlacedSegment, int, int]]]:
    """Rows in computations that llama.cpp takes as one: as many rows of each of some streams side by side."""
    done = {piece.stream: 0 for piece in pieces}
    pending = list(pieces)
    while pending:
        run = [pending[0]]
        for piece in pending[1:]:
            if piece.stream != run[-1].stream + 1:
                break
            run.append(piece)
        run = run[:ROWS_AT_ONCE]
        count = min(piece.segment.count - done[piece.stream] for piece in run)
        count = max(1, min(count, ROWS_AT_ONCE // len(run)))
        yield [(piece, done[piece.stream], done[piece.stream] + count) for piece in run]
        for piece in run:
            done[piece.stream] += count
        pending = [piece for piece in pending if done[piece.stream] < piece.segment.count]
