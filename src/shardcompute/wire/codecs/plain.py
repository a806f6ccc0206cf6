"""Forms that keep every value on its own: float32 as it is, and its two 16-bit roundings."""

from __future__ import annotations

import numpy as np

from shardcompute.wire.codecs.rows import Activations, PackedRows, bytes_of, round_to_bf16, widen

_FP16_MAX = np.float32(65504.0)


class ExactRows:
    name = "exact"

    def row_bytes(self, width: int) -> int:
        return 4 * width

    def pack(self, activations: Activations) -> PackedRows:
        return bytes_of(np.ascontiguousarray(activations, dtype="<f4"))

    def unpack(self, packed: PackedRows, width: int) -> Activations:
        return packed.view("<f4").astype(np.float32, copy=False)


class Bf16Rows:
    name = "bf16"

    def row_bytes(self, width: int) -> int:
        return 2 * width

    def pack(self, activations: Activations) -> PackedRows:
        return bytes_of(round_to_bf16(activations))

    def unpack(self, packed: PackedRows, width: int) -> Activations:
        return widen(packed.view("<u2"))


class Fp16Rows:
    name = "fp16"

    def row_bytes(self, width: int) -> int:
        return 2 * width

    def pack(self, activations: Activations) -> PackedRows:
        # One outlier that became infinite would turn the whole row into NaN at the next normalisation.
        return bytes_of(np.clip(activations, -_FP16_MAX, _FP16_MAX).astype("<f2"))

    def unpack(self, packed: PackedRows, width: int) -> Activations:
        return packed.view("<f2").astype(np.float32)
