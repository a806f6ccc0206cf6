"""GGUF quantised blocks turned into the blocks our kernels take, without a second rounding.

A decoder takes raw file blocks `[n, file_bytes]` and gives codes `[n, parts, bytes]`, scales `[n, parts]` and
shifts `[n, parts]` or None, where one file block holds `parts` blocks of ours, so that every weight is
`scale · (code − 2^(bits−1)) + shift`. Values of 5 and 6 bits are held in 8-bit codes. Where the file has a
minimum, codes stay centred and the shift takes up the difference: rounded activations then cost least.
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


def _float16(blocks: Bytes, start: int) -> Float32:
    """The float16 at byte `start` of every block, widened: `[n, 1]`."""
    halves = np.ascontiguousarray(blocks[:, start : start + 2]).view("<f2")
    return halves.astype(np.float32)


def _split_halves(packed: Bytes) -> Bytes:
    """`[n, groups, width]` bytes → `[n, groups, 2, width]`: all low halves, then all high halves."""
    return np.stack([packed & 0x0F, packed >> 4], axis=2)


def _pair_neighbours(packed: Bytes) -> Bytes:
    """Like `_split_halves`, with neighbours packed again two in a byte: `[n, groups, 2, width / 2]`."""
    even, odd = packed[:, :, 0::2], packed[:, :, 1::2]
    return np.stack([(even & 0x0F) | (odd << 4), (even >> 4) | (odd & 0xF0)], axis=2)


def _scales_and_minima(blocks: Bytes) -> tuple[Float32, Float32]:
    """The eight scales and minima of a Q4_K or Q5_K block: 6 bits each, packed into bytes 4 to 16."""
    packed = blocks[:, 4:16].reshape(-1, 3, 4)
    first, second, rest = packed[:, 0], packed[:, 1], packed[:, 2]
    scales = np.concatenate([first & 0x3F, (rest & 0x0F) | ((first >> 2) & 0x30)], axis=1)
    minima = np.concatenate([second & 0x3F, (rest >> 4) | ((second >> 2) & 0x30)], axis=1)
    return scales * _float16(blocks, 0), minima * _float16(blocks, 2)


def _decode_q4_0(blocks: Bytes) -> Decoded:
    codes = _pair_neighbours(blocks[:, None, 2:])
    return codes.reshape(-1, 1, 16), _float16(blocks, 0), None


def _decode_q4_1(blocks: Bytes) -> Decoded:
    codes = _pair_neighbours(blocks[:, None, 4:])
    scales = _float16(blocks, 0)
    return codes.reshape(-1, 1, 16), scales, _float16(blocks, 2) + np.float32(8) * scales


def _five_bit_codes(high: Bytes, low: Bytes) -> Bytes:
    high_bits = np.unpackbits(high, axis=1, bitorder="little")
    values = _split_halves(low[:, None, :]).reshape(-1, 32) | (high_bits << np.uint8(4))
    return (values + np.uint8(128 - 16)).reshape(-1, 1, 32)


def _decode_q5_0(blocks: Bytes) -> Decoded:
    return _five_bit_codes(blocks[:, 2:6], blocks[:, 6:]), _float16(blocks, 0), None


def _decode_q5_1(blocks: Bytes) -> Decoded:
    scales = _float16(blocks, 0)
    return (
        _five_bit_codes(blocks[:, 4:8], blocks[:, 8:]),
        scales,
        _float16(blocks, 2) + np.float32(16) * scales,
    )


def _decode_q8_0(blocks: Bytes) -> Decoded:
    codes = blocks[:, 2:] ^ np.uint8(0x80)  # two's complement + 128
    return codes.reshape(-1, 1, 32), _float16(blocks, 0), None


def _decode_q4_k(blocks: Bytes) -> Decoded:
    scales, minima = _scales_and_minima(blocks)
    codes = _pair_neighbours(blocks[:, 16:].reshape(-1, 4, 32))
    return codes.reshape(-1, 8, 16), scales, np.float32(8) * scales - minima


def _decode_q5_k(blocks: Bytes) -> Decoded:
    scales, minima = _scales_and_minima(blocks)
    positions = np.arange(8, dtype=np.uint8)[:, None]
    high_bits = (blocks[:, None, 16:48] >> positions) & np.uint8(1)
    values = _split_halves(blocks[:, 48:].reshape(-1, 4, 32)).reshape(-1, 8, 32) | (high_bits << np.uint8(4))
    return values + np.uint8(128 - 16), scales, np.float32(16) * scales - minima


def _decode_q6_k(blocks: Bytes) -> Decoded:
    low = _split_halves(blocks[:, :128].reshape(-1, 2, 64)).reshape(-1, 8, 32)
    positions = np.array([0, 2, 4, 6], dtype=np.uint8)[:, None]
    high = (blocks[:, 128:192].reshape(-1, 2, 1, 32) >> positions) & np.uint8(3)
    values = low | (high.reshape(-1, 8, 32) << np.uint8(4))
    scales = blocks[:, 192:208].view(np.int8) * _float16(blocks, 208)
    return (values + np.uint8(128 - 32)).reshape(-1, 16, 16), scales, None


BLOCK_LAYOUTS: dict[str, BlockLayout] = {
    "Q4_0": BlockLayout(32, 18, 4, 32, False, _decode_q4_0),
    "Q4_1": BlockLayout(32, 20, 4, 32, True, _decode_q4_1),
    "Q5_0": BlockLayout(32, 22, 8, 32, False, _decode_q5_0),
    "Q5_1": BlockLayout(32, 24, 8, 32, True, _decode_q5_1),
    "Q8_0": BlockLayout(32, 34, 8, 32, False, _decode_q8_0),
    "Q4_K": BlockLayout(256, 144, 4, 32, True, _decode_q4_k),
    "Q5_K": BlockLayout(256, 176, 8, 32, True, _decode_q5_k),
    "Q6_K": BlockLayout(256, 210, 8, 16, False, _decode_q6_k),
}
