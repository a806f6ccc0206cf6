"""Low-rank additions to linear maps, of adapters (LoRA) that are kept beside a model's weights.

A row of a session that chose an adapter gets `up · (down · x)` of it added to what the base makes of it; other rows get
nothing. The adapters of a map are stacked along their ranks, so that rows of different adapters are computed together:
of a row's `down · x` only the ranks of its own adapter are kept. Adapters count from 1; 0 is the base alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from shardcompute.backends.matrix import Array, Float32


@dataclass(frozen=True, slots=True)
class AdapterMatrix:
    """What one adapter adds to one matrix: `up [out, rank]`, scaled, times `down [rank, in]`."""

    down: Float32
    up: Float32

    @property
    def rank(self) -> int:
        return int(self.down.shape[0])

    @property
    def size_bytes(self) -> int:
        return self.down.nbytes + self.up.nbytes

    def product(self) -> Float32:
        """What is added to the matrix itself."""
        added: Float32 = self.up @ self.down
        return added


@dataclass(frozen=True, slots=True)
class LowRank:
    """The additions of all adapters to one linear map: `down [ranks, in]`, `up [out, ranks]`, and by rank the number of
    the adapter that it belongs to."""

    down: Float32
    up: Float32
    owners: Array


@dataclass(frozen=True, slots=True)
class AdapterLayers:
    """The adapters of a stage: their names in the order of their numbers, and what each adds to the matrices of a
    layer, by our names."""

    names: tuple[str, ...]
    layers: Mapping[int, Sequence[Mapping[str, AdapterMatrix]]]
    """By layer of the model, one mapping for each adapter."""

    def low_rank(self, layer: int, names: Sequence[str], widths: Sequence[int]) -> LowRank | None:
        """What is added to a map of matrices stacked along their outputs, which have these widths; None: nothing."""
        ends = np.cumsum(widths)
        downs, ups, owners = [], [], []
        for number, matrices in enumerate(self.layers.get(layer, ()), start=1):
            for name, width, end in zip(names, widths, ends, strict=True):
                part = matrices.get(name)
                if part is None:
                    continue
                up = np.zeros((ends[-1], part.rank), dtype=np.float32)
                up[end - width : end] = part.up
                downs.append(part.down)
                ups.append(up)
                owners.append(np.full(part.rank, number, dtype=np.int64))
        if not downs:
            return None
        return LowRank(
            np.ascontiguousarray(np.concatenate(downs), dtype=np.float32),
            np.ascontiguousarray(np.concatenate(ups, axis=1)),
            np.concatenate(owners),
        )


NO_ADAPTERS = AdapterLayers((), {})
