"""Types whose codes stand for one of 16 levels, or of two or three.

The levels of IQ4 and of floats of 4 bits are whole numbers that are unevenly spaced: 8-bit codes hold them exactly,
4-bit ones would not. Ternary and binary weights fit into 4 bits.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from shardcompute.backends.matrix import Float32
from shardcompute.weights.formats.blocks.layout import (
    BlockLayout,
    Bytes,
    Decoded,
    centre_8_bits,
    float16_at,
    pack_4_bits,
    split_halves,
    split_quarters,
    words_at,
)

_IQ4_LEVELS = centre_8_bits(
    np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.int8)
)
# Twice the values of e2m1, so that they are whole.
_E2M1_LEVELS = centre_8_bits(np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.int8))
_BLOCK = 32


def _decode_iq4_nl(blocks: Bytes) -> Decoded:
    codes = _IQ4_LEVELS[split_halves(blocks[:, None, 2:])]
    return codes.reshape(-1, 1, 32), float16_at(blocks, 0), None


def _decode_iq4_xs(blocks: Bytes) -> Decoded:
    """Eight scales of 6 bits: the high 2 of each in a word, the low 4 in bytes 4 to 8."""
    high = (words_at(blocks, 2, 4, "<u2") >> np.arange(0, 16, 2, dtype=np.uint16)) & np.uint16(3)
    low = np.stack([blocks[:, 4:8] & np.uint8(0x0F), blocks[:, 4:8] >> np.uint8(4)], axis=-1).reshape(-1, 8)
    short = (low | (high.astype(np.uint8) << np.uint8(4))).astype(np.int8) - np.int8(32)
    codes = _IQ4_LEVELS[split_halves(blocks[:, 8:].reshape(-1, 8, 16))]
    return codes.reshape(-1, 8, 32), short * float16_at(blocks, 0), None


def _decode_mxfp4(blocks: Bytes) -> Decoded:
    codes = _E2M1_LEVELS[split_halves(blocks[:, None, 1:])]
    return codes.reshape(-1, 1, 32), half_e8m0(blocks[:, :1]), None


def half_e8m0(exponents: Bytes) -> Float32:
    """Half of `2^(exponent − 127)`, also where that is below the normal numbers."""
    wide = exponents.astype(np.uint32)
    small = np.uint32(0x0020_0000) << np.minimum(wide, 1)
    return np.where(wide < 2, small, (np.maximum(wide, 1) - 1) << np.uint32(23)).view(np.float32)


def _half_ue4m3() -> Float32:
    """By a byte, half of the unsigned e4m3 number in it; 0 where that is not a number."""
    byte = np.arange(256)
    exponents, fractions = (byte >> 3) & 0x0F, byte & 7
    values = np.where(exponents == 0, fractions * 2.0**-9, (1 + fractions / 8) * 2.0 ** (exponents - 7))
    values[0x7F] = 0
    return (values / 2).astype(np.float32)


_HALF_UE4M3 = _half_ue4m3()


def _decode_nvfp4(blocks: Bytes) -> Decoded:
    codes = _E2M1_LEVELS[split_halves(blocks[:, 4:].reshape(-1, 4, 8))]
    return codes.reshape(-1, 4, 16), _HALF_UE4M3[blocks[:, :4]], None


def _same_scale(codes: NDArray[np.uint8], scales: Float32) -> Decoded:
    """Codes below 16 `[n, weights]` that share one scale, in blocks of 32."""
    packed = pack_4_bits(codes).reshape(len(codes), -1, _BLOCK // 2)
    return packed, np.repeat(scales, packed.shape[1], axis=1), None


def _decode_tq1_0(blocks: Bytes) -> Decoded:
    """Five digits of base 3 in a byte (four in the last ones), as a fraction: three times it carries the next."""
    parts = []
    for start, stop, digits in ((0, 32, 5), (32, 48, 5), (48, 52, 4)):
        powers = np.array([1, 3, 9, 27, 81][:digits], np.uint8)[:, None]
        parts.append((blocks[:, None, start:stop] * powers).reshape(len(blocks), -1))
    digits_of = (np.concatenate(parts, axis=1).astype(np.uint16) * np.uint16(3)) >> np.uint16(8)
    return _same_scale(digits_of.astype(np.uint8) + np.uint8(8 - 1), float16_at(blocks, 52))


def _decode_tq2_0(blocks: Bytes) -> Decoded:
    values = split_quarters(blocks[:, :64].reshape(-1, 2, 32)).reshape(-1, 256)
    return _same_scale(values + np.uint8(8 - 1), float16_at(blocks, 64))


def _decode_q1_0(blocks: Bytes) -> Decoded:
    bits = np.unpackbits(blocks[:, 2:], axis=1, bitorder="little")
    return _same_scale(np.uint8(2) * bits + np.uint8(8 - 1), float16_at(blocks, 0))


def _decode_q2_0(blocks: Bytes) -> Decoded:
    values = (blocks[:, 2:, None] >> np.array([0, 2, 4, 6], np.uint8)) & np.uint8(3)
    return _same_scale(values.reshape(len(blocks), -1) + np.uint8(8 - 1), float16_at(blocks, 0))


SMALL_TABLES = {
    "IQ4_NL": BlockLayout(32, 18, 8, 32, False, _decode_iq4_nl),
    "IQ4_XS": BlockLayout(256, 136, 8, 32, False, _decode_iq4_xs),
    "MXFP4": BlockLayout(32, 17, 8, 32, False, _decode_mxfp4),
    "NVFP4": BlockLayout(64, 36, 8, 16, False, _decode_nvfp4),
    "TQ1_0": BlockLayout(256, 54, 4, _BLOCK, False, _decode_tq1_0),
    "TQ2_0": BlockLayout(256, 66, 4, _BLOCK, False, _decode_tq2_0),
    "Q1_0": BlockLayout(128, 18, 4, _BLOCK, False, _decode_q1_0),
    "Q2_0": BlockLayout(64, 18, 4, _BLOCK, False, _decode_q2_0),
}
