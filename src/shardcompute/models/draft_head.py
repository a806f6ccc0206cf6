"""A draft head: a small decoder that drafts on from a model's final states, with attention over the session.

Row i of a session has the state s behind the model's last layer, before the norm, and the token t that follows it.
From these two the network predicts the next row's state y, of which the model's own head makes a token, and so on:

    u = join · [rms(embedding of t) ∘ g | rms(s) ∘ h]
    for each layer: u = u + out · attention(qkv · n), u = u + down · (silu(gate · n) ∘ up · n), n the norm of u
    y = u; its logits, of a few thousand common tokens, are those of rms(y) ∘ o

A token that is not among the known ones has an embedding of zeros. It is trained on the text of one model
(`draft_training`) and kept as one file, in 8-bit blocks.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardcompute.backends.executor import PictureNetwork
from shardcompute.backends.matrix import BlockMatrix, Float32, Matrix, columns_of
from shardcompute.backends.ops import Attention, Gate, Handle, Ops, Tensor
from shardcompute.core.errors import CorruptModelError
from shardcompute.core.kv_types import KvShape
from shardcompute.models.rotation import rope_tables
from shardcompute.models.spec import ModelSpec, Rope

DRAFT_HEAD = "draft-head"
"""The name under which it is attached to a model's weights."""
_MAGIC = b"ahead2\n\0"
"""How every file begins, that of the package too."""
_BLOCK_SIZE = 32
_LONGEST_HEADER = 4096
_MOST = {
    "layers": 4,
    "heads": 1 << 10,
    "kv_heads": 1 << 10,
    "head_dim": 1 << 10,
    "width": 1 << 17,
    "ids": 1 << 20,
}


@dataclass(frozen=True, slots=True)
class DraftHeadLayer:
    norm: Float32
    qkv: Matrix
    out: Matrix
    mlp_norm: Float32
    gate_up: Matrix
    down: Matrix


@dataclass(frozen=True, slots=True)
class DraftHeadWeights:
    """`ids` are the tokens that it knows, in rising order; heads turn by `theta`."""

    ids: NDArray[np.int32]
    embedding_norm: Float32
    state_norm: Float32
    output_norm: Float32
    join: Matrix
    layers: tuple[DraftHeadLayer, ...]
    heads: int
    kv_heads: int
    head_dim: int
    theta: float

    @property
    def kv_shape(self) -> KvShape:
        return KvShape(self.kv_heads, self.head_dim)

    @property
    def rope(self) -> Rope:
        exponents = np.arange(0, self.head_dim, 2) / self.head_dim
        return Rope(tuple(float(each) for each in self.theta**-exponents))


@dataclass(frozen=True, slots=True)
class _LayerHandles:
    """`joins` are of the first layer alone: norm and matrix of the embedding, and of the state."""

    joins: tuple[tuple[Handle, Handle], ...]
    norm: Handle
    qkv: Handle
    out: Handle
    mlp_norm: Handle
    gate_up: Handle
    down: Handle


@dataclass(frozen=True, slots=True)
class _HeadHandles:
    norm: Handle
    head: Handle


class DraftHeadNetwork:
    """A `Network`: rows `[embedding | state]` in, logits of the known tokens out. The final rows of a step are the next
    states. `head` is the model's own, of these tokens alone."""

    is_first = False
    is_last = True
    pictures: PictureNetwork | None = None

    def __init__(self, spec: ModelSpec, weights: DraftHeadWeights, head: Matrix) -> None:
        self._weights = weights
        self._head = head
        self._width = spec.hidden
        self._eps = spec.norm_eps
        self._attention = Attention(
            weights.heads, weights.kv_heads, weights.head_dim, scale=weights.head_dim**-0.5
        )
        self.hidden = 2 * spec.hidden
        self.layer_count = len(weights.layers)
        self.vocab_size = len(weights.ids)
        self.kv_shape = weights.kv_shape
        self.context_length = spec.context_length

    def load_shared(self, ops: Ops) -> Handle:
        return ops.rotation(partial(rope_tables, self._weights.rope))

    def load_embedding(self, ops: Ops) -> Handle:
        raise ValueError("tokens are embedded by whoever asks")

    def load_layer(self, ops: Ops, layer: int) -> _LayerHandles:
        weights = self._weights
        loaded, width = weights.layers[layer], self._width
        halves = ((weights.embedding_norm, 0), (weights.state_norm, width)) if layer == 0 else ()
        return _LayerHandles(
            joins=tuple(
                (ops.vector(norm), ops.matrix([columns_of(weights.join, first, first + width)], None))
                for norm, first in halves
            ),
            norm=ops.vector(loaded.norm),
            qkv=ops.matrix([loaded.qkv], None),
            out=ops.matrix([loaded.out], None),
            mlp_norm=ops.vector(loaded.mlp_norm),
            gate_up=ops.matrix([loaded.gate_up], None),
            down=ops.matrix([loaded.down], None),
        )

    def load_head(self, ops: Ops) -> _HeadHandles:
        return _HeadHandles(ops.vector(self._weights.output_norm), ops.matrix([self._head], None))

    def embed(self, ops: Ops, embedding: Handle, ids: Tensor) -> Tensor:
        raise ValueError("tokens are embedded by whoever asks")

    def layer(self, ops: Ops, shared: Handle, weights: _LayerHandles, layer: int, x: Tensor) -> Tensor:
        attention = self._attention
        if weights.joins:
            halves = zip(ops.split(x, [self._width, self._width]), weights.joins, strict=True)
            embedded, state = (
                ops.linear(ops.rms_norm(half, norm, self._eps), join) for half, (norm, join) in halves
            )
            x = ops.add(embedded, state)
        widths = [n * attention.head_dim for n in (attention.heads, attention.kv_heads, attention.kv_heads)]
        q, k, v = ops.split(ops.linear(ops.rms_norm(x, weights.norm, self._eps), weights.qkv), widths)
        q, k = (ops.rotate(each, attention.head_dim, shared) for each in (q, k))
        x = ops.add(x, ops.linear(ops.attend(q, k, v, layer, attention), weights.out))
        inner = ops.linear(ops.rms_norm(x, weights.mlp_norm, self._eps), weights.gate_up)
        return ops.add(x, ops.linear(ops.gated(inner, Gate("silu")), weights.down))

    def normed(self, ops: Ops, weights: _HeadHandles, x: Tensor) -> Tensor:
        return ops.rms_norm(ops.logit_rows(x), weights.norm, self._eps)

    def head(self, ops: Ops, weights: _HeadHandles, x: Tensor) -> Tensor:
        return ops.linear(x, weights.head)


def encode_draft_head(weights: DraftHeadWeights) -> bytes:
    """Matrices must be in 8-bit blocks (`weights.formats.quantise`)."""
    shape = {
        "hidden": len(weights.output_norm),
        "layers": len(weights.layers),
        "heads": weights.heads,
        "kv_heads": weights.kv_heads,
        "head_dim": weights.head_dim,
        "width": weights.layers[0].down.shape[1],
        "ids": len(weights.ids),
        "theta": weights.theta,
    }
    header = json.dumps(shape).encode()
    parts = [_MAGIC, len(header).to_bytes(4, "little"), header, weights.ids.astype("<i4").tobytes()]
    parts += map(_pack_vector, (weights.embedding_norm, weights.state_norm, weights.output_norm))
    parts += _pack_matrix(weights.join)
    for layer in weights.layers:
        parts += [_pack_vector(layer.norm), *_pack_matrix(layer.qkv), *_pack_matrix(layer.out)]
        parts += [_pack_vector(layer.mlp_norm), *_pack_matrix(layer.gate_up), *_pack_matrix(layer.down)]
    return b"".join(parts)


def decode_draft_head(content: bytes, hidden: int, vocab_size: int | None = None) -> DraftHeadWeights:
    """Raises CorruptModelError for what cannot be one for a model of this width and vocabulary (None: not looked
    at)."""
    try:
        weights = _decode(content, hidden)
        if vocab_size is not None and weights.ids[-1] >= vocab_size:
            raise ValueError(f"it has a token {weights.ids[-1]} where there are {vocab_size}")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CorruptModelError(
            f"{len(content)} bytes are no draft head for a model of width {hidden}: {error}",
            hint="train it again with `shardcompute draft-head train`",
        ) from error
    return weights


def _decode(content: bytes, hidden: int) -> DraftHeadWeights:
    if content[: len(_MAGIC)] != _MAGIC:
        raise ValueError("it does not begin as one of this release does")
    start = len(_MAGIC) + 4
    length = int.from_bytes(content[len(_MAGIC) : start], "little")
    if length > _LONGEST_HEADER:
        raise ValueError(f"its header has {length} bytes")
    shape = json.loads(content[start : start + length])
    sizes, theta = _sizes(shape, hidden)
    layers, heads, kv_heads, head_dim, width, known = sizes
    reader = _Reader(content, start + length)
    if reader.place + _content_bytes(hidden, sizes) != len(content):
        raise ValueError("it is too short or too long for its shape")
    ids = reader.numbers("<i4", known).astype(np.int32)
    if ids[0] < 0 or (np.diff(ids) <= 0).any():
        raise ValueError("its tokens are not in order")
    embedding_norm, state_norm, output_norm = (reader.vector(hidden) for _ in range(3))
    join = reader.matrix(hidden, 2 * hidden)
    attended, kept = heads * head_dim, kv_heads * head_dim
    read = tuple(
        DraftHeadLayer(
            norm=reader.vector(hidden),
            qkv=reader.matrix(attended + 2 * kept, hidden),
            out=reader.matrix(hidden, attended),
            mlp_norm=reader.vector(hidden),
            gate_up=reader.matrix(2 * width, hidden),
            down=reader.matrix(hidden, width),
        )
        for _ in range(layers)
    )
    return DraftHeadWeights(
        ids, embedding_norm, state_norm, output_norm, join, read, heads, kv_heads, head_dim, theta
    )


def _sizes(shape: Any, hidden: int) -> tuple[tuple[int, ...], float]:
    """Layers, heads, kv_heads, head_dim, width and ids; and theta. ValueError for a shape that cannot be."""
    if not isinstance(shape, Mapping):
        raise TypeError("its header is none")
    sizes = tuple(shape[name] for name in _MOST)
    theta = shape["theta"]
    numbers = all(
        type(size) is int and 0 < size <= most for size, most in zip(sizes, _MOST.values(), strict=True)
    )
    if not (numbers and type(theta) in (int, float) and math.isfinite(theta) and theta > 1):
        raise ValueError(f"its shape is {shape}")
    _, heads, kv_heads, head_dim, width, _ = sizes
    in_blocks = not any(each % _BLOCK_SIZE for each in (hidden, width, heads * head_dim))
    if shape["hidden"] != hidden or not in_blocks or heads % kv_heads or head_dim % 2:
        raise ValueError(f"its shape is {shape}")
    return sizes, float(theta)


def _content_bytes(hidden: int, sizes: Sequence[int]) -> int:
    """What comes behind the header of a file of this shape."""
    layers, heads, kv_heads, head_dim, width, known = sizes
    attended = heads * head_dim
    weights = hidden * (2 * attended + 2 * kv_heads * head_dim + 3 * width)
    vectors = hidden * (3 + 2 * layers)
    matrices = 2 * hidden * hidden + layers * weights
    return 4 * (known + vectors) + matrices + 2 * matrices // _BLOCK_SIZE


def _pack_vector(values: Float32) -> bytes:
    return values.astype("<f4").tobytes()


def _pack_matrix(matrix: Matrix) -> list[bytes]:
    if not isinstance(matrix, BlockMatrix) or (matrix.bits, matrix.block_size) != (8, _BLOCK_SIZE):
        raise ValueError("only matrices in 8-bit blocks of 32 can be kept")
    if matrix.shifts is not None:
        raise ValueError("only blocks without shifts can be kept")
    return [matrix.codes.tobytes(), matrix.scales.astype("<f2").tobytes()]


@dataclass(slots=True)
class _Reader:
    content: bytes
    place: int

    def numbers(self, kind: str, count: int) -> NDArray[np.generic]:
        found = np.frombuffer(self.content, dtype=kind, count=count, offset=self.place)
        self.place += found.nbytes
        return found

    def vector(self, width: int) -> Float32:
        values = self.numbers("<f4", width).astype(np.float32)
        if not np.isfinite(values).all():
            raise ValueError("it holds numbers that are not finite")
        return values

    def matrix(self, rows: int, width: int) -> BlockMatrix:
        blocks = width // _BLOCK_SIZE
        codes = self.numbers("<u1", rows * width).astype(np.uint8).reshape(rows, blocks, _BLOCK_SIZE)
        scales = self.numbers("<f2", rows * blocks).astype(np.float32).reshape(rows, blocks)
        if not np.isfinite(scales).all():
            raise ValueError("it holds numbers that are not finite")
        return BlockMatrix(8, _BLOCK_SIZE, codes, scales)
