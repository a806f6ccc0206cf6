"""What towers need of MLX besides: patches that turn and attend among themselves, and merged rows."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np

from shardcompute.backends.executor import PatchRows
from shardcompute.backends.matrix import Float32
from shardcompute.backends.mlx.ops import MlxOps
from shardcompute.backends.ops import PatchAttention


class MlxPatchOps(MlxOps):
    """`begin_patches` says which picture the next calls are about."""

    _patches: PatchRows

    def begin_patches(self, patches: PatchRows) -> None:
        self._patches = patches
        self._seen = ()
        self._positions = mx.arange(len(patches.numbers))

    def upload(self, values: Float32) -> Any:
        return mx.array(values).astype(self._dtype)

    def download(self, x: Any) -> Float32:
        return np.array(x.astype(mx.float32))

    def turning(self) -> tuple[Any, Any, None]:
        assert self._patches.turning is not None
        cosines, sines = self._patches.turning
        return mx.array(cosines), mx.array(sines), None

    def attend_patches(self, q: Any, k: Any, v: Any, attention: PatchAttention) -> Any:
        parts = [each.reshape(1, len(q), attention.heads, -1).transpose(0, 2, 1, 3) for each in (q, k, v)]
        blocks = self._patches.windows if attention.is_windowed else [(0, len(q))]
        mixed = [
            mx.fast.scaled_dot_product_attention(
                *(part[:, :, start:stop] for part in parts), scale=attention.scale
            )
            for start, stop in blocks
        ]
        return mx.concatenate(mixed, axis=2).transpose(0, 2, 1, 3).reshape(len(q), -1)

    def merge_rows(self, x: Any, count: int) -> Any:
        return x.reshape(len(x) // count, -1)

    def mean_rows(self, x: Any, count: int) -> Any:
        return x.astype(mx.float32).reshape(len(x) // count, count, -1).mean(axis=1).astype(self._dtype)
