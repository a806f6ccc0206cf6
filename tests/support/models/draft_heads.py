"""Draft heads of random weights: as wrong as can be, and so a good test of what must not change."""

from __future__ import annotations

import numpy as np

from shardcompute.backends.matrix import DenseMatrix, Float32, Matrix
from shardcompute.models.draft_head import DraftHeadLayer, DraftHeadWeights
from shardcompute.models.spec import ModelSpec
from shardcompute.weights.formats.quantise import convert


def random_draft_head(
    spec: ModelSpec,
    *,
    width: int = 32,
    layers: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 16,
    seed: int = 5,
) -> DraftHeadWeights:
    """Knows every fourth token."""
    noise = np.random.default_rng(seed)

    def matrix(rows: int, columns: int) -> Matrix:
        values = noise.standard_normal((rows, columns), dtype=np.float32) / np.float32(np.sqrt(columns))
        return convert(DenseMatrix(values), "int8")

    def vector() -> Float32:
        return 1 + noise.standard_normal(spec.hidden, dtype=np.float32) / 4

    attended, kept = heads * head_dim, kv_heads * head_dim
    return DraftHeadWeights(
        ids=np.arange(0, spec.vocab_size, 4).astype(np.int32),
        embedding_norm=vector(),
        state_norm=vector(),
        output_norm=vector(),
        join=matrix(spec.hidden, 2 * spec.hidden),
        layers=tuple(
            DraftHeadLayer(
                norm=vector(),
                qkv=matrix(attended + 2 * kept, spec.hidden),
                out=matrix(spec.hidden, attended),
                mlp_norm=vector(),
                gate_up=matrix(2 * width, spec.hidden),
                down=matrix(spec.hidden, width),
            )
            for _ in range(layers)
        ),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        theta=10_000.0,
    )


def draft_by_the_book(
    weights: DraftHeadWeights, head: Float32, states: Float32, embedded: Float32, eps: float
) -> tuple[Float32, Float32]:
    """Next states and logits of the rows of one session, from the first on, as `models.draft_head` says it: by numpy,
    all at once. `embedded` are embeddings of the tokens behind the rows, zeros where they are not known."""

    def normed(x: Float32, gain: Float32) -> Float32:
        out: Float32 = x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * gain
        return out

    halves = (normed(embedded, weights.embedding_norm), normed(states, weights.state_norm))
    u = np.concatenate(halves, axis=1) @ weights.join.to_dense().T
    for layer in weights.layers:
        u = u + _attention(weights, normed(u, layer.norm) @ layer.qkv.to_dense().T) @ layer.out.to_dense().T
        gate, up = np.split(normed(u, layer.mlp_norm) @ layer.gate_up.to_dense().T, 2, axis=1)
        u = u + (gate / (1 + np.exp(-gate)) * up) @ layer.down.to_dense().T
    return u, normed(u, weights.output_norm) @ head.T


def _attention(weights: DraftHeadWeights, qkv: Float32) -> Float32:
    rows, size = len(qkv), weights.head_dim
    q, k, v = np.split(qkv, [weights.heads * size, (weights.heads + weights.kv_heads) * size], axis=1)
    q, k, v = (x.reshape(rows, -1, size).transpose(1, 0, 2) for x in (q, k, v))
    angles = np.arange(rows)[:, None] * weights.theta ** (-np.arange(0, size, 2) / size)

    def turned(x: Float32) -> Float32:
        first, second = np.split(x, 2, axis=-1)
        cosines, sines = np.cos(angles), np.sin(angles)
        return np.concatenate([first * cosines - second * sines, second * cosines + first * sines], axis=-1)

    group = weights.heads // weights.kv_heads
    keys, values = np.repeat(turned(k), group, axis=0), np.repeat(v, group, axis=0)
    scores = turned(q) @ keys.transpose(0, 2, 1) / np.sqrt(size)
    scores = np.where(np.tri(rows, dtype=bool), scores, -np.inf)
    shares = np.exp(scores - scores.max(axis=-1, keepdims=True))
    mixed = shares / shares.sum(axis=-1, keepdims=True) @ values
    return np.asarray(mixed.transpose(1, 0, 2).reshape(rows, -1), dtype=np.float32)
