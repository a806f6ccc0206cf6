"""Small number types of quantised checkpoints, widened to float32, and tensors of them read from a file.

Eight-bit floats and four-bit codes become numbers by tables, made from what the types are by definition.
"""

from __future__ import annotations

from functools import cache

import numpy as np

from shardcompute.backends.matrix import Array, Float32, widen
from shardcompute.core.errors import CorruptModelError, UnsupportedModelError
from shardcompute.weights.formats.tensor_file import Span, TensorEntry, TensorFile

FLOAT8_TYPES = ("F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ")
SCALE_TYPES = ("F32", "F16", "BF16", "F8_E4M3", "F8_E8M0")
_PLAIN = {
    "F64": "<f8",
    "F32": "<f4",
    "F16": "<f2",
    "BF16": "<u2",
    "I64": "<i8",
    "I32": "<i4",
    "U32": "<u4",
    "I16": "<i2",
    "I8": "i1",
    "U8": "u1",
    "F8_E8M0": "u1",
    **dict.fromkeys(FLOAT8_TYPES, "u1"),
}
# E2M1: sign, two bits of exponent, one of mantissa.
FP4_HALVES = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.int8)
"""Twice the value of every four-bit float: whole numbers."""


@cache
def float8_table(dtype: str) -> Float32:
    """The value of every byte of an eight-bit float type; what means no number is NaN."""
    mantissa_bits = 3 if dtype.startswith("F8_E4M3") else 2
    bias = {"F8_E4M3": 7, "F8_E5M2": 15, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 16}[dtype]
    codes = np.arange(256)
    exponent = (codes & 0x7F) >> mantissa_bits
    mantissa = (codes & ((1 << mantissa_bits) - 1)) / (1 << mantissa_bits)
    normal = (1 + mantissa) * np.exp2(exponent - float(bias))
    values = np.where(exponent == 0, mantissa * np.exp2(1.0 - bias), normal)
    values = np.where(codes & 0x80, -values, values)
    if dtype.endswith("FNUZ"):
        values[0x80] = np.nan
    elif dtype == "F8_E4M3":
        values[(codes & 0x7F) == 0x7F] = np.nan
    else:
        values[exponent == 31] = np.nan  # infinite or no number: neither is a weight
    table: Float32 = values.astype(np.float32)
    return table


def powers_of_two(exponents: Array) -> Float32:
    """What bytes of the type E8M0 mean, 2^(byte − 127); the byte 255 is NaN."""
    with np.errstate(over="ignore"):
        values = np.exp2(exponents.astype(np.float64) - 127).astype(np.float32)
    return np.where(exponents == 255, np.float32(np.nan), values)


def read_array(file: TensorFile, entry: TensorEntry, rows: Span | None = None) -> Array:
    """A tensor, or innermost rows of it, counted through, as it is stored; bfloat16 and eight-bit floats as raw
    unsigned integers."""
    dtype = _PLAIN.get(entry.dtype)
    if dtype is None:
        raise UnsupportedModelError(
            f"{entry.name!r} in {file.name} holds {entry.dtype} numbers, which cannot be run here",
            hint="use another quantised version of the model, or a GGUF file",
        )
    if rows is None:
        raw = file.read_bytes(entry.name, 0, entry.size_bytes)
        return np.frombuffer(raw, np.dtype(dtype)).reshape(entry.shape)
    count = rows[1] - rows[0]
    raw = file.read_bytes(entry.name, rows[0] * entry.row_bytes, count * entry.row_bytes)
    return np.frombuffer(raw, np.dtype(dtype)).reshape(count, entry.shape[-1])


def read_scales(
    file: TensorFile, entry: TensorEntry, rows: Span | None = None, *, is_power: bool = False
) -> Float32:
    """Scales as float32, all finite; bytes are powers of two where `is_power` says so."""
    values = read_array(file, entry, rows)
    if entry.dtype == "F8_E8M0" or (is_power and entry.dtype == "U8"):
        values = powers_of_two(values)
    elif entry.dtype in FLOAT8_TYPES:
        values = float8_table(entry.dtype)[values]
    elif entry.dtype in ("F32", "F16", "BF16"):
        values = widen(values)
    else:
        raise CorruptModelError(
            f"the scales {entry.name!r} in {file.name} are {entry.dtype} numbers",
            hint="the configuration and the weights may belong to different models; fetch both again",
        )
    if not np.isfinite(values).all():
        raise CorruptModelError(
            f"{entry.name!r} in {file.name} has scales that are infinite or not numbers",
            hint="fetch the file again; it is damaged",
        )
    return values


def unpack_words(words: Array, bits: int) -> Array:
    """Codes of the last axis of 32-bit words, lowest bits first: `[…, n]` → `[…, n · (32 // bits)]` uint8."""
    words = words.view(np.uint32) if words.dtype != np.uint32 else words
    shifts = np.arange(32 // bits, dtype=np.uint32) * np.uint32(bits)
    codes = (words[..., None] >> shifts) & np.uint32((1 << bits) - 1)
    unpacked: Array = codes.astype(np.uint8).reshape(*words.shape[:-1], -1)
    return unpacked
