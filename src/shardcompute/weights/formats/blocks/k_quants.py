"""K quants: super-blocks of 256 weights whose parts have short scales (and minima) of their own."""

from __future__ import annotations

import numpy as np

from shardcompute.backends.matrix import Float32
from shardcompute.weights.formats.blocks.layout import (
    BlockLayout,
    Bytes,
    Decoded,
    float16_at,
    pack_4_bits,
    pair_neighbours,
    split_halves,
    split_quarters,
)


def _scales_and_minima(blocks: Bytes) -> tuple[Float32, Float32]:
    """The eight scales and minima of a Q4_K or Q5_K block: 6 bits each, packed into bytes 4 to 16."""
    packed = blocks[:, 4:16].reshape(-1, 3, 4)
    first, second, rest = packed[:, 0], packed[:, 1], packed[:, 2]
    scales = np.concatenate([first & 0x3F, (rest & 0x0F) | ((first >> 2) & 0x30)], axis=1)
    minima = np.concatenate([second & 0x3F, (rest >> 4) | ((second >> 2) & 0x30)], axis=1)
    return scales * float16_at(blocks, 0), minima * float16_at(blocks, 2)


def _decode_q2_k(blocks: Bytes) -> Decoded:
    packed = blocks[:, :16]
    scales = (packed & np.uint8(0x0F)) * float16_at(blocks, 80)
    minima = (packed >> np.uint8(4)) * float16_at(blocks, 82)
    values = split_quarters(blocks[:, 16:80].reshape(-1, 2, 32)).reshape(-1, 16, 16)
    return pack_4_bits(values + np.uint8(8 - 2)), scales, np.float32(2) * scales - minima


def _decode_q3_k(blocks: Bytes) -> Decoded:
    low = split_quarters(blocks[:, 32:96].reshape(-1, 2, 32)).reshape(-1, 8, 32)
    positions = np.arange(8, dtype=np.uint8)[:, None]
    high = (blocks[:, None, :32] >> positions) & np.uint8(1)
    codes = (low | (high << np.uint8(2))) + np.uint8(8 - 4)
    return pack_4_bits(codes.reshape(-1, 16, 16)), _q3_k_scales(blocks), None


def _q3_k_scales(blocks: Bytes) -> Float32:
    """Sixteen signed scales of 6 bits, their low 4 in bytes 96 to 104, their high 2 in bytes 104 to 108."""
    low = split_halves(blocks[:, 96:104][:, None]).reshape(-1, 16)
    high = split_quarters(blocks[:, 104:108][:, None]).reshape(-1, 16)
    return ((low | (high << np.uint8(4))).astype(np.int8) - np.int8(32)) * float16_at(blocks, 108)


def _decode_q4_k(blocks: Bytes) -> Decoded:
    scales, minima = _scales_and_minima(blocks)
    codes = pair_neighbours(blocks[:, 16:].reshape(-1, 4, 32))
    return codes.reshape(-1, 8, 16), scales, np.float32(8) * scales - minima


def _decode_q5_k(blocks: Bytes) -> Decoded:
    scales, minima = _scales_and_minima(blocks)
    positions = np.arange(8, dtype=np.uint8)[:, None]
    high_bits = (blocks[:, None, 16:48] >> positions) & np.uint8(1)
    values = split_halves(blocks[:, 48:].reshape(-1, 4, 32)).reshape(-1, 8, 32) | (high_bits << np.uint8(4))
    return values + np.uint8(128 - 16), scales, np.float32(16) * scales - minima


def _decode_q6_k(blocks: Bytes) -> Decoded:
    low = split_halves(blocks[:, :128].reshape(-1, 2, 64)).reshape(-1, 8, 32)
    high = split_quarters(blocks[:, 128:192].reshape(-1, 2, 32)).reshape(-1, 8, 32)
    values = low | (high << np.uint8(4))
    scales = blocks[:, 192:208].view(np.int8) * float16_at(blocks, 208)
    return (values + np.uint8(128 - 32)).reshape(-1, 16, 16), scales, None


K_QUANTS = {
    "Q2_K": BlockLayout(256, 84, 4, 16, True, _decode_q2_k),
    "Q3_K": BlockLayout(256, 110, 4, 16, False, _decode_q3_k),
    "Q4_K": BlockLayout(256, 144, 4, 32, True, _decode_q4_k),
    "Q5_K": BlockLayout(256, 176, 8, 32, True, _decode_q5_k),
    "Q6_K": BlockLayout(256, 210, 8, 16, False, _decode_q6_k),
}
