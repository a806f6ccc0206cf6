"""Element types of collectives, and how two arrays are added.

An addition rounds to the type, in every place where it is made: float16 and bfloat16 are added in float32 and rounded
to the nearest, ties to even. Integers wrap. Whoever wants sums of halves with fewer roundings gives float32.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from shardcompute.collectives.group import Array
from shardcompute.core.errors import UsageError

CODES: dict[np.dtype[np.generic], int] = {
    np.dtype(name): code
    for code, name in enumerate(
        ("float32", "float16", "uint16", "float64", "int8", "uint8", "int16", "int32", "int64"), start=1
    )
}
"""The number of a type on the wire. `uint16` is bfloat16."""
DTYPES = {code: dtype for dtype, code in CODES.items()}
BFLOAT16 = np.dtype("uint16")
_QUIET = 0x0040


def code_of(array: Array) -> int:
    code = CODES.get(array.dtype)
    if code is None:
        known = ", ".join("bfloat16 as uint16" if dtype == BFLOAT16 else dtype.name for dtype in CODES)
        raise UsageError(f"collectives carry no arrays of {array.dtype}", hint=f"use one of {known}")
    return code


def add(low: Array, high: Array, out: Array) -> Array:
    """`out = low + high`, element by element; `out` may be either of them. `low` is of the lower ranks: where both are
    no numbers, the one that stays is the same on every rank."""
    if out.dtype == BFLOAT16:
        out[...] = to_bfloat16(from_bfloat16(low) + from_bfloat16(high))
        return out
    np.add(low, high, out=out)
    return out


def from_bfloat16(array: Array) -> npt.NDArray[np.float32]:
    return (array.astype(np.uint32) << 16).view(np.float32)


def to_bfloat16(array: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    bits = np.ascontiguousarray(array).view(np.uint32)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    # Rounding up could carry a NaN's last bits out of it.
    return np.where(np.isnan(array), (bits >> 16).astype(np.uint16) | np.uint16(_QUIET), rounded)
