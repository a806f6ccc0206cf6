"""GGUF quantised blocks turned into the blocks our kernels take, without a second rounding.

`BLOCK_LAYOUTS` has every type that llama.cpp stores (see `blocks.layout`). Values of 5 and 6 bits are held in 8-bit
codes. Where the file has a minimum, codes stay centred and the shift takes up the difference: rounded activations
then cost least.
"""

from __future__ import annotations

import numpy as np

from shardcompute.weights.formats.blocks.i_quants import I_QUANTS
from shardcompute.weights.formats.blocks.k_quants import K_QUANTS
from shardcompute.weights.formats.blocks.layout import (
    BlockLayout,
    Bytes,
    Decoded,
    float16_at,
    pair_neighbours,
    split_halves,
)
from shardcompute.weights.formats.blocks.small_tables import SMALL_TABLES

__all__ = ["BLOCK_LAYOUTS", "BlockLayout", "Bytes", "Decoded"]


def _decode_q4_0(blocks: Bytes) -> Decoded:
    codes = pair_neighbours(blocks[:, None, 2:])
    return codes.reshape(-1, 1, 16), float16_at(blocks, 0), None


def _decode_q4_1(blocks: Bytes) -> Decoded:
    codes = pair_neighbours(blocks[:, None, 4:])
    scales = float16_at(blocks, 0)
    return codes.reshape(-1, 1, 16), scales, float16_at(blocks, 2) + np.float32(8) * scales


def _five_bit_codes(high: Bytes, low: Bytes) -> Bytes:
    high_bits = np.unpackbits(high, axis=1, bitorder="little")
    values = split_halves(low[:, None, :]).reshape(-1, 32) | (high_bits << np.uint8(4))
    return (values + np.uint8(128 - 16)).reshape(-1, 1, 32)


def _decode_q5_0(blocks: Bytes) -> Decoded:
    return _five_bit_codes(blocks[:, 2:6], blocks[:, 6:]), float16_at(blocks, 0), None


def _decode_q5_1(blocks: Bytes) -> Decoded:
    scales = float16_at(blocks, 0)
    return (
        _five_bit_codes(blocks[:, 4:8], blocks[:, 8:]),
        scales,
        float16_at(blocks, 2) + np.float32(16) * scales,
    )


def _decode_q8_0(blocks: Bytes) -> Decoded:
    codes = blocks[:, 2:] ^ np.uint8(0x80)  # two's complement + 128
    return codes.reshape(-1, 1, 32), float16_at(blocks, 0), None


BLOCK_LAYOUTS: dict[str, BlockLayout] = {
    "Q4_0": BlockLayout(32, 18, 4, 32, False, _decode_q4_0),
    "Q4_1": BlockLayout(32, 20, 4, 32, True, _decode_q4_1),
    "Q5_0": BlockLayout(32, 22, 8, 32, False, _decode_q5_0),
    "Q5_1": BlockLayout(32, 24, 8, 32, True, _decode_q5_1),
    "Q8_0": BlockLayout(32, 34, 8, 32, False, _decode_q8_0),
    **K_QUANTS,
    **I_QUANTS,
    **SMALL_TABLES,
}
