"""Draft heads of random weights: as wrong as can be, and so a good test of what must not change."""

from __future__ import annotations

import numpy as np

from shardcompute.backends.matrix import DenseMatrix, Float32, Matrix
from shardcompute.models.draft_head import DraftHeadBlock, DraftHeadWeights
from shardcompute.models.spec import ModelSpec
from shardcompute.weights.formats.quantise import convert


def random_draft_head(
    spec: ModelSpec, *, width: int = 32, blocks: int = 2, seed: int = 5
) -> DraftHeadWeights:
    """Knows every fourth token."""
    noise = np.random.default_rng(seed)

    def matrix(rows: int, columns: int) -> Matrix:
        values = noise.standard_normal((rows, columns), dtype=np.float32) / np.float32(np.sqrt(columns))
        return convert(DenseMatrix(values), "int8")

    def vector() -> Float32:
        return 1 + noise.standard_normal(spec.hidden, dtype=np.float32) / 4

    ids = np.arange(0, spec.vocab_size, 4)
    return DraftHeadWeights(
        ids.astype(np.int32),
        matrix(spec.hidden, 2 * spec.hidden),
        tuple(
            DraftHeadBlock(vector(), matrix(2 * width, spec.hidden), matrix(spec.hidden, width))
            for _ in range(blocks)
        ),
        vector(),
    )
