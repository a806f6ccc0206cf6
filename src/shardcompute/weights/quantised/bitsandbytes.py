"""bitsandbytes: weights in 4-bit codes of a table (nf4, fp4), or in 8-bit integers with a scale for each row.

4 bits: `m.weight` holds two codes a byte, the first in its high half, row after row without regard to rows' ends;
every `blocksize` of them have an absolute maximum in `m.weight.absmax`, and `w = table[code] · absmax`. With double
quantisation the maxima are codes themselves: `nested_quant_map[absmax] · nested_absmax + offset`. Shape and sizes
stand as JSON in `m.weight.quant_state.bitsandbytes__nf4`. No kernel here has such tables: weights are widened to
float32. 8 bits: `m.weight` (int8) and `m.SCB`, `w = code · SCB / 127`, which 8-bit blocks hold.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from shardcompute.backends.footprint import FLOAT32
from shardcompute.backends.matrix import Array, DenseMatrix, Float32, Matrix
from shardcompute.core.errors import CorruptModelError, UnsupportedModelError
from shardcompute.weights.formats.tensor_file import Span, TensorFile
from shardcompute.weights.quantised.affine import MAX_WIDTH, AffineRows, Groups, affine_matrix, pieces
from shardcompute.weights.quantised.numbers import read_array, read_scales
from shardcompute.weights.quantised.scheme import PartNames, Parts, QuantisedMatrix, Scheme

_KINDS = ("nf4", "fp4")
_STATE = ".quant_state.bitsandbytes__"
_STATE_BYTES = 4096
_PARTS_4_BIT = (
    "",
    ".quant_map",
    ".nested_absmax",
    ".nested_quant_map",
    *(_STATE + kind for kind in _KINDS),
)


def bitsandbytes_scheme(config: Mapping[str, Any]) -> Scheme:
    four, eight = bool(config.get("load_in_4bit")), bool(config.get("load_in_8bit"))
    if four == eight:
        raise UnsupportedModelError(
            "config.json: bitsandbytes weights that are neither in 4 nor in 8 bits cannot be run here",
            hint="use a version that says load_in_4bit or load_in_8bit, or the unquantised checkpoint",
        )
    names = PartNames("", ".absmax", _PARTS_4_BIT, _fold_4_bit)
    if eight:
        names = PartNames(".weight", ".SCB", (".weight", ".weight_format"), _fold_8_bit)
    return Scheme("bitsandbytes", (names,))


@dataclass(frozen=True, slots=True)
class _State:
    """What bitsandbytes writes beside a 4-bit matrix."""

    shape: tuple[int, int]
    block_size: int
    nested_size: int | None
    offset: float


def _fold_4_bit(parts: Parts) -> QuantisedMatrix:
    codes, absmax = parts.entry(""), parts.entry(".absmax")
    kind = next((kind for kind in _KINDS if _STATE + kind in parts), None)
    if kind is None:
        raise parts.corrupt("does not say that it is nf4 or fp4")
    count = 2 * math.prod(codes.shape)
    if codes.dtype != "U8" or not count or parts.entry(".quant_map").shape != (16,):
        raise parts.corrupt(f"has {codes.dtype} codes and {parts.entry('.quant_map').shape} values for them")
    if parts.file is None:
        # Rows and columns stand in what is not read here; their product is known.
        return QuantisedMatrix(kind.upper(), (1, count), FLOAT32, lambda *_: _not_here())
    state = _read_state(parts, parts.file, kind)
    blocks = -(-count // state.block_size)
    if math.prod(state.shape) != count or absmax.shape != (blocks,):
        raise parts.corrupt(
            f"has {count} codes and {list(absmax.shape)} maxima for {list(state.shape)} in blocks of {state.block_size}"
        )
    if state.nested_size is not None and (
        absmax.dtype != "U8"
        or parts.entry(".nested_quant_map").shape != (256,)
        or parts.entry(".nested_absmax").shape != (-(-blocks // state.nested_size),)
    ):
        raise parts.corrupt("has maxima, quantised themselves, that do not fit each other")
    label = f"{kind.upper()}_{state.block_size}"
    return QuantisedMatrix(
        label,
        state.shape,
        FLOAT32,
        lambda file, rows, columns: _read_4_bit(parts, file, state, rows, columns),
    )


def _read_state(parts: Parts, file: TensorFile, kind: str) -> _State:
    entry = parts.entry(_STATE + kind)
    if entry.dtype != "U8" or entry.size_bytes > _STATE_BYTES:
        raise parts.corrupt(f"has {entry.size_bytes} bytes that should describe it")
    try:
        found = json.loads(bytes(file.read_bytes(entry.name, 0, entry.size_bytes)))
        shape = [_size(each) for each in found["shape"]]
        nested = found.get("nested_blocksize")
        state = _State(
            (shape[0], shape[1]),
            _size(found["blocksize"]),
            None if nested is None else _size(nested),
            float(found.get("nested_offset", 0.0)),
        )
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError) as error:
        raise parts.corrupt(f"is described by what cannot be read: {error}") from error
    if len(shape) != 2 or not math.isfinite(state.offset):
        raise parts.corrupt("is described as no matrix")
    return state


def _size(value: Any) -> int:
    if type(value) is not int or not 0 < value <= MAX_WIDTH:
        raise ValueError(f"{str(value)[:32]!r} is no size")
    return value


def _not_here() -> Matrix:
    raise CorruptModelError("the weights of this matrix are not here", hint="fetch the model again")


def _read_4_bit(parts: Parts, file: TensorFile, state: _State, rows: Span, columns: Span) -> Matrix:
    width = state.shape[1]
    table = read_scales(file, parts.entry(".quant_map"))
    # The value of both codes of every byte, the first of them in the high half.
    pairs = np.stack([table[np.arange(256) >> 4], table[np.arange(256) & 15]], axis=1)
    maxima = _maxima(parts, file, state)
    values = np.empty((rows[1] - rows[0], columns[1] - columns[0]), np.float32)
    for start, stop in pieces(rows, width):
        first, last = start * width, stop * width
        low, high = first // 2, -(-last // 2)
        raw = np.frombuffer(file.read_bytes(parts.entry("").name, low, high - low), np.uint8)
        dense = pairs[raw].reshape(-1)[first - 2 * low :][: last - first]
        dense = dense * maxima[np.arange(first, last) // state.block_size]
        values[start - rows[0] : stop - rows[0]] = dense.reshape(-1, width)[:, slice(*columns)]
    return DenseMatrix(values)


def _maxima(parts: Parts, file: TensorFile, state: _State) -> Float32:
    entry = parts.entry(".absmax")
    if state.nested_size is None:
        return read_scales(file, entry)
    codes = read_array(file, entry)
    outer = read_scales(file, parts.entry(".nested_absmax"))
    table = read_scales(file, parts.entry(".nested_quant_map"))
    scaled = table[codes] * np.repeat(outer, state.nested_size)[: len(codes)]
    return (scaled + np.float32(state.offset)).astype(np.float32)


def _fold_8_bit(parts: Parts) -> QuantisedMatrix:
    codes, scales = parts.entry(".weight"), parts.entry(".SCB")
    if codes.dtype != "I8" or len(codes.shape) != 2 or 0 in codes.shape or scales.shape != codes.shape[:1]:
        raise parts.corrupt(f"has {codes.dtype} codes {list(codes.shape)} and scales {list(scales.shape)}")
    height, width = codes.shape
    groups = Groups(8, width, width)

    def read(file: TensorFile, rows: Span, columns: Span) -> Matrix:
        if ".weight_format" in parts and np.any(read_array(file, parts.entry(".weight_format"))):
            raise UnsupportedModelError(
                f"{parts.name!r} in {file.name} is laid out for one kernel of bitsandbytes alone",
                hint="save the model again with a current bitsandbytes, or use the unquantised checkpoint",
            )
        factors = read_scales(file, scales) / np.float32(127)

        def piece(start: int, stop: int) -> AffineRows:
            return AffineRows(signed(read_array(file, codes, (start, stop))), factors[start:stop, None], None)

        return affine_matrix(groups, rows, columns, piece, parts.name)

    return QuantisedMatrix("BNB_INT8", (height, width), groups.form(has_shifts=False), read)


def signed(codes: Array) -> Array:
    """Codes from −128 to 127 as they are held: 128 added."""
    return codes.view(np.uint8) ^ np.uint8(0x80)
