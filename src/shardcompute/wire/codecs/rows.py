"""What a form of rows must offer, and the number tricks that several forms share.

A packed row always has the same length, known from its width alone, and is made of nothing but its own values.
"""

from __future__ import annotations

from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from shardcompute.core.errors import LinkError

Activations: TypeAlias = npt.NDArray[np.float32]
PackedRows: TypeAlias = npt.NDArray[np.uint8]
"""`[rows, row_bytes]`"""
HalfBits: TypeAlias = npt.NDArray[np.uint16]

LARGEST = np.float32(3e38)
"""Magnitudes beyond, NaN and infinity cannot be scaled: what shares a scale with them becomes NaN."""
_NAN_HALF = np.uint16(0x7FC0)
_INFINITE_HALF = np.uint16(0x7F80)


class RowCodec(Protocol):
    @property
    def name(self) -> str: ...

    def row_bytes(self, width: int) -> int: ...

    def pack(self, activations: Activations) -> PackedRows:
        """`[rows, row_bytes]`, perhaps sharing memory with `activations`."""

    def unpack(self, packed: PackedRows, width: int) -> Activations:
        """`[rows, width]`, perhaps sharing memory with `packed` and read-only as it. `LinkError` for bytes that
        `pack` never makes, as far as they would do harm."""


def round_to_bf16(exact: Activations) -> HalfBits:
    """The upper halves of float32, rounded to nearest, ties to even."""
    bits = np.ascontiguousarray(exact).view(np.uint32)
    # Adding just under half of the last kept bit, plus that bit itself.
    rounded = bits >> np.uint32(16)
    rounded &= np.uint32(1)
    rounded += np.uint32(0x7FFF)
    rounded += bits
    rounded >>= np.uint32(16)
    halves = rounded.astype("<u2")
    # A NaN's payload could carry over into infinity or zero.
    lost = np.isnan(exact)
    if lost.any():
        halves[lost] = _NAN_HALF
    return halves


def scales_of(peaks: Activations, steps: int) -> HalfBits:
    """16-bit scales (bf16) with which `steps` reach each peak: rounded up, NaN for peaks that are out of range."""
    out_of_range = ~(peaks <= LARGEST)
    if out_of_range.any():
        peaks = np.where(out_of_range, np.float32(0), peaks)
    bits = (peaks / np.float32(steps)).view(np.uint32)
    scales = ((bits + np.uint32(0xFFFF)) >> np.uint32(16)).astype("<u2")
    scales[out_of_range] = _NAN_HALF
    return scales


def widen(halves: HalfBits) -> Activations:
    """bf16 as float32."""
    bits = halves.astype(np.uint32)
    bits <<= np.uint32(16)
    return bits.view(np.float32)


def read_scales(halves: HalfBits) -> Activations:
    """Scales as they came; `LinkError` for any that `scales_of` never makes."""
    if ((halves >= _INFINITE_HALF) & (halves != _NAN_HALF)).any():
        raise LinkError("activations came with a scale that is negative or infinite")
    return widen(halves)


def quantise(values: Activations, scales: Activations) -> npt.NDArray[np.int8]:
    """`values / scales`, rounded to whole numbers; `scales` must broadcast. Zeros where the scale is 0 or NaN."""
    is_usable = scales > 0
    ratios = values / np.where(is_usable, scales, np.float32(1))
    np.rint(ratios, out=ratios)
    if not is_usable.all():
        ratios = np.where(is_usable, ratios, np.float32(0))
    return ratios.astype(np.int8)


def bytes_of(array: npt.NDArray[np.generic]) -> PackedRows:
    """A two-dimensional array's rows as bytes."""
    return np.ascontiguousarray(array).view(np.uint8)
