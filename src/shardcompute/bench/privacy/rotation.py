"""Secret rotations of hidden states, and how they are undone.

Whoever turns rows by a secret orthogonal matrix before it hands them to a stage has to turn that stage's weights as
well, and the stage knows both those and the public ones. A permutation of the entries is such a rotation. Where weights
are not at hand some known rows do.
"""

from __future__ import annotations

import numpy as np

from shardcompute.backends.matrix import Float32
from shardcompute.models.decoder import TensorSource

_READS = ("attention.q", "attention.k", "attention.v", "mlp.gate", "mlp.up")


def random_rotation(width: int, rng: np.random.Generator) -> Float32:
    q, r = np.linalg.qr(rng.standard_normal((width, width)))
    return np.asarray(q * np.sign(np.diag(r)), np.float32)


def random_permutation(width: int, rng: np.random.Generator) -> Float32:
    return np.asarray(np.eye(width)[rng.permutation(width)], np.float32)


def reading_weights(source: TensorSource, layer: int) -> Float32:
    """What of a layer's weights meets rows, with the norms before it multiplied in, as a rotation needs it."""
    norms = {"attention": source.vector("attention.norm", layer), "mlp": source.vector("mlp.norm", layer)}
    parts = [source.matrix(name, layer).to_dense() * norms[name.split(".")[0]] for name in _READS]
    return np.concatenate(parts)


def turn_weights(weights: Float32, rotation: Float32) -> Float32:
    """As a stage is given them for rows that are turned, in 8 bits with a scale for each row."""
    turned = weights @ rotation
    scale = np.abs(turned).max(axis=1, keepdims=True) / 127
    return np.asarray(np.round(turned / np.maximum(scale, 1e-12)) * scale, np.float32)


def turned_back(rows: Float32, rotation: Float32) -> Float32:
    """Rows as they were before this rotation."""
    return np.asarray(rows @ rotation.T, np.float32)


def align(known: Float32, turned: Float32) -> Float32:
    """The rotation that turns known rows into the others best (orthogonal Procrustes)."""
    u, _, v = np.linalg.svd(known.T.astype(np.float64) @ turned.astype(np.float64))
    return np.asarray(u @ v, np.float32)
