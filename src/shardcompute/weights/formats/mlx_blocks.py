"""MLX's affine groups turned into the blocks our kernels take, without a second rounding.

A group of 32, 64 or 128 weights has codes of 2, 3, 4, 5, 6 or 8 bits in one stream, lowest bits first, a scale and a
bias: `w = scale · q + bias`. `MlxTensorFile` lays these three one behind the other, so that a group reads like a
block of a GGUF file. Groups become blocks of 32, the size whose rows are exact in every kernel, which repeats scales
and rounds nothing; codes of up to 4 bits are held in 4, others in 8. `shift = bias + 2^(bits−1) · scale` is exact in
float32 unless one is some 8,000 times the other.
"""

from __future__ import annotations

import re
from functools import cache

import numpy as np

from shardcompute.weights.formats.gguf_blocks import BlockLayout, Bytes, Decoded

MLX_BITS = (2, 3, 4, 5, 6, 8)
MLX_GROUPS = (32, 64, 128)
MLX_SCALES = {"F16": 2, "BF16": 2, "F32": 4}
_BLOCK = 32
_NAME = re.compile(r"MLX(\d)_(\d{2,3})_(F16|BF16|F32)")


def mlx_type(bits: int, group_size: int, scale_type: str) -> str:
    """What the number type of such a tensor is called, such as `MLX4_64_BF16`."""
    return f"MLX{bits}_{group_size}_{scale_type}"


@cache
def mlx_layout(name: str) -> BlockLayout | None:
    """How groups of this type lie in an `MlxTensorFile`; None for other types."""
    found = _NAME.fullmatch(name)
    if found is None or int(found[1]) not in MLX_BITS or int(found[2]) not in MLX_GROUPS:
        return None
    bits, group, scale_type = int(found[1]), int(found[2]), found[3]
    code_bytes = group * bits // 8

    def decode(blocks: Bytes) -> Decoded:
        return _decode(blocks, bits, code_bytes, scale_type)

    return BlockLayout(
        file_block=group,
        file_bytes=code_bytes + 2 * MLX_SCALES[scale_type],
        bits=4 if bits <= 4 else 8,
        block_size=_BLOCK,
        has_shifts=True,
        decode=decode,
    )


def _decode(blocks: Bytes, bits: int, code_bytes: int, scale_type: str) -> Decoded:
    scales, biases = (
        _numbers(blocks, code_bytes + index * MLX_SCALES[scale_type], scale_type) for index in (0, 1)
    )
    half = np.float32(1 << (bits - 1))
    codes = _held_codes(blocks[:, :code_bytes], bits)
    parts = codes.shape[1]
    shifts = biases + half * scales
    return codes, np.repeat(scales, parts, axis=1), np.repeat(shifts, parts, axis=1)


def _held_codes(packed: Bytes, bits: int) -> Bytes:
    """`[n, parts, bytes]` of blocks of 32, centred in 4 or 8 bits."""
    if bits in (4, 8):
        return packed.reshape(len(packed), -1, _BLOCK * bits // 8)
    stream = np.unpackbits(packed, axis=1, bitorder="little").reshape(len(packed), -1, bits)
    values = np.packbits(stream, axis=2, bitorder="little")[:, :, 0]
    held = 4 if bits < 4 else 8
    values += np.uint8((1 << (held - 1)) - (1 << (bits - 1)))
    if held == 4:
        values = values[:, 0::2] | (values[:, 1::2] << np.uint8(4))
    return values.reshape(len(packed), -1, _BLOCK * held // 8)


def _numbers(blocks: Bytes, start: int, scale_type: str) -> np.ndarray[tuple[int, int], np.dtype[np.float32]]:
    """The number at byte `start` of every group, widened: `[n, 1]`."""
    raw = np.ascontiguousarray(blocks[:, start : start + MLX_SCALES[scale_type]])
    if scale_type == "BF16":
        return (raw.view("<u2").astype(np.uint32) << np.uint32(16)).view(np.float32)
    return raw.view("<f2" if scale_type == "F16" else "<f4").astype(np.float32)
