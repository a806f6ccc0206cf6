"""compressed-tensors: the forms that vLLM's llm-compressor writes, side by side in one checkpoint.

`pack-quantized`: `m.weight_packed` (32-bit words `[out, in · bits / 32]`), `m.weight_scale` `[out, groups]`, for
asymmetric ones `m.weight_zero_point` (words packed along `out`), with activation order `m.weight_g_idx`. `int-
quantized` and `float-quantized`: `m.weight` in int8 or eight-bit floats and `m.weight_scale`. `nvfp4-` and
`mxfp4-pack-quantized`: see `four_bit_floats`. What is on the config's `ignore` list lies there as a plain `m.weight`:
the tensors themselves say what is quantised and in which form. The groups of the config are asked only for what
tensors do not tell, bits and group sizes.
"""

from __future__ import annotations

import re
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
from shardcompute.weights.quantised.floats import (
    ACTIVATION_NOTE,
    ACTIVATION_SCALES,
    configured_tile,
    fold_float8,
)
from shardcompute.weights.quantised.four_bit_floats import Float4Parts, fold_float4
from shardcompute.weights.quantised.numbers import FLOAT8_TYPES, read_array, read_scales, unpack_words
from shardcompute.weights.quantised.scheme import PartNames, Parts, QuantisedMatrix, Scheme

_FORMATS = (
    "dense",
    "pack-quantized",
    "int-quantized",
    "float-quantized",
    "naive-quantized",
    "nvfp4-pack-quantized",
    "mxfp4-pack-quantized",
    "mxfp8-quantized",
    "mixed-precision",
)
_BITS = (2, 4, 8)
_MOST_GROUPS = 64
_MOST_TARGETS = 4096
_PATTERN = "re:"
_PATTERN_LENGTH = 256
# A quantifier behind a group, or more than three open ones, may take for ever on a name made for that.
_SLOW_PATTERN = re.compile(r"\)[*+{?]|\{|([*+].*){4}")


@dataclass(frozen=True, slots=True)
class _Group:
    """One of the config's groups: which modules it is for, and how their weights are quantised."""

    targets: tuple[str, ...]
    bits: int
    is_float: bool
    group_size: int | None
    is_symmetric: bool
    is_ordered: bool
    tile: tuple[int, int] | None

    def is_for(self, module: str) -> bool:
        return any(_matches(target, module) for target in self.targets)


def compressed_scheme(config: Mapping[str, Any]) -> Scheme:
    written = config.get("format") or "dense"
    sparsity = config.get("sparsity_config")
    sparse = sparsity.get("format", "dense") if isinstance(sparsity, dict) else "dense"
    listed = config.get("config_groups")
    values = list(listed.values()) if isinstance(listed, dict) else []
    for each in (written, *(g.get("format") or "dense" for g in values if isinstance(g, dict))):
        if each not in _FORMATS:
            raise _refused(f"the format {str(each)[:40]!r}")
    if sparse not in ("dense", None):
        raise _refused(f"sparse weights ({str(sparse)[:40]!r})")
    if config.get("transform_config"):
        raise _refused("transforms of activations")
    if len(values) > _MOST_GROUPS:
        raise _refused(f"{len(values)} groups")
    groups = tuple(_group(each) for each in values if isinstance(each, dict) and each.get("weights"))

    def packed(parts: Parts) -> QuantisedMatrix:
        return _fold_packed(parts, _group_of(parts, groups))

    def plain(parts: Parts) -> QuantisedMatrix:
        return _fold_plain(parts, _group_of(parts, groups))

    names = (
        PartNames(
            ".weight",
            ".weight_packed",
            (
                ".weight_scale",
                ".weight_zero_point",
                ".weight_shape",
                ".weight_g_idx",
                ".weight_global_scale",
            ),
            packed,
        ),
        PartNames(".weight", ".weight_scale", (".weight", ".weight_zero_point", ".weight_g_idx"), plain),
    )
    rounds = any(isinstance(each, dict) and each.get("input_activations") for each in values)
    return Scheme("compressed-tensors", names, ACTIVATION_SCALES, note=ACTIVATION_NOTE if rounds else "")


def _group(value: Mapping[str, Any]) -> _Group:
    weights, targets = value["weights"], value.get("targets")
    if not isinstance(weights, dict) or not isinstance(targets, list) or len(targets) > _MOST_TARGETS:
        raise _refused("a group without targets or weights")
    bits = weights.get("num_bits")
    if type(bits) is not int or not 1 <= bits <= 8:
        raise _refused(f"weights of {str(bits)[:16]} bits")
    size = weights.get("group_size") if weights.get("strategy") != "channel" else None
    return _Group(
        tuple(_checked_target(each) for each in targets),
        bits,
        weights.get("type") == "float",
        configured_size(size),
        bool(weights.get("symmetric", True)),
        weights.get("actorder") in ("group", "dynamic", True),
        configured_tile(weights.get("block_structure")),
    )


def _checked_target(target: Any) -> str:
    text = str(target)
    pattern = text.removeprefix(_PATTERN)
    if text != pattern:
        try:
            if len(pattern) > _PATTERN_LENGTH or _SLOW_PATTERN.search(pattern):
                raise _refused(f"the target {text[:60]!r}")
            re.compile(pattern)
        except re.error as error:
            raise _refused(f"the target {text[:60]!r} ({error})") from error
    return text


def _matches(target: str, module: str) -> bool:
    if target.startswith(_PATTERN):
        return re.match(target[len(_PATTERN) :], module[:_PATTERN_LENGTH]) is not None
    return target == "Linear" or module == target or module.endswith(f".{target}")


def _group_of(parts: Parts, groups: tuple[_Group, ...]) -> _Group:
    """Names and patterns tell better than the kind of module, as they do for those who write such files."""
    if len(groups) == 1:
        return groups[0]
    module = parts.name.removesuffix(".weight")
    named = [group for group in groups if any(_matches(t, module) for t in group.targets if t != "Linear")]
    found = named or [group for group in groups if group.is_for(module)]
    if not found:
        raise parts.corrupt("is quantised, but no group of the config is for it")
    return found[0]


def _fold_packed(parts: Parts, group: _Group) -> QuantisedMatrix:
    words, scales = parts.entry(".weight_packed"), parts.entry(".weight_scale")
    if group.is_float:
        is_nv = ".weight_global_scale" in parts
        where = Float4Parts(
            16 if is_nv else 32,
            words,
            scales,
            parts.entry(".weight_global_scale") if is_nv else None,
            is_divisor=True,
        )
        return fold_float4(parts, "NVFP4" if is_nv else "MXFP4", where)
    if group.bits not in _BITS:
        raise _refused(f"packed weights of {group.bits} bits")
    if words.dtype != "I32" or len(words.shape) != 2 or 0 in words.shape or len(scales.shape) != 2:
        raise parts.corrupt(f"has {words.dtype} codes {list(words.shape)} and scales {list(scales.shape)}")
    height, width = words.shape[0], words.shape[1] * 32 // group.bits
    groups = _groups(parts, group, height, width)
    zero_point = parts.entries.get(".weight_zero_point")
    zero_words = -(-height * group.bits // 32)
    if zero_point is not None and (zero_point.dtype, zero_point.shape) not in (
        ("I32", (zero_words, scales.shape[1])),
        ("I8", (height, scales.shape[1])),
    ):
        raise parts.corrupt(f"has {zero_point.dtype} zeros {list(zero_point.shape)} that do not fit")

    def read_codes(file: TensorFile, rows: Span) -> Array:
        stored = read_array(file, words, rows)
        # Codes of 4 and 8 bits lie in a word as they are held.
        return stored.view(np.uint8) if groups.bits in (4, 8) else hold(unpack_words(stored, 2), 2)

    return _affine(parts, group, groups, (height, width), read_codes, f"INT{group.bits}")


def _fold_plain(parts: Parts, group: _Group) -> QuantisedMatrix:
    codes, scales = parts.entry(".weight"), parts.entry(".weight_scale")
    if codes.dtype in FLOAT8_TYPES:
        return fold_float8(parts, ".weight", {".weight_scale"}, group.tile)
    if codes.dtype != "I8" or len(codes.shape) != 2 or 0 in codes.shape:
        raise parts.corrupt(f"has scales beside {codes.dtype} numbers of the shape {list(codes.shape)}")
    height, width = codes.shape
    if scales.shape in ((), (1,), (height,)):
        raise parts.corrupt(
            f"has scales {list(scales.shape)} where each row needs its own, one below another"
        )
    groups = _groups(parts, group, height, width)

    def read_codes(file: TensorFile, rows: Span) -> Array:
        return read_array(file, codes, rows).view(np.uint8) ^ np.uint8(0x80)

    return _affine(parts, group, groups, (height, width), read_codes, "INT8")


def _groups(parts: Parts, group: _Group, height: int, width: int) -> Groups:
    scales = parts.entry(".weight_scale").shape
    if len(scales) != 2 or scales[0] != height or not 0 < scales[1] <= width:
        raise parts.corrupt(f"has scales {list(scales)} for {height} rows of {width}")
    bits = group.bits if ".weight_packed" in parts else 8
    return Groups(bits, width, group_size(parts, width, scales[1], group.group_size))


def _affine(
    parts: Parts, group: _Group, groups: Groups, shape: tuple[int, int], read_codes: Any, label: str
) -> QuantisedMatrix:
    scales, zeros = parts.entry(".weight_scale"), parts.entries.get(".weight_zero_point")
    is_widened = ".weight_g_idx" in parts and group.is_ordered

    def read(file: TensorFile, rows: Span, columns: Span) -> Matrix:
        _check_shape(parts, file, shape)
        found = Groups(groups.bits, groups.width, groups.size, _order(parts, file, groups))

        def piece(start: int, stop: int) -> AffineRows:
            return AffineRows(
                read_codes(file, (start, stop)),
                read_scales(file, scales, (start, stop)),
                None if zeros is None else _zeros(parts, file, groups.bits, (start, stop)),
            )

        return affine_matrix(found, rows, columns, piece, parts.name)

    form = FLOAT32 if is_widened else groups.form(has_shifts=zeros is not None)
    return QuantisedMatrix(f"{label}_{groups.size}", shape, form, read)


def _zeros(parts: Parts, file: TensorFile, bits: int, rows: Span) -> Float32:
    """The zeros of some rows, `[rows, groups]`, counted like unsigned codes."""
    entry = parts.entry(".weight_zero_point")
    if entry.dtype == "I8":
        return read_array(file, entry, rows).astype(np.float32) + np.float32(1 << (bits - 1))
    per_word = 32 // bits
    first, last = rows[0] // per_word, -(-rows[1] // per_word)
    words = read_array(file, entry, (first, last))
    codes = unpack_words(np.ascontiguousarray(words.T), bits).T
    return codes[rows[0] - first * per_word : rows[1] - first * per_word].astype(np.float32)


def _check_shape(parts: Parts, file: TensorFile, shape: tuple[int, int]) -> None:
    entry = parts.entries.get(".weight_shape")
    if entry is None:
        return
    if entry.shape != (2,) or entry.dtype not in ("I32", "I64"):
        raise parts.corrupt("has a weight_shape that is no shape")
    found = tuple(int(each) for each in read_array(file, entry))
    if found != shape:
        raise parts.corrupt(
            f"says that it is {found[0]}×{found[1]} where its codes make {shape[0]}×{shape[1]}"
        )


def _order(parts: Parts, file: TensorFile, groups: Groups) -> Array | None:
    """The group of each column, None where every group is simply the next columns."""
    entry = parts.entries.get(".weight_g_idx")
    if entry is None:
        return None
    if entry.shape != (groups.width,) or entry.dtype not in ("I32", "I64"):
        raise parts.corrupt(f"has a g_idx of the shape {list(entry.shape)} for {groups.width} columns")
    return checked_order(parts, read_array(file, entry), groups)


def _refused(what: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"config.json: {what} of compressed-tensors cannot be run here",
        hint="use a version in pack-quantized, int-quantized or float-quantized form, or a GGUF file",
    )
