"""GPTQ: integers of 2, 4 or 8 bits in groups of input columns, stored transposed.

A matrix `m.weight` lies in `m.qweight` (32-bit words `[in · bits / 32, out]`, a word holds neighbouring input
columns), `m.scales` (`[groups, out]`), `m.qzeros` (words `[groups, out · bits / 32]`) and `m.g_idx`, the group of
each input column. `w = scale · (code − zero)`. Files of the first format store every zero less one;
`checkpoint_format: gptq_v2` does not. With `desc_act` the columns of a group do not lie together: such a matrix is
widened. Bits and group sizes are taken from the shapes where the tensors tell them, because single matrices may have
their own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from shardcompute.backends.footprint import FLOAT32
from shardcompute.backends.matrix import Array, Float32, Matrix
from shardcompute.core.errors import UnsupportedModelError
from shardcompute.weights.formats.tensor_file import Span, TensorFile
from shardcompute.weights.quantised.affine import (
    AffineRows,
    Groups,
    affine_matrix,
    checked_order,
    configured_size,
    group_size,
    hold,
)
from shardcompute.weights.quantised.numbers import read_array, read_scales, unpack_words
from shardcompute.weights.quantised.scheme import PartNames, Parts, QuantisedMatrix, Scheme

_BITS = (2, 4, 8)
_FORMATS = {"gptq": 1, "gptq_v2": 0}
"""What is added to a stored zero, by `checkpoint_format`."""


@dataclass(frozen=True, slots=True)
class _Rule:
    """What the config says of all matrices."""

    bits: int
    group_size: int | None
    zero_offset: int
    is_ordered: bool
    is_symmetric: bool


def gptq_scheme(config: Mapping[str, Any]) -> Scheme:
    bits, written = config.get("bits"), config.get("checkpoint_format") or "gptq"
    if bits not in _BITS or type(bits) is not int:
        raise UnsupportedModelError(
            f"config.json: GPTQ weights of {str(bits)[:16]} bits cannot be run here",
            hint="use a version in 4 or 8 bits, or a GGUF file",
        )
    if written not in _FORMATS:
        raise UnsupportedModelError(
            f"config.json: GPTQ's checkpoint_format {str(written)[:32]!r} is laid out for one kernel alone",
            hint="use a version in the format gptq or gptq_v2, or a GGUF file",
        )
    rule = _Rule(
        bits,
        configured_size(config.get("group_size")),
        _FORMATS[written],
        is_ordered=bool(config.get("desc_act")),
        is_symmetric=bool(config.get("sym", True)),
    )

    def fold(parts: Parts) -> QuantisedMatrix:
        return _fold(parts, rule)

    names = PartNames(".weight", ".qweight", (".scales", ".qzeros", ".g_idx"), fold)
    return Scheme("gptq", (names,), writes_biases=True)


def _fold(parts: Parts, rule: _Rule) -> QuantisedMatrix:
    bits = rule.bits
    words, scales, zeros = parts.entry(".qweight"), parts.entry(".scales"), parts.entry(".qzeros")
    if words.dtype not in ("I32", "U32") or zeros.dtype not in ("I32", "U32"):
        raise parts.corrupt(f"has {words.dtype} codes and {zeros.dtype} zeros where words of 32 bits are due")
    if len(words.shape) != 2 or len(scales.shape) != 2 or not words.shape[0] or not scales.shape[0]:
        raise parts.corrupt("has codes or scales that are no matrix")
    height = words.shape[1]
    if ".g_idx" in parts:
        index = parts.entry(".g_idx")
        if index.dtype not in ("I32", "I64") or len(index.shape) != 1 or not index.shape[0]:
            raise parts.corrupt("has a g_idx that is no list of groups")
        width = index.shape[0]
        bits = words.shape[0] * 32 // width
    else:
        width = words.shape[0] * 32 // bits
    group_count = scales.shape[0]
    if (
        bits not in _BITS
        or words.shape[0] * 32 != width * bits
        or group_count > width
        or height * bits % 32
        or scales.shape[1] != height
        or zeros.shape != (group_count, height * bits // 32)
    ):
        raise parts.corrupt(
            f"has codes {list(words.shape)}, scales {list(scales.shape)} and zeros {list(zeros.shape)}, "
            "which do not fit each other"
        )
    groups = Groups(bits, width, group_size(parts, width, group_count, rule.group_size))
    is_widened = rule.is_ordered and ".g_idx" in parts and group_count > 1
    return QuantisedMatrix(
        f"GPTQ{bits}_{groups.size}",
        (height, width),
        FLOAT32 if is_widened else groups.form(has_shifts=not rule.is_symmetric),
        lambda file, rows, columns: _read(parts, file, groups, rule.zero_offset, rows, columns),
    )


def _read(
    parts: Parts, file: TensorFile, groups: Groups, zero_offset: int, rows: Span, columns: Span
) -> Matrix:
    order = _order(parts, file, groups)
    groups = Groups(groups.bits, groups.width, groups.size, order)
    # Rows of ours are columns of the stored tensors: they are read whole and cut afterwards.
    words = read_array(file, parts.entry(".qweight")).view(np.uint32)
    scales = read_scales(file, parts.entry(".scales"))
    stored = read_array(file, parts.entry(".qzeros"))

    def piece(start: int, stop: int) -> AffineRows:
        return AffineRows(
            transposed_codes(words[:, start:stop], groups.bits),
            np.ascontiguousarray(scales[:, start:stop].T),
            np.ascontiguousarray(_zeros(stored, groups.bits, zero_offset, (start, stop)).T),
        )

    return affine_matrix(groups, rows, columns, piece, parts.name)


def transposed_codes(words: Array, bits: int) -> Array:
    """Words `[in · bits / 32, out]` as held codes `[out, …]`. Codes of 4 and 8 bits lie in a word as they are held."""
    turned = np.ascontiguousarray(words.T)
    if bits in (4, 8):
        return turned.astype("<u4", copy=False).view(np.uint8)
    return hold(unpack_words(turned, bits), bits)


def _zeros(stored: Array, bits: int, offset: int, rows: Span) -> Float32:
    """The zeros of some rows, `[groups, rows]`."""
    per_word = 32 // bits
    first, last = rows[0] // per_word, -(-rows[1] // per_word)
    codes = unpack_words(np.ascontiguousarray(stored[:, first:last]), bits)
    codes = codes[:, rows[0] - first * per_word : rows[1] - first * per_word]
    # A zero of 0 is stored as the largest code: adding one wraps around.
    return ((codes + np.uint8(offset)) & np.uint8((1 << bits) - 1)).astype(np.float32)


def _order(parts: Parts, file: TensorFile, groups: Groups) -> Array | None:
    """The group of each column, None where every group is simply the next columns."""
    if ".g_idx" not in parts:
        return None
    return checked_order(parts, read_array(file, parts.entry(".g_idx")), groups)
