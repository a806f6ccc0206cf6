"""Cheats of a middle stage: what it sends in place of what its layers make of what it got."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np

from shardcompute.backends.executor import Executor, ExecutorOptions
from shardcompute.backends.matrix import Array, DenseMatrix, Float32, Matrix
from shardcompute.core.batch import Segment
from shardcompute.core.kv_types import KvType
from shardcompute.models.decoder import TensorSource
from shardcompute.models.spec import Stage
from shardcompute.runtime.shard import build_executor, open_shard
from shardcompute.weights.checkpoint import Checkpoint

_BLOCK = 64
_RECENT = 32
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


class _Altered:
    """Weights of which every matrix is another."""

    def __init__(self, source: TensorSource, alter: Callable[[Float32], Array]) -> None:
        self._source = source
        self._alter = alter

    def matrix(self, name: str, layer: int | None = None) -> Matrix:
        return DenseMatrix(self._alter(self._source.matrix(name, layer).to_dense()).astype(np.float32))

    def vector(self, name: str, layer: int | None = None) -> Float32:
        return self._source.vector(name, layer)


def _with_weights(alter: Callable[[Float32], Array]) -> Cheat:
    def cheat(stage: MiddleStage) -> Rows:
        spec = stage.checkpoint.spec
        cut = Stage(stage.layers.start, stage.layers.stop, spec.layer_count)
        source = _Altered(stage.checkpoint.source(cut, form="native"), alter)
        with _opened(build_executor(spec, cut, source, backend="onnx", options=stage.options)) as (other,):
            return list(run_rows(other, stage.inputs))

    return cheat


def _plain_4_bit(dense: Float32) -> Array:
    """To the nearest of 15 equal steps in blocks."""
    blocks = dense.reshape(dense.shape[0], -1, _BLOCK)
    scale = np.maximum(np.abs(blocks).max(axis=-1, keepdims=True) / 7, 1e-30)
    rounded: Array = (np.rint(blocks / scale) * scale).reshape(dense.shape)
    return rounded


def _half_rank(dense: Float32) -> Array:
    """A narrower model, as small a one can be made of a large one."""
    left, values, right = np.linalg.svd(dense, full_matrices=False)
    kept = len(values) // 2
    cut: Array = (left[:, :kept] * values[:kept]) @ right[:kept]
    return cut


def _other_adapter(dense: Float32) -> Array:
    """What an adapter of rank 8 that was not asked for adds: 2 % of a matrix's norm."""
    rng = np.random.default_rng(dense.shape[0] + dense.shape[1])
    added = rng.standard_normal((dense.shape[0], 8)) @ rng.standard_normal((8, dense.shape[1]))
    changed: Array = dense + 0.02 * np.linalg.norm(dense) / np.linalg.norm(added) * added
    return changed


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


def _swapped(stage: MiddleStage) -> Rows:
    """Two answers of one step get each other's rows, in the second half."""
    sent = []
    for index, honest in enumerate(stage.honest):
        other, half = stage.honest[index ^ 1 if index ^ 1 < len(stage.honest) else 0], len(honest) // 2
        sent.append(np.concatenate([honest[:half], other[half:]]))
    return sent


def _recent_only(stage: MiddleStage) -> Rows:
    """Rows attend to those of the last 32 to 64 positions alone: less memory for keys and values."""
    sent = []
    with _opened(stage.part(0, len(stage.layers))) as (executor,):
        for rows in stage.inputs:
            parts = []
            for at in range(0, len(rows), _RECENT):
                first = max(at - _RECENT, 0)
                out = next(run_rows(executor, [rows[first : at + _RECENT]]))
                parts.append(out[at - first :])
            sent.append(np.concatenate(parts))
    return sent


def _shifted(stage: MiddleStage) -> Rows:
    """The first row is written twice: every other has a wrong position."""
    with _opened(stage.part(0, len(stage.layers))) as (executor,):
        twice = [np.concatenate([rows[:1], rows[:-1]]) for rows in stage.inputs]
        late = list(run_rows(executor, twice))
    return [np.concatenate([out[1:], honest[-1:]]) for out, honest in zip(late, stage.honest, strict=True)]


def _with_kv(kv_type: KvType) -> Cheat:
    """Keys and values in fewer bits than are claimed."""

    def cheat(stage: MiddleStage) -> Rows:
        options = replace(stage.options, kv_type=kv_type)
        with _opened(replace(stage, options=options).part(0, len(stage.layers))) as (executor,):
            return list(run_rows(executor, stage.inputs))

    return cheat


def _in_some_rows(one_in: int, cheat: Cheat) -> Cheat:
    """Only one row in so many is not computed honestly: a median over rows does not see that."""

    def mixed(stage: MiddleStage) -> Rows:
        sent = []
        for wrong, honest in zip(cheat(stage), stage.honest, strict=True):
            rows = honest.copy()
            rows[::one_in] = wrong[::one_in]
            sent.append(rows)
        return sent

    return mixed


def _at_the_end(count: int, cheat: Cheat) -> Cheat:
    """Only in the last rows of an answer."""

    def mixed(stage: MiddleStage) -> Rows:
        pairs = zip(cheat(stage), stage.honest, strict=True)
        return [np.concatenate([honest[:-count], wrong[-count:]]) for wrong, honest in pairs]

    return mixed


CHEATS: dict[str, Cheat] = {
    "one layer skipped": _without(4, 5),
    "three layers skipped": _without(4, 7),
    "half of the layers": _half,
    "4 bit form instead of 8": _in_form("int4"),
    "plain 4 bit instead of 8": _with_weights(_plain_4_bit),
    "weights of half the rank": _with_weights(_half_rank),
    "another adapter": _with_weights(_other_adapter),
    "5 % noise": _noise(0.05),
    "20 % noise": _noise(0.2),
    "stale KV": _stale_kv,
    "replayed outputs": _replayed,
    "swapped sessions": _swapped,
    "only recent rows attended to": _recent_only,
    "positions off by one": _shifted,
    "16 bit KV instead of 32": _with_kv("float16"),
    "8 bit KV instead of 32": _with_kv("int8"),
    "one layer skipped in every third row": _in_some_rows(3, _without(4, 5)),
    "one layer skipped in one row of 32": _in_some_rows(32, _without(4, 5)),
    "one layer skipped in the last 20 rows": _at_the_end(20, _without(4, 5)),
}
"""By name; all of them send rows of the right shape."""
