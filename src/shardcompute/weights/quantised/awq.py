"""AWQ: integers of 4 bits in groups of input columns, as AutoAWQ's `gemm` kernels take them.

A matrix `m.weight` lies in `m.qweight` (32-bit words `[in, out / 8]`, a word holds eight output rows in the order 0,
2, 4, 6, 1, 3, 5, 7), `m.qzeros` (words of the same kind, `[groups, out / 8]`) and `m.scales` (`[groups, out]`). `w =
scale · (code − zero)`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from shardcompute.backends.matrix import Array, Matrix
from shardcompute.core.errors import UnsupportedModelError
from shardcompute.weights.formats.tensor_file import Span, TensorFile
from shardcompute.weights.quantised.affine import (
    AffineRows,
    Groups,
    affine_matrix,
    configured_size,
    group_size,
    hold,
)
from shardcompute.weights.quantised.numbers import read_array, read_scales, unpack_words
from shardcompute.weights.quantised.scheme import PartNames, Parts, QuantisedMatrix, Scheme

_BITS, _PER_WORD = 4, 8
# Which of the eight codes of a word, counted from its lowest bits, belongs to each output row.
_PLACES = np.array([0, 4, 1, 5, 2, 6, 3, 7])


def awq_scheme(config: Mapping[str, Any]) -> Scheme:
    bits = config.get("bits", config.get("w_bit"))
    version = str(config.get("version") or "gemm").lower()
    if bits != _BITS:
        raise UnsupportedModelError(
            f"config.json: AWQ weights of {str(bits)[:16]} bits cannot be run here",
            hint="AWQ is published in 4 bits; use such a version, or a GGUF file",
        )
    if version != "gemm":
        raise UnsupportedModelError(
            f"config.json: AWQ's version {version[:32]!r} is laid out for one kernel alone",
            hint="use a version of the model that says gemm, or a GGUF file",
        )
    size = configured_size(config.get("group_size", config.get("q_group_size")))
    has_zeros = bool(config.get("zero_point", True))

    def fold(parts: Parts) -> QuantisedMatrix:
        return _fold(parts, size, has_zeros=has_zeros)

    return Scheme("awq", (PartNames(".weight", ".qweight", (".scales", ".qzeros"), fold),))


def _fold(parts: Parts, size: int | None, *, has_zeros: bool) -> QuantisedMatrix:
    words, scales, zeros = parts.entry(".qweight"), parts.entry(".scales"), parts.entry(".qzeros")
    if words.dtype not in ("I32", "U32") or zeros.dtype not in ("I32", "U32"):
        raise parts.corrupt(f"has {words.dtype} codes and {zeros.dtype} zeros where words of 32 bits are due")
    if len(words.shape) != 2 or len(scales.shape) != 2 or not words.shape[0] or not scales.shape[0]:
        raise parts.corrupt("has codes or scales that are no matrix")
    width, height = words.shape[0], words.shape[1] * _PER_WORD
    if scales.shape[1] != height or zeros.shape != (scales.shape[0], words.shape[1]):
        raise parts.corrupt(
            f"has codes {list(words.shape)}, scales {list(scales.shape)} and zeros {list(zeros.shape)}, "
            "which do not fit each other"
        )
    groups = Groups(_BITS, width, group_size(parts, width, scales.shape[0], size))
    return QuantisedMatrix(
        f"AWQ4_{groups.size}",
        (height, width),
        groups.form(has_shifts=has_zeros),
        lambda file, rows, columns: _read(parts, file, groups, rows, columns),
    )


def _read(parts: Parts, file: TensorFile, groups: Groups, rows: Span, columns: Span) -> Matrix:
    # Rows of ours are columns of the stored tensors: they are read whole and cut afterwards.
    words = read_array(file, parts.entry(".qweight"))
    scales = read_scales(file, parts.entry(".scales"))
    zeros = read_array(file, parts.entry(".qzeros"))

    def piece(start: int, stop: int) -> AffineRows:
        return AffineRows(
            hold(np.ascontiguousarray(_codes(words, (start, stop)).T), _BITS),
            np.ascontiguousarray(scales[:, start:stop].T),
            np.ascontiguousarray(_codes(zeros, (start, stop)).T).astype(np.float32),
        )

    return affine_matrix(groups, rows, columns, piece, parts.name)


def _codes(words: Array, rows: Span) -> Array:
    """Codes of some of our rows, `[stored rows, rows]`, in their true order."""
    first, last = rows[0] // _PER_WORD, -(-rows[1] // _PER_WORD)
    codes = unpack_words(np.ascontiguousarray(words[:, first:last]), _BITS)
    codes = codes.reshape(len(words), -1, _PER_WORD)[:, :, _PLACES].reshape(len(words), -1)
    return codes[:, rows[0] - first * _PER_WORD : rows[1] - first * _PER_WORD]
