"""Executor for MLX: steps in few shapes, each compiled once per layer.

Layers are compiled one by one and never across their edges, so that a model computes the same bits wherever it is
cut. A compiled function holds its layer's weights; the least recently used shapes are let go.
"""

from __future__ import annotations

import dataclasses
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from shardcompute.backends.executor import ExecutorOptions, Network, SynchronousSteps
from shardcompute.backends.host.eager_tower import EagerTower
from shardcompute.backends.host.pictures import Encode, SessionPictures
from shardcompute.backends.kv import KvSessions
from shardcompute.backends.matrix import Array, Float32
from shardcompute.backends.mlx.device import choose_format, is_gpu_stream, open_stream
from shardcompute.backends.mlx.kv import MlxKv
from shardcompute.backends.mlx.ops import LayerKv, MlxOps, StepArrays, step_arrays
from shardcompute.backends.mlx.padded_step import PaddedStep, pad_step
from shardcompute.backends.mlx.tower import MlxPatchOps
from shardcompute.backends.ops import ExpertBlock
from shardcompute.core.batch import Segment, count_rows
from shardcompute.core.errors import UsageError
from shardcompute.core.pictures import PictureSpan

MAX_SHAPES = 64
"""Shapes of steps that stay compiled."""

Function = Callable[..., Any]


@dataclasses.dataclass(frozen=True, slots=True)
class _StepFunctions:
    """What runs steps of one shape."""

    embed: Function | None
    layers: list[Function]
    normed: Function | None
    head: Function | None


class MlxExecutor(KvSessions[MlxKv], SynchronousSteps):
    """See Executor. `compiles` is whether steps are compiled: by default on GPUs, since MLX compiles for CPUs by
    calling a C++ compiler, which takes a second for each new kernel and may not be there."""

    def __init__(self, network: Network, options: ExecutorOptions, *, compiles: bool | None = None) -> None:
        self._network = network
        self._max_rows = options.max_rows
        self._stream = open_stream(options.device)
        is_gpu = is_gpu_stream(self._stream)
        self._compiles = (is_gpu and options.use_graphs) if compiles is None else compiles
        dtype = choose_format(options.dtype, is_gpu=is_gpu)
        self._functions: OrderedDict[tuple[int, ...], _StepFunctions] = OrderedDict()
        self._hidden: Array | None = None
        self._final: Array | None = None
        # Whoever closes it does not free what a step is computing with.
        self._lock = threading.Lock()
        with mx.stream(self._stream):
            self._kv = MlxKv(
                network.layer_count,
                network.kv_shape,
                context_length=options.context_length,
                budget_bytes=options.kv_bytes,
                dtype=dtype,
            )
            self._ops = MlxOps(options.context_length, dtype)
            self._load()
            self._pictures: SessionPictures = self._open_pictures(dtype, options.context_length)

    def _load(self) -> None:
        network, ops = self._network, self._ops
        self._shared = network.load_shared(ops)
        self._embedding = network.load_embedding(ops) if network.is_first else None
        self._layers: list[Any] = []
        for i in range(network.layer_count):
            weights = network.load_layer(ops, i)
            for field in dataclasses.fields(weights):
                block = getattr(weights, field.name)
                if isinstance(block, ExpertBlock):
                    ops.stack(block)
            self._layers.append(weights)
        self._head = network.load_head(ops) if network.is_last else None

    def _open_pictures(self, dtype: Any, context_length: int) -> SessionPictures:
        network = self._network.pictures
        encode: Encode | None = None
        if network is not None and self._network.is_first:
            # On a stream of its own, from its weights on: pictures are encoded while steps are computed.
            stream = open_stream("mlx" if is_gpu_stream(self._stream) else "cpu")
            with mx.stream(stream):
                tower = EagerTower(network, MlxPatchOps(0, dtype))

            def encode(span: PictureSpan, patches: bytes) -> Float32:
                with mx.stream(stream):
                    return tower.encode(span, patches)

        return SessionPictures(network, encode, max_rows=self._max_rows, context_length=context_length)

    def needs_encoding(self, spans: Sequence[PictureSpan], patches: Sequence[bytes]) -> bool:
        return self._pictures.needs_encoding(spans, patches)

    def encode_pictures(self, spans: Sequence[PictureSpan], patches: Sequence[bytes]) -> None:
        self._pictures.encode(spans, patches)

    def step(self, segments: Sequence[Segment], inputs: Array, *, keeps_hidden: bool = False) -> Array:
        self._check(segments, inputs)
        self._pictures.check(segments)
        self._hidden = self._final = None
        with self._lock, mx.stream(self._stream):
            self._kv.take(segments)
            padded = pad_step(segments, self._kv.tables, self._kv.scratch)
            if self._network.pictures is not None:
                padded = self._see(padded, segments)
            result, *kept = self._run(padded, inputs, segments)
            mx.eval(result, self._kv.keys, self._kv.values, *(kept if keeps_hidden else []))
        count = padded.logit_count if self._network.is_last else padded.row_count
        if keeps_hidden:
            hidden, final = kept
            self._hidden = np.array(hidden)[:count]
            self._final = np.array(final)[: padded.row_count]
        return np.array(result)[:count]

    def hidden_rows(self) -> Array:
        if self._hidden is None:
            raise UsageError("the last step kept no hidden states")
        return self._hidden

    def final_rows(self) -> Array:
        if self._final is None:
            raise UsageError("the last step kept no final states")
        return self._final

    def adopt(self, source: int, target: int, length: int, *, is_moved: bool = False) -> None:
        with self._lock, mx.stream(self._stream):
            super().adopt(source, target, length, is_moved=is_moved)
            mx.eval(self._kv.keys, self._kv.values)

    def close(self) -> None:
        with self._lock:
            self._functions.clear()
            self._layers.clear()
            self._kv.keys.clear()
            self._kv.values.clear()
            self._embedding = self._head = self._shared = self._hidden = self._final = None
            self._ops = MlxOps(0, mx.float32)
            mx.clear_cache()

    def _check(self, segments: Sequence[Segment], inputs: Array) -> None:
        rows = count_rows(segments)
        expected = (rows,) if self._network.is_first else (rows, self._network.hidden)
        if inputs.shape != expected or rows > self._max_rows:
            raise UsageError(
                f"a step of {rows} rows (at most {self._max_rows}) got inputs of shape {inputs.shape}"
            )
        if self._network.is_first and not 0 <= inputs.min() <= inputs.max() < self._network.vocab_size:
            raise UsageError(f"token ids must lie in [0, {self._network.vocab_size})")

    def _see(self, step: PaddedStep, segments: Sequence[Segment]) -> PaddedStep:
        """With what pictures do to rows, in models that see: also where there are none, as steps are compiled once."""
        turns = np.zeros((3, len(step.positions)), dtype=np.int32)
        turns[:, : step.row_count] = self._pictures.positions(segments)
        ends, row = step.positions + 1, 0
        for segment in segments:
            own = self._pictures.ends(segment)
            if own is not None:
                ends[row : row + segment.count] = own
            row += segment.count
        return dataclasses.replace(step, turns=turns, ends=ends)

    def _run(self, step: PaddedStep, inputs: Array, segments: Sequence[Segment]) -> tuple[Any, ...]:
        """The result and, from the last slice, the hidden rows that logits were made of and the final states of all
        rows: padded, float32, not yet computed."""
        functions, arrays, kv = self._functions_for(step.shape), step_arrays(step), self._kv
        self._ops.row_count = step.row_count
        padded = np.zeros(
            (len(step.positions), *inputs.shape[1:]), dtype=np.int32 if inputs.ndim == 1 else np.float32
        )
        padded[: step.row_count] = inputs
        x = mx.array(padded)
        x = functions.embed(x, arrays) if functions.embed is not None else self._ops.accept(x)
        for place, rows in self._pictures.rows(segments):
            x[place] = self._ops.accept(mx.array(rows))
        for i, layer in enumerate(functions.layers):
            x, kv.keys[i], kv.values[i] = layer(x, kv.keys[i], kv.values[i], arrays)
        if functions.normed is None or functions.head is None:
            return (x.astype(mx.float32),)
        normed = functions.normed(x, arrays)
        result = functions.head(normed, arrays)
        return tuple(each.astype(mx.float32) for each in (result, normed, x))

    def _functions_for(self, shape: tuple[int, ...]) -> _StepFunctions:
        found = self._functions.pop(shape, None)
        if found is None:
            found = self._make_functions()
        self._functions[shape] = found
        while len(self._functions) > MAX_SHAPES:
            self._functions.popitem(last=False)
        return found

    def _make_functions(self) -> _StepFunctions:
        network, ops = self._network, self._ops

        def embed(ids: Any, step: StepArrays) -> Any:
            ops.begin(step)
            return network.embed(ops, self._embedding, ids)

        def normed(x: Any, step: StepArrays) -> Any:
            ops.begin(step)
            return network.normed(ops, self._head, x)

        def head(x: Any, step: StepArrays) -> Any:
            ops.begin(step)
            return network.head(ops, self._head, x)

        prepare: Callable[[Function], Function] = mx.compile if self._compiles else _as_it_is
        return _StepFunctions(
            embed=prepare(embed) if network.is_first else None,
            layers=[prepare(self._layer_function(i)) for i in range(network.layer_count)],
            normed=prepare(normed) if network.is_last else None,
            head=prepare(head) if network.is_last else None,
        )

    def _layer_function(self, index: int) -> Function:
        network, ops, weights = self._network, self._ops, self._layers[index]

        def layer(x: Any, keys: Any, values: Any, step: StepArrays) -> tuple[Any, Any, Any]:
            kv = LayerKv(keys, values)
            ops.begin(step, kv)
            x = network.layer(ops, self._shared, weights, index, x)
            return x, kv.keys, kv.values

        return layer


def _as_it_is(function: Function) -> Function:
    return function
