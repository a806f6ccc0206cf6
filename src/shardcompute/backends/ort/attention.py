"""Attention whose every row has the same bits, however rows are grouped into steps.

ONNX Runtime's own attention kernels take another path for a single row, so decoding and verifying would differ
in the last bits, which quantised layers amplify into other tokens. Here scores and mixtures are matrix products
with at least two rows over keys padded to whole pages, where rows do not depend on each other:

- the heads that share a key head are rows of one product, so that even one position has several rows;
- the padding is masked, adds exact zeros, and keeps the softmax's summation order fixed;
- a window drops whole spans of `SPAN` keys only, so that the blocks in which a product sums stay in place.

See docs/decisions for what this costs.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnxruntime

from shardcompute.backends.kv import KvRows
from shardcompute.backends.matrix import Array, Float32
from shardcompute.backends.ops import Attention
from shardcompute.backends.ort.graph import CONTRIB, GraphWriter
from shardcompute.backends.ort.model_bytes import FLOAT, FLOAT16, INT8
from shardcompute.core.batch import PAGE_TOKENS, Segment
from shardcompute.core.kv_types import KvType

SPAN = 512
_KINDS = {"float32": FLOAT, "float16": FLOAT16, "int8": INT8}
_SCORE_BYTES = 4 << 20
_SMALL_ROWS = 16
# Fewer rows at once see fewer keys that are masked anyway, and their scores stay in the cache.
_ROWS = 128


@dataclass(frozen=True, slots=True)
class KeyRange:
    """Which keys a group of rows looks at, `[start, stop)`, and the mask `[rows, 1, stop − start]` over them."""

    start: int
    stop: int
    mask: Float32


def key_range(
    start: int, count: int, window: int | None, chunk: int | None = None, ends: Array | None = None
) -> KeyRange:
    """For rows at positions `[start, start + count)`, which see up to themselves or, with `ends`, up to those."""
    first = 0 if window is None else max(0, (start - window + 1) // SPAN * SPAN)
    if chunk is not None:
        first = start // chunk * chunk // SPAN * SPAN
    end = start + count if ends is None else int(ends.max())
    stop = -(-end // PAGE_TOKENS) * PAGE_TOKENS
    here = np.arange(start, start + count)[:, None, None]
    there = np.arange(first, stop)
    hidden = there > here if ends is None else there >= ends[:, None, None]
    if window is not None:
        hidden |= there <= here - window
    if chunk is not None:
        hidden |= there < here // chunk * chunk
    mask = np.zeros(hidden.shape, dtype=np.float32)
    mask[hidden] = -np.inf
    return KeyRange(first, stop, mask)


@dataclass(frozen=True, slots=True)
class _Bound:
    """A binding, valid while rows, keys and mask stay where they were; it keeps the mask alive."""

    place: tuple[int, ...]
    binding: onnxruntime.IOBinding
    keys: KeyRange


class AttentionKernel:
    """Runs attention of one kind over host KV. Holds the bindings of recent steps: they cost as much as a product."""

    def __init__(self, attention: Attention, kv_type: KvType) -> None:
        self._heads = attention.heads
        self._kept = attention.kept
        self._window = attention.window
        self._chunk = attention.chunk
        self._group = attention.heads // attention.kv_heads
        self._width = attention.heads * attention.head_dim
        self._width_out = attention.width_out
        self._one = _open(attention, kv_type, is_single=True) if self._group > 1 else None
        self._many = _open(attention, kv_type, is_single=False)
        self._bindings: dict[tuple[int, int], _Bound] = {}
        self._masks: dict[int, Float32] = {}
        self._doubled: Float32 = np.zeros((2, self._width), dtype=np.float32)
        self._answer: Float32 = np.zeros((2, self._width_out), dtype=np.float32)

    def ranges(self, segment: Segment, ends: Array | None = None) -> list[tuple[int, int, KeyRange]]:
        """The segment's rows in groups `(first row, rows, keys)` whose scores fit the cache."""
        keys = segment.stop
        most = max(2, min(_ROWS, _SCORE_BYTES // (4 * self._heads * keys)))
        groups = []
        for first in range(0, segment.count, most):
            count = min(most, segment.count - first)
            # A single row without shared heads is doubled, see `run`.
            rows = 2 if count == 1 and self._one is None else count
            seen = None if ends is None else ends[first : first + count]
            span = key_range(segment.start + first, count, self._window, self._chunk, seen)
            mask = span.mask if rows == count else np.repeat(span.mask, rows, axis=0)
            if segment.count <= min(most, _SMALL_ROWS):
                mask = self._keep_in_place(segment.session, mask)
            groups.append((first, count, KeyRange(span.start, span.stop, mask)))
        return groups

    def _keep_in_place(self, session: int, mask: Float32) -> Float32:
        """The mask at the address where the session's last one of this shape was, so that bindings stay valid."""
        known = self._masks.get(session)
        if known is None or known.shape != mask.shape:
            self._masks[session] = mask
            return mask
        np.copyto(known, mask)
        return known

    def run(
        self,
        session: int,
        layer: int,
        room: KvRows,
        q: Float32,
        out: Float32,
        row: int,
        count: int,
        keys: KeyRange,
    ) -> None:
        """Rows `[row, row + count)` of `q`, into those of `out`, over a layer's keys and values `[2, positions, …]`."""
        if self._one is None and count == 1:
            self._doubled[:] = q[row]
            binding = self._bind(self._many, room, self._doubled, self._answer, 0, 2, keys)
            self._many.run_with_iobinding(binding)
            out[row] = self._answer[0]
            return
        kernel = self._one if count == 1 and self._one is not None else self._many
        place = (row, count, keys.start, keys.stop, id(keys.mask))
        known = self._bindings.get((session, layer))
        if known is None or known.place != place:
            binding = self._bind(kernel, room, q, out, row, count, keys)
            known = self._bindings[session, layer] = _Bound(place, binding, keys)
        kernel.run_with_iobinding(known.binding)

    def forget(self, session: int) -> None:
        self._masks.pop(session, None)
        for key in [key for key in self._bindings if key[0] == session]:
            del self._bindings[key]

    def _bind(
        self,
        kernel: onnxruntime.InferenceSession,
        room: KvRows,
        q: Float32,
        out: Float32,
        row: int,
        count: int,
        keys: KeyRange,
    ) -> onnxruntime.IOBinding:
        binding = kernel.io_binding()
        length = keys.stop - keys.start
        shape = (length, *self._kept.grouped)
        for part, name in enumerate(("k", "v")[: self._kept.parts]):
            array = room.values[part, keys.start :]
            binding.bind_input(name, "cpu", 0, array.dtype, shape, array.ctypes.data)
            if room.scales is not None:
                scales = room.scales[part, keys.start :]
                binding.bind_input(
                    f"{name}_scales", "cpu", 0, np.float32, (*shape[:2], 1), scales.ctypes.data
                )
        binding.bind_input("q", "cpu", 0, np.float32, (count, self._width), q[row:].ctypes.data)
        binding.bind_input("mask", "cpu", 0, np.float32, (count, 1, length), keys.mask.ctypes.data)
        binding.bind_output("out", "cpu", 0, np.float32, (count, self._width_out), out[row:].ctypes.data)
        return binding


def _open(attention: Attention, kv_type: KvType, *, is_single: bool) -> onnxruntime.InferenceSession:
    """`out[rows] = softmax(q·kᵀ·scale + mask)·v`; one position needs no transposition."""
    graph = GraphWriter()
    heads, kv_heads, dim = attention.heads, attention.kv_heads, attention.head_dim
    group, width = heads // kv_heads, heads * dim
    q = graph.input("q", ["rows", width])
    keys = _kept(graph, "k", kv_type, attention)
    values = keys if attention.value_dim is not None else _kept(graph, "v", kv_type, attention)
    mask = graph.input("mask", ["rows", 1, "keys"])
    by_head = graph.integers(kv_heads, -1, dim)
    if not is_single:
        q = graph.node("Reshape", [q, graph.integers(-1, kv_heads, group, dim)])
        q = graph.node("Transpose", [q], perm=[1, 0, 2, 3])
        mask = graph.node("Expand", [mask, graph.integers(1, group, 1)])
        mask = graph.node("Flatten", [mask], axis=2)
    q = graph.node("Reshape", [q, by_head])
    scores = graph.node(
        "FusedMatMul", [q, keys], domain=CONTRIB, alpha=attention.scale, transB=1, transBatchB=1
    )
    if attention.softcap is not None:
        cap = graph.number(attention.softcap)
        scores = graph.node("Mul", [graph.node("Tanh", [graph.node("Div", [scores, cap])]), cap])
    scores = graph.node("Add", [scores, mask])
    weights = _softmax(graph, scores, attention)
    mixed = graph.node("FusedMatMul", [weights, values], domain=CONTRIB, transBatchB=1)
    if attention.value_dim is not None:
        # Mixing the rest too costs less than taking the values out of all keys first.
        dim = attention.value_dim
        mixed = graph.node("Slice", [mixed, graph.integers(0), graph.integers(dim), graph.integers(-1)])
    if not is_single:
        mixed = graph.node("Reshape", [mixed, graph.integers(kv_heads, -1, group, dim)])
        mixed = graph.node("Transpose", [mixed], perm=[1, 0, 2, 3])
    graph.rename(graph.node("Reshape", [mixed, graph.integers(-1, attention.width_out)]), "out")
    graph.output("out", ["rows", attention.width_out])
    return graph.open()


def _kept(graph: GraphWriter, name: str, kv_type: KvType, attention: Attention) -> str:
    """Keys or values where they are kept, as float32 `[keys, kv_heads, head_dim]`."""
    groups, size = attention.kept.grouped
    wide = graph.input(name, ["keys", groups, size], _KINDS[kv_type])
    if kv_type != "float32":
        wide = graph.node("Cast", [wide], to=FLOAT)
    if kv_type == "int8":
        wide = graph.node("Mul", [wide, graph.input(f"{name}_scales", ["keys", groups, 1])])
    if (groups, size) == (attention.kv_heads, attention.head_dim):
        return wide
    return graph.node("Reshape", [wide, graph.integers(-1, attention.kv_heads, attention.head_dim)])


def _softmax(graph: GraphWriter, scores: str, attention: Attention) -> str:
    if attention.sinks is None:
        return graph.node("Softmax", [scores], axis=-1)
    group = attention.heads // attention.kv_heads
    sinks = np.asarray(attention.sinks, dtype=np.float32).reshape(attention.kv_heads, 1, group, 1)
    # One sink per row: rows of a key head are positions × group.
    rows = graph.node("Shape", [scores], start=1, end=2)
    positions = graph.node("Div", [rows, graph.integers(group)])
    shape = graph.node(
        "Concat", [graph.integers(attention.kv_heads), positions, graph.integers(group, 1)], axis=0
    )
    column = graph.node("Expand", [graph.constant(sinks), shape])
    column = graph.node("Reshape", [column, graph.integers(attention.kv_heads, -1, 1)])
    weights = graph.node("Softmax", [graph.node("Concat", [scores, column], axis=-1)], axis=-1)
    keys = graph.node("Shape", [scores], start=2, end=3)
    return graph.node("Slice", [weights, graph.integers(0), keys, graph.integers(2)])
