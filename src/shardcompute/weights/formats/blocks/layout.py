"""Block layout: how a number type lies in a file, and as what its weights are held here.

A decoder takes raw file blocks `[n, file_bytes]` and gives codes `[n, parts, bytes]`, scales `[n, parts]` and
shifts `[n, parts]` or None, where one file block holds `parts` blocks of ours, so that every weight is
`scale · (code − 2^(bits−1)) + shift`. No decoder rounds: products of a file's short scales are exact in float32, and so
are shifts unless scale and minimum of a block are hundreds of times apart.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shardcompute.backends.matrix import Float32

Bytes = NDArray[np.uint8]
Decoded = tuple[Bytes, Float32, Float32 | None]


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """How one GGUF type lies in the file, and the bits and block size that its weights get here."""

    file_block: int
    file_bytes: int
    bits: int
    block_size: int
    has_shifts: bool
    decode: Callable[[Bytes], Decoded]

    @property
    def parts(self) -> int:
        return self.file_block // self.block_size

    @property
    def code_bytes(self) -> int:
        return self.block_size * self.bits // 8


def float16_at(blocks: Bytes, start: int) -> Float32:
    """The float16 at byte `start` of every block, widened: `[n, 1]`."""
    halves = np.ascontiguousarray(blocks[:, start : start + 2]).view("<f2")
    return halves.astype(np.float32)


def words_at(blocks: Bytes, start: int, stop: int, dtype: str) -> NDArray[np.unsignedinteger]:
    """The little-endian words in bytes `[start, stop)` of every block: `[n, words]`."""
    return np.ascontiguousarray(blocks[:, start:stop]).view(dtype)


def split_halves(packed: Bytes) -> Bytes:
    """`[n, groups, width]` bytes → `[n, groups, 2, width]`: all low halves, then all high halves."""
    return np.stack([packed & 0x0F, packed >> 4], axis=2)


def split_quarters(packed: Bytes) -> Bytes:
    """`[n, groups, width]` bytes → `[n, groups, 4, width]`: the lowest two bits of all, then the next two, …"""
    positions = np.array([0, 2, 4, 6], dtype=np.uint8)[:, None]
    return (packed[:, :, None, :] >> positions) & np.uint8(3)


def pair_neighbours(packed: Bytes) -> Bytes:
    """Like `split_halves`, with neighbours packed again two in a byte: `[n, groups, 2, width / 2]`."""
    even, odd = packed[:, :, 0::2], packed[:, :, 1::2]
    return np.stack([(even & 0x0F) | (odd << 4), (even >> 4) | (odd & 0xF0)], axis=2)


def pack_4_bits(codes: Bytes) -> Bytes:
    """Codes below 16 along the last axis, two in a byte."""
    return codes[..., 0::2] | (codes[..., 1::2] << np.uint8(4))


def centre_8_bits(values: NDArray[np.int8]) -> Bytes:
    """Signed values as 8-bit codes."""
    return values.view(np.uint8) ^ np.uint8(0x80)
