"""Shared maps: layers whose linear maps two other machines compute on shares, and everything else this one.

Maps are numbered in the order in which a decoder loads them, which is the same on every machine. Norms, rotations,
attention and activations are computed here, in plain numpy, and keys and values stay here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

import numpy as np

from shardcompute.backends.executor import ExecutorOptions
from shardcompute.backends.host.low_rank import LowRank
from shardcompute.backends.host.numpy_ops import NumpyExecutor, NumpyOps
from shardcompute.backends.kv import HostKv
from shardcompute.backends.matrix import Float32, Matrix
from shardcompute.backends.ops import Ops
from shardcompute.core.errors import BackendError, UnsupportedModelError
from shardcompute.models.decoder import Decoder, TensorSource
from shardcompute.models.families import refuse_foreign
from shardcompute.models.spec import ModelSpec, Stage
from shardcompute.trust.shares.fixed_point import (
    Ring,
    RingMatrix,
    RowShape,
    decode_products,
    encode_matrix,
    encode_rows,
    row_shape,
)


class ShareMultiplier(Protocol):
    """Whoever multiplies rows with maps without learning them."""

    @property
    def map_count(self) -> int:
        """How many maps it has, from the first on."""
        ...

    def expect(self, number: int, matrix: RingMatrix) -> None:
        """These are the weights of a map. Raises where the machines have others."""
        ...

    def multiply(self, number: int, rows: Ring) -> Ring:
        """Rows times a map, modulo 2^64. Raises where a machine is gone, or has computed wrongly."""
        ...


def load_maps(spec: ModelSpec, stage: Stage, source: TensorSource, *, has_head: bool) -> Iterator[RingMatrix]:
    """The linear maps of a stage in integers, in the order of their numbers, one at a time."""
    refuse_sharing(spec, stage)
    decoder = Decoder(spec, stage, source)
    for layer in range(stage.count):
        yield from _collect(lambda ops, at=layer: decoder.load_layer(ops, at))
    if has_head:
        yield from _collect(decoder.load_head)


def refuse_sharing(spec: ModelSpec, stage: Stage) -> None:
    """UnsupportedModelError where shares would not hide what they are to hide."""
    refuse_foreign(spec)
    if any(each.is_sparse for each in spec.layers[stage.start : stage.stop]):
        raise UnsupportedModelError(
            "layers with experts cannot be computed on shares: which experts are asked for tells of the text",
            hint="choose layers without experts, see `shardcompute show`",
        )
    if stage.is_first and spec.vision is not None:
        raise UnsupportedModelError(
            "the first layers of a model that sees cannot be computed on shares",
            hint="choose layers from 1 on, or a model of text alone",
        )


def open_shared_stage(
    spec: ModelSpec, stage: Stage, source: TensorSource, multiplier: ShareMultiplier, options: ExecutorOptions
) -> NumpyExecutor:
    """A stage whose first `map_count` linear maps are computed by others."""
    refuse_sharing(spec, stage)
    decoder = Decoder(spec, stage, source)
    return NumpyExecutor(decoder, options, lambda kv, length: SharedOps(kv, length, multiplier))


@dataclass(frozen=True, slots=True)
class _SharedLinear:
    number: int
    shape: RowShape
    bias: Float32 | None


class SharedOps(NumpyOps):
    """The primitives, with linear maps computed on shares."""

    def __init__(self, kv: HostKv, context_length: int, multiplier: ShareMultiplier) -> None:
        super().__init__(kv, context_length)
        self._multiplier = multiplier
        self._loaded = 0

    def matrix(self, parts: Sequence[Matrix], bias: Float32 | None, low_rank: LowRank | None = None) -> Any:
        number, self._loaded = self._loaded, self._loaded + 1
        if number >= self._multiplier.map_count:
            return super().matrix(parts, bias, low_rank)
        matrix = _encoded(parts)
        self._multiplier.expect(number, matrix)
        return _SharedLinear(number, row_shape(matrix), bias)

    def linear(self, x: Float32, matrix: Any) -> Float32:
        if not isinstance(matrix, _SharedLinear):
            return super().linear(x, matrix)
        try:
            rows = encode_rows(np.ascontiguousarray(x), matrix.shape)
        except ValueError as error:
            raise BackendError(
                f"a layer's activations cannot be shared: {error}",
                hint="the weights may be damaged, or computed in too few bits",
            ) from error
        products = self._multiplier.multiply(matrix.number, rows.integers)
        y = decode_products(products, rows, matrix.shape)
        return y if matrix.bias is None else y + matrix.bias


class _LoadingOps:
    """Keeps the matrices that are loaded, and nothing else."""

    def __init__(self) -> None:
        self.matrices: list[Sequence[Matrix]] = []

    def matrix(self, parts: Sequence[Matrix], bias: Float32 | None, low_rank: LowRank | None = None) -> None:
        self.matrices.append(parts)

    def vector(self, values: Float32) -> None:
        """Norms are the client's."""

    def head_maps(self, weights: Float32) -> None:
        """So is what is inside attention."""


def _collect(load: Any) -> Iterator[RingMatrix]:
    ops = _LoadingOps()
    load(cast(Ops, ops))
    for parts in ops.matrices:
        yield _encoded(parts)


def _encoded(parts: Sequence[Matrix]) -> RingMatrix:
    try:
        return encode_matrix(np.concatenate([part.to_dense() for part in parts]))
    except ValueError as error:
        raise BackendError(
            f"a layer's weights cannot be shared: {error}", hint="fetch the model again"
        ) from error
