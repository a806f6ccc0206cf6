"""I quants: groups of weights looked up in codebooks (IQ1, IQ2, IQ3).

Sizes of IQ2 and IQ3_XXS are unevenly spaced and held in 8-bit codes. Those of IQ3_S are odd numbers, `2k + 1`, so that
4 bits hold k, and a shift of half a step the rest. IQ1_S adds an eighth of its scale, up or down, to 32 weights at
once, which is a shift; IQ1_M to 8 at once, for which blocks are too long: it counts in eighths instead.
"""

from __future__ import annotations

from functools import cache

import numpy as np
from numpy.typing import NDArray

from shardcompute.backends.matrix import Float32
from shardcompute.weights.formats.blocks.codebooks import codebook
from shardcompute.weights.formats.blocks.layout import (
    BlockLayout,
    Bytes,
    Decoded,
    centre_8_bits,
    float16_at,
    pack_4_bits,
    split_halves,
    words_at,
)

Signed = NDArray[np.int8]


@cache
def _signs() -> Signed:
    """By a byte of sign bits, 1 or −1 for each of 8 weights: `[256, 8]`."""
    bits = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
    return np.int8(1) - np.int8(2) * bits.astype(np.int8)


@cache
def _even_signs() -> Bytes:
    """By 7 stored sign bits, all 8: an even number of them is set."""
    seven = np.arange(128, dtype=np.uint8)
    odd = np.unpackbits(seven[:, None], axis=1).sum(axis=1).astype(np.uint8) & np.uint8(1)
    whole: Bytes = seven | (odd << np.uint8(7))
    return whole


def _halves(packed: Bytes) -> Bytes:
    """`[n, bytes]` → `[n, 2 · bytes]`: the low half of each byte, then its high half."""
    return np.stack([packed & np.uint8(0x0F), packed >> np.uint8(4)], axis=-1).reshape(len(packed), -1)


def _packed_signs(words: NDArray[np.unsignedinteger]) -> Signed:
    """Words of four times 7 sign bits, below a scale of 4: `[n, words]` → `[n, 4 · words, 8]`."""
    indices = (words[:, :, None] >> np.array([0, 7, 14, 21], np.uint32)) & np.uint32(0x7F)
    signs: Signed = _signs()[_even_signs()[indices.reshape(len(words), -1)]]
    return signs


def _with_signs(sizes: Signed, signs: Signed, block_size: int) -> Bytes:
    """8-bit codes of sizes with their signs, in blocks."""
    return centre_8_bits(sizes.reshape(signs.shape) * signs).reshape(len(signs), -1, block_size)


def _quarter_scales(blocks: Bytes, short: NDArray[np.unsignedinteger], part: float) -> Float32:
    return float16_at(blocks, 0) * (np.float32(0.5) + short.astype(np.float32)) * np.float32(part)


def _decode_iq2_xxs(blocks: Bytes) -> Decoded:
    words = words_at(blocks, 2, 66, "<u4").reshape(-1, 8, 2)
    sizes = codebook("IQ2_XXS")[np.ascontiguousarray(words[:, :, 0]).view(np.uint8).reshape(-1, 32)]
    codes = _with_signs(sizes, _packed_signs(words[:, :, 1]), 32)
    return codes, _quarter_scales(blocks, words[:, :, 1] >> np.uint32(28), 0.25), None


def _decode_iq2_xs(blocks: Bytes) -> Decoded:
    words = words_at(blocks, 2, 66, "<u2")
    signs = _signs()[_even_signs()[words >> np.uint16(9)]]
    codes = _with_signs(codebook("IQ2_XS")[words & np.uint16(511)], signs, 16)
    return codes, _quarter_scales(blocks, _halves(blocks[:, 66:74]), 0.25), None


def _decode_iq2_s(blocks: Bytes) -> Decoded:
    high = (blocks[:, 66:74, None] >> np.array([0, 2, 4, 6], np.uint8)) & np.uint8(3)
    indices = blocks[:, 2:34].astype(np.uint16) | (high.reshape(-1, 32).astype(np.uint16) << np.uint16(8))
    codes = _with_signs(codebook("IQ2_S")[indices], _signs()[blocks[:, 34:66]], 16)
    return codes, _quarter_scales(blocks, _halves(blocks[:, 74:82]), 0.25), None


def _decode_iq3_xxs(blocks: Bytes) -> Decoded:
    words = words_at(blocks, 66, 98, "<u4")
    codes = _with_signs(codebook("IQ3_XXS")[blocks[:, 2:66]], _packed_signs(words), 32)
    return codes, _quarter_scales(blocks, words >> np.uint32(28), 0.5), None


def _decode_iq3_s(blocks: Bytes) -> Decoded:
    high = np.unpackbits(blocks[:, 66:74], axis=1, bitorder="little").astype(np.uint16)
    indices = blocks[:, 2:66].astype(np.uint16) | (high << np.uint16(8))
    signs = _signs()[blocks[:, 74:106]]
    odd = codebook("IQ3_S")[indices].reshape(signs.shape) * signs
    codes = pack_4_bits(((odd + np.int8(15)) >> np.int8(1)).view(np.uint8).reshape(-1, 8, 32))
    halves = float16_at(blocks, 0) * (np.uint8(2) * _halves(blocks[:, 106:110]) + np.uint8(1))
    return codes, np.float32(2) * halves, halves


def _decode_iq1_s(blocks: Bytes) -> Decoded:
    words = words_at(blocks, 34, 50, "<u2")
    high = (words[:, :, None] >> np.array([0, 3, 6, 9], np.uint16)) & np.uint16(7)
    groups = codebook("IQ1")[blocks[:, 2:34].astype(np.uint16) | (high.reshape(-1, 32) << np.uint16(8))]
    codes = pack_4_bits((groups + np.int8(8)).view(np.uint8).reshape(-1, 8, 32))
    short = np.uint16(2) * ((words >> np.uint16(12)) & np.uint16(7)) + np.uint16(1)
    scales = float16_at(blocks, 0) * short.astype(np.float32)
    eighth = np.where(words & np.uint16(0x8000), np.float32(-0.125), np.float32(0.125))
    return codes, scales, scales * eighth


def _decode_iq1_m(blocks: Bytes) -> Decoded:
    words = words_at(blocks, 48, 56, "<u2")
    high = split_halves(blocks[:, 32:48, None]).reshape(-1, 32)
    indices = blocks[:, :32].astype(np.uint16) | ((high & np.uint8(7)).astype(np.uint16) << np.uint16(8))
    eighth = np.where(high & np.uint8(8), np.int8(-1), np.int8(1))
    codes = centre_8_bits(np.int8(8) * codebook("IQ1")[indices] + eighth[:, :, None]).reshape(-1, 16, 16)
    short = (words[:, :, None] >> np.array([0, 3, 6, 9], np.uint16)) & np.uint16(7)
    # The float16 scale lies in the highest 4 bits of the four words.
    pieces = (words & np.uint16(0xF000)) >> np.array([12, 8, 4, 0], np.uint16)
    whole = np.bitwise_or.reduce(pieces, axis=1).view(np.float16).astype(np.float32)[:, None]
    steps = whole * (np.uint16(2) * short.reshape(-1, 16) + np.uint16(1)).astype(np.float32)
    return codes, steps * np.float32(0.125), None


I_QUANTS = {
    "IQ1_S": BlockLayout(256, 50, 4, 32, True, _decode_iq1_s),
    "IQ1_M": BlockLayout(256, 56, 8, 16, False, _decode_iq1_m),
    "IQ2_XXS": BlockLayout(256, 66, 8, 32, False, _decode_iq2_xxs),
    "IQ2_XS": BlockLayout(256, 74, 8, 16, False, _decode_iq2_xs),
    "IQ2_S": BlockLayout(256, 82, 8, 16, False, _decode_iq2_s),
    "IQ3_XXS": BlockLayout(256, 98, 8, 32, False, _decode_iq3_xxs),
    "IQ3_S": BlockLayout(256, 110, 4, 32, True, _decode_iq3_s),
}
