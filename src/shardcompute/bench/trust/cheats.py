"""Cheats of a middle stage: what it sends in place of what its layers make of what it got."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from shardcompute.backends.executor import Executor, ExecutorOptions
from shardcompute.backends.matrix import Array, DenseMatrix, Float32, Matrix
from shardcompute.core.batch import Segment
from shardcompute.models.decoder import TensorSource
from shardcompute.models.spec import Stage
from shardcompute.runtime.shard import build_executor, open_shard
from shardcompute.weights.checkpoint import Checkpoint

_BLOCK = 64
Rows = list[Array]
"""Of each answer what goes into a stage, or comes out of it."""
Cheat = Callable[["MiddleStage"], Rows]


@dataclass(frozen=True, slots=True)
class MiddleStage:
    """The audited stage: its layers, what came in, and what an honest one sends."""

    checkpoint: Checkpoint
    layers: range
    form: str
    options: ExecutorOptions
    inputs: Rows
    honest: Rows

    def part(self, start: int, stop: int, form: str = "") -> Executor:
        """Some of its layers, counted from its first."""
        first, count = self.layers.start, self.checkpoint.spec.layer_count
        return open_shard(
            self.checkpoint,
            stage=Stage(first + start, first + stop, count),
            form=form or self.form,
            options=self.options,
        )


def run_rows(executor: Executor, answers: Sequence[Array], logit_rows: int = 0) -> Iterator[Array]:
    """Each answer in one step; what comes out is the caller's."""
    for rows in answers:
        out = executor.step([Segment(0, 0, len(rows), logit_rows)], rows)
        yield np.array(out, dtype=np.float32)
        executor.close_session(0)


@contextmanager
def _opened(*executors: Executor) -> Iterator[tuple[Executor, ...]]:
    try:
        yield executors
    finally:
        for each in executors:
            each.close()


def _without(start: int, stop: int) -> Cheat:
    """Layers `[start, stop)` of the stage are left out."""

    def cheat(stage: MiddleStage) -> Rows:
        last = len(stage.layers)
        with _opened(stage.part(0, start), stage.part(stop, last)) as (before, after):
            return list(run_rows(after, list(run_rows(before, stage.inputs))))

    return cheat


def _half(stage: MiddleStage) -> Rows:
    """A model of half the depth."""
    with _opened(stage.part(0, len(stage.layers) // 2)) as (half,):
        return list(run_rows(half, stage.inputs))


def _in_form(form: str) -> Cheat:
    def cheat(stage: MiddleStage) -> Rows:
        with _opened(stage.part(0, len(stage.layers), form)) as (other,):
            return list(run_rows(other, stage.inputs))

    return cheat


class _Rounded:
    """Weights rounded to 4 bits in blocks, plainly: to the nearest of 15 equal steps."""

    def __init__(self, source: TensorSource) -> None:
        self._source = source

    def matrix(self, name: str, layer: int | None = None) -> Matrix:
        dense = self._source.matrix(name, layer).to_dense()
        blocks = dense.reshape(dense.shape[0], -1, _BLOCK)
        scale = np.maximum(np.abs(blocks).max(axis=-1, keepdims=True) / 7, 1e-30)
        return DenseMatrix((np.rint(blocks / scale) * scale).reshape(dense.shape).astype(np.float32))

    def vector(self, name: str, layer: int | None = None) -> Float32:
        return self._source.vector(name, layer)


def _plain_4_bit(stage: MiddleStage) -> Rows:
    spec = stage.checkpoint.spec
    cut = Stage(stage.layers.start, stage.layers.stop, spec.layer_count)
    source = _Rounded(stage.checkpoint.source(cut, form="native"))
    with _opened(build_executor(spec, cut, source, backend="onnx", options=stage.options)) as (other,):
        return list(run_rows(other, stage.inputs))


def _noise(share: float) -> Cheat:
    """So much of every row's norm is noise."""

    def cheat(stage: MiddleStage) -> Rows:
        rng = np.random.default_rng(17)
        noisy = []
        for rows in stage.honest:
            norm = np.linalg.norm(rows, axis=1, keepdims=True) / np.sqrt(rows.shape[1])
            noisy.append((rows + share * norm * rng.standard_normal(rows.shape)).astype(np.float32))
        return noisy

    return cheat


def _stale_kv(stage: MiddleStage) -> Rows:
    """From the middle of an answer on, rows attend to what another answer left in memory."""
    sent = []
    with _opened(stage.part(0, len(stage.layers))) as (executor,):
        for index, (rows, honest) in enumerate(zip(stage.inputs, stage.honest, strict=True)):
            other, half = stage.inputs[index - 1], len(rows) // 2
            executor.step([Segment(0, 0, half, 0)], other[:half])
            out = executor.step([Segment(0, half, len(rows) - half, 0)], rows[half:])
            sent.append(np.concatenate([honest[:half], np.array(out, dtype=np.float32)]))
            executor.close_session(0)
    return sent


def _replayed(stage: MiddleStage) -> Rows:
    """What was sent for the answer before."""
    return [stage.honest[index - 1] for index in range(len(stage.honest))]


CHEATS: dict[str, Cheat] = {
    "one layer skipped": _without(4, 5),
    "three layers skipped": _without(4, 7),
    "half of the layers": _half,
    "4 bit form instead of 8": _in_form("int4"),
    "plain 4 bit instead of 8": _plain_4_bit,
    "5 % noise": _noise(0.05),
    "20 % noise": _noise(0.2),
    "stale KV": _stale_kv,
    "replayed outputs": _replayed,
}
"""By name; all of them send rows of the right shape."""
