"""Rotary embeddings: their sines and cosines, computed one way for every backend."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from shardcompute.backends.matrix import Float32


def rotation_tables(
    inverse_frequencies: Sequence[float], amplitude: float, positions: int
) -> tuple[Float32, Float32]:
    """Cosines and sines `[positions, len(inverse_frequencies)]`.

    Angles are float32 products of float32 frequencies, as the reference implementations compute them.
    """
    frequencies = np.asarray(inverse_frequencies, dtype=np.float32)
    angles = np.arange(positions, dtype=np.float32)[:, None] * frequencies[None, :]
    scale = np.float32(amplitude)
    return np.cos(angles) * scale, np.sin(angles) * scale
