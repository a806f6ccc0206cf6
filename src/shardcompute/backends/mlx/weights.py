"""Linear maps on the device, made from weight matrices in any form.

Quantised matrices in blocks of 32, 64, 128 or a multiple of 128 keep their codes: they are MLX's affine groups,
`w = scale · q + bias`, with `bias = shift − 2^(bits−1) · scale`. Scales and biases are held in the format that is
computed in where it holds them exactly, else in float32 (and that product is computed in float32): nothing is
rounded a second time. Other blocks (of 16: Q6_K, Q3_K, Q2_K) are widened at loading, since MLX has no such groups.
Dense matrices are held in the format that is computed in; a bfloat16 checkpoint is then taken bit by bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from shardcompute.backends.matrix import Array, BlockMatrix, DenseMatrix, Float32, Matrix, MixedMatrix

GROUP_SIZES = (32, 64, 128)


@dataclass(frozen=True, slots=True)
class DensePart:
    """`weight [.., out, in]`; several experts lie one behind the other."""

    weight: Any

    def apply(self, x: Any) -> Any:
        return x @ self.weight.T

    def gather(self, x: Any, chosen: Any) -> Any:
        y = mx.gather_mm(x.astype(self.weight.dtype), self.weight.swapaxes(-1, -2), rhs_indices=chosen)
        return y.astype(x.dtype)

    def rows(self, ids: Any) -> Any:
        return self.weight[ids]

    def widened(self) -> Any:
        return self.weight


@dataclass(frozen=True, slots=True)
class QuantisedPart:
    """MLX's affine groups: `codes [.., out, in · bits / 32]` (uint32), `scales` and `biases [.., out, groups]`."""

    codes: Any
    scales: Any
    biases: Any
    group_size: int
    bits: int

    def apply(self, x: Any) -> Any:
        y = mx.quantized_matmul(
            x.astype(self.scales.dtype),
            self.codes,
            self.scales,
            self.biases,
            group_size=self.group_size,
            bits=self.bits,
        )
        return y.astype(x.dtype)

    def gather(self, x: Any, chosen: Any) -> Any:
        y = mx.gather_qmm(
            x.astype(self.scales.dtype),
            self.codes,
            self.scales,
            self.biases,
            rhs_indices=chosen,
            group_size=self.group_size,
            bits=self.bits,
        )
        return y.astype(x.dtype)

    def rows(self, ids: Any) -> Any:
        """These rows, widened; in float32, since a product of code and scale needs more than 16 bits."""
        scales, biases = (each[ids].astype(mx.float32) for each in (self.scales, self.biases))
        return mx.dequantize(self.codes[ids], scales, biases, group_size=self.group_size, bits=self.bits)

    def widened(self) -> Any:
        scales, biases = (each.astype(mx.float32) for each in (self.scales, self.biases))
        return mx.dequantize(self.codes, scales, biases, group_size=self.group_size, bits=self.bits)


@dataclass(frozen=True, slots=True)
class OutlierPart:
    """The input columns that a `MixedMatrix` keeps apart, `[.., out, columns]`, added to its blocks' product."""

    blocks: QuantisedPart
    columns: Any
    values: Any

    def apply(self, x: Any) -> Any:
        return self.blocks.apply(x) + x[..., self.columns] @ self.values.T

    def widened(self) -> Any:
        return self.blocks.widened().at[:, self.columns].add(self.values)


Part = DensePart | QuantisedPart | OutlierPart


@dataclass(frozen=True, slots=True)
class LinearMap:
    """`[rows, in] → [rows, out]`: parts, one output behind the other, and a bias."""

    parts: tuple[Part, ...]
    bias: Any | None

    def apply(self, x: Any) -> Any:
        outs = [part.apply(x) for part in self.parts]
        y = outs[0] if len(outs) == 1 else mx.concatenate(outs, axis=-1)
        return y if self.bias is None else y + self.bias


@dataclass(frozen=True, slots=True)
class ExpertMap:
    """One linear map for each expert, stacked: `[rows, k, 1, in] → [rows, k, 1, out]` by the experts of each row."""

    part: DensePart | QuantisedPart
    bias: Any | None

    def apply(self, x: Any, chosen: Any) -> Any:
        y = self.part.gather(x, chosen)
        return y if self.bias is None else y + self.bias[chosen][:, :, None, :]


def load_map(parts: Sequence[Matrix], bias: Float32 | None, dtype: Any) -> LinearMap:
    """One map from matrices stacked along their outputs."""
    on_device = None if bias is None else to_array(bias, dtype)
    if all(isinstance(part, DenseMatrix) for part in parts):
        dense = [load_dense(part, dtype) for part in parts]
        loaded: list[Part] = [DensePart(dense[0] if len(dense) == 1 else mx.concatenate(dense))]
    else:
        loaded = [load_part(part, dtype) for part in parts]
        if _are_alike(loaded):
            loaded = [_combine(loaded, mx.concatenate)]
    _compute(*loaded, on_device)
    return LinearMap(tuple(loaded), on_device)


def load_table(matrix: Matrix, dtype: Any) -> Part:
    """An embedding table; codes stay codes and single rows are widened."""
    part = (
        DensePart(load_dense(matrix, dtype)) if isinstance(matrix, MixedMatrix) else load_part(matrix, dtype)
    )
    _compute(part)
    return part


def load_part(matrix: Matrix, dtype: Any) -> Part:
    if isinstance(matrix, BlockMatrix):
        return _load_blocks(matrix, dtype)
    if isinstance(matrix, MixedMatrix):
        blocks = _load_blocks(matrix.blocks, dtype)
        if isinstance(blocks, DensePart):
            return DensePart(load_dense(matrix, dtype))
        return OutlierPart(blocks, mx.array(matrix.columns.astype(np.int32)), to_array(matrix.values, dtype))
    return DensePart(load_dense(matrix, dtype))


def load_dense(matrix: Matrix, dtype: Any) -> Any:
    """A dense weight, widened if it was quantised, and rounded once."""
    values = matrix.values if isinstance(matrix, DenseMatrix) else matrix.to_dense()
    return to_array(values, dtype)


def stack_experts(maps: Sequence[LinearMap], dtype: Any) -> ExpertMap:
    """The experts' maps as one; those of unlike forms are widened."""
    biases: Any = [each.bias for each in maps]
    bias = None if biases[0] is None else mx.stack(biases)
    parts = [part for each in maps for part in each.parts]
    part: DensePart | QuantisedPart
    if len(parts) == len(maps) and _are_alike(parts):
        part = _combine(parts, mx.stack)
    else:
        dense = (mx.concatenate([part.widened().astype(dtype) for part in each.parts]) for each in maps)
        part = DensePart(mx.stack(list(dense)))
    if isinstance(part, DensePart) and mx.default_device() == mx.cpu:
        part = DensePart(part.weight.astype(mx.float32))  # the only one that MLX multiplies by row on CPUs
    _compute(part, bias)
    return ExpertMap(part, bias)


def to_array(values: Array, dtype: Any) -> Any:
    """An array on the device; raw bfloat16 (uint16) is known for what it is. Never shares memory with it."""
    array = mx.array(np.ascontiguousarray(values))
    return (array.view(mx.bfloat16) if values.dtype == np.uint16 else array).astype(dtype)


def _load_blocks(matrix: BlockMatrix, dtype: Any) -> DensePart | QuantisedPart:
    size = matrix.block_size
    if size not in GROUP_SIZES and size % GROUP_SIZES[-1]:
        return DensePart(load_dense(matrix, dtype))
    half = np.float32(1 << (matrix.bits - 1))
    scales = matrix.scales
    biases = -half * scales if matrix.shifts is None else matrix.shifts - half * scales
    while size < GROUP_SIZES[-1] and _are_paired(scales) and _are_paired(biases):
        size, scales, biases = 2 * size, scales[:, ::2], biases[:, ::2]
    if size > GROUP_SIZES[-1]:
        repeats = size // GROUP_SIZES[-1]
        scales, biases = (np.repeat(each, repeats, axis=1) for each in (scales, biases))
    # Codes of 4 and 8 bits lie in little-endian words of 32 as they lie in bytes.
    codes = np.ascontiguousarray(matrix.codes).reshape(matrix.codes.shape[0], -1).view("<u4")
    held = mx.array(np.ascontiguousarray(scales)), mx.array(np.ascontiguousarray(biases))
    if all(mx.array_equal(each.astype(dtype).astype(mx.float32), each) for each in held):
        held = held[0].astype(dtype), held[1].astype(dtype)
    return QuantisedPart(mx.array(codes), *held, group_size=min(size, GROUP_SIZES[-1]), bits=matrix.bits)


def _are_paired(values: Float32) -> bool:
    """Whether neighbouring blocks share their number: they were one larger group (see `weights.formats.mlx_blocks`)."""
    return values.shape[1] % 2 == 0 and bool(np.array_equal(values[:, ::2], values[:, 1::2]))


def _are_alike(parts: Sequence[Part]) -> bool:
    """Whether all are dense, or all quantised in the same way."""
    if all(isinstance(part, DensePart) for part in parts):
        return True
    kinds = {
        (part.group_size, part.bits, part.scales.dtype) if isinstance(part, QuantisedPart) else None
        for part in parts
    }
    return len(kinds) == 1 and None not in kinds


def _combine(parts: Sequence[Any], join: Callable[[list[Any]], Any]) -> DensePart | QuantisedPart:
    """Parts that are alike as one, by `mx.concatenate` or `mx.stack`."""
    first = parts[0]
    if isinstance(first, DensePart):
        return DensePart(join([part.weight for part in parts]))
    codes, scales, biases = (
        join([getattr(part, name) for part in parts]) for name in ("codes", "scales", "biases")
    )
    return QuantisedPart(codes, scales, biases, first.group_size, first.bits)


def _compute(*held: Any) -> None:
    """Put arrays on the device now, so that what they were made of can be freed."""
    for part in held:
        if isinstance(part, DensePart):
            mx.eval(part.weight)
        elif isinstance(part, QuantisedPart):
            mx.eval(part.codes, part.scales, part.biases)
        elif isinstance(part, OutlierPart):
            mx.eval(part.columns, part.values)
            _compute(part.blocks)
        elif part is not None:
            mx.eval(part)
