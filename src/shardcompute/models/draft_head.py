"""A draft head: a small network that drafts on from a model's last hidden state, without layers and without memory.

The last stage has a row's final normed state and the token picked from it. From these two the network predicts the next
row's final state, the model's own head makes a token of that, and so on:

    z = [state | embedding of the token], each half with a mean square of 1
    u = join · z; for each block: u = u + down · (silu(gate · n) ∘ up · n), n the norm of u
    the next state is the norm of u; its logits are those of a few thousand common tokens

It is trained on the text of one model (`draft_training`) and kept as one file, in 8-bit blocks.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shardcompute.backends.executor import PictureNetwork
from shardcompute.backends.matrix import BlockMatrix, Float32, Matrix
from shardcompute.backends.ops import Gate, Handle, Ops, Tensor
from shardcompute.core.errors import CorruptModelError
from shardcompute.models.spec import ModelSpec

_MAGIC = b"ahead1\n\0"
"""How every file begins, that of the package too."""
_BLOCK_SIZE = 32
_MOST_BLOCKS = 16
_MOST_WIDTH = 1 << 17


@dataclass(frozen=True, slots=True)
class DraftHeadBlock:
    norm: Float32
    gate_up: Matrix
    down: Matrix


@dataclass(frozen=True, slots=True)
class DraftHeadWeights:
    """`ids` are the tokens that it knows, in rising order."""

    ids: NDArray[np.int32]
    join: Matrix
    blocks: tuple[DraftHeadBlock, ...]
    norm: Float32


@dataclass(frozen=True, slots=True)
class _Handles:
    unit: Handle
    join: Handle
    blocks: tuple[tuple[Handle, Handle, Handle], ...]
    norm: Handle
    head: Handle


class DraftHeadNetwork:
    """A `Network` without layers: rows `[state | embedding]` in, logits of the known tokens out. The hidden rows of a
    step are the next states. `head` is the model's own, of these tokens alone."""

    is_first = False
    is_last = True
    layer_count = 0
    pictures: PictureNetwork | None = None

    def __init__(self, spec: ModelSpec, weights: DraftHeadWeights, head: Matrix) -> None:
        self._weights = weights
        self._head = head
        self._width = spec.hidden
        self._eps = spec.norm_eps
        self.hidden = 2 * spec.hidden
        self.vocab_size = len(weights.ids)
        self.kv_shape = spec.kv_shape
        self.context_length = spec.context_length

    def load_shared(self, ops: Ops) -> Sequence[Handle]:
        return ()

    def load_embedding(self, ops: Ops) -> Handle:
        raise ValueError("tokens are embedded by whoever asks")

    def load_layer(self, ops: Ops, layer: int) -> Handle:
        raise ValueError("there are no layers")

    def load_head(self, ops: Ops) -> _Handles:
        weights = self._weights
        return _Handles(
            unit=ops.vector(np.ones(self._width, dtype=np.float32)),
            join=ops.matrix([weights.join], None),
            blocks=tuple(
                (ops.vector(block.norm), ops.matrix([block.gate_up], None), ops.matrix([block.down], None))
                for block in weights.blocks
            ),
            norm=ops.vector(weights.norm),
            head=ops.matrix([self._head], None),
        )

    def embed(self, ops: Ops, embedding: Handle, ids: Tensor) -> Tensor:
        raise ValueError("tokens are embedded by whoever asks")

    def layer(self, ops: Ops, shared: Handle, weights: Handle, layer: int, x: Tensor) -> Tensor:
        raise ValueError("there are no layers")

    def normed(self, ops: Ops, weights: _Handles, x: Tensor) -> Tensor:
        u = ops.linear(ops.rms_norm(ops.logit_rows(x), weights.unit, self._eps), weights.join)
        for norm, gate_up, down in weights.blocks:
            inner = ops.gated(ops.linear(ops.rms_norm(u, norm, self._eps), gate_up), Gate("silu"))
            u = ops.add(u, ops.linear(inner, down))
        return ops.rms_norm(u, weights.norm, self._eps)

    def head(self, ops: Ops, weights: _Handles, x: Tensor) -> Tensor:
        return ops.linear(x, weights.head)


def encode_draft_head(weights: DraftHeadWeights) -> bytes:
    """Matrices must be in 8-bit blocks (`weights.formats.quantise`)."""
    blocks = weights.blocks
    width = blocks[0].down.shape[1] if blocks else _BLOCK_SIZE
    shape = {"hidden": len(weights.norm), "blocks": len(blocks), "width": width, "ids": len(weights.ids)}
    header = json.dumps(shape).encode()
    parts = [_MAGIC, len(header).to_bytes(4, "little"), header, weights.ids.astype("<i4").tobytes()]
    parts += [_pack_vector(weights.norm), *_pack_matrix(weights.join)]
    for block in blocks:
        parts += [_pack_vector(block.norm), *_pack_matrix(block.gate_up), *_pack_matrix(block.down)]
    return b"".join(parts)


def decode_draft_head(content: bytes, hidden: int) -> DraftHeadWeights:
    """Raises CorruptModelError for what cannot be one for a model of this width."""
    try:
        weights = _decode(content, hidden)
    except (ValueError, KeyError, TypeError) as error:
        raise CorruptModelError(
            f"{len(content)} bytes are no draft head for a model of width {hidden}: {error}",
            hint="train it again with `shardcompute draft-head train`",
        ) from error
    return weights


def _decode(content: bytes, hidden: int) -> DraftHeadWeights:
    if content[: len(_MAGIC)] != _MAGIC:
        raise ValueError("it does not begin as one")
    start = len(_MAGIC) + 4
    end = start + int.from_bytes(content[len(_MAGIC) : start], "little")
    shape = json.loads(content[start:end])
    width, count, known = int(shape["width"]), int(shape["blocks"]), int(shape["ids"])
    fits = shape["hidden"] == hidden and not hidden % _BLOCK_SIZE and not width % _BLOCK_SIZE
    if not (fits and 0 <= count <= _MOST_BLOCKS and 0 < width <= _MOST_WIDTH and known > 0):
        raise ValueError(f"its shape is {shape}")
    reader = _Reader(content, end)
    ids = reader.numbers("<i4", known).astype(np.int32)
    if ids[0] < 0 or (np.diff(ids) <= 0).any():
        raise ValueError("its tokens are not in order")
    norm, join = reader.vector(hidden), reader.matrix(hidden, 2 * hidden)
    blocks = tuple(
        DraftHeadBlock(reader.vector(hidden), reader.matrix(2 * width, hidden), reader.matrix(hidden, width))
        for _ in range(count)
    )
    if reader.place != len(content):
        raise ValueError("something is left over")
    return DraftHeadWeights(ids, join, blocks, norm)


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
