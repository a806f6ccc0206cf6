"""Latent attention (MLA): the compressed row of a token is all that is kept, and all that decoding reads.

Keys and values of all heads are maps of one latent vector per token; beside it there is one rotated key that all heads
share. The maps are absorbed: queries go through the transposed map of their head's keys, so that they meet the latents
as they are kept, and what comes out, a mixture of latents for each head, goes through the map of its head's values.
That is attention with one key head, whose values are the first entries of its keys.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from shardcompute.backends.matrix import Array, Matrix, rows_of
from shardcompute.backends.ops import Attention, Handle, Ops, Tensor
from shardcompute.models.spec import LatentAttention, ModelSpec


@dataclass(frozen=True, slots=True)
class LatentWeights:
    """`down` makes what comes straight from the input: queries (or their latents, which `q_norm` and `q_up` turn into
    queries) and the row that is kept. `k_up` and `v_up` are the absorbed maps of each head."""

    down: Handle
    q_norm: Handle | None
    q_up: Handle | None
    kv_norm: Handle
    k_up: Handle
    v_up: Handle


def load_latent(ops: Ops, source: Any, spec: ModelSpec, latent: LatentAttention, layer: int) -> LatentWeights:
    q = rows_of(source.matrix("attention.q", layer), _query_order(spec.heads, latent))
    kv = rows_of(source.matrix("attention.kv_down", layer), _kept_order(latent))
    q_norm = q_up = None
    if latent.q_rank is not None:
        q_norm = ops.vector(source.vector("attention.q_latent_norm", layer))
        q_up = ops.matrix([q], None)
        q = source.matrix("attention.q_down", layer)
    k_up, v_up = _head_maps(source, spec.heads, latent, layer)
    return LatentWeights(
        down=ops.matrix([q, kv], None),
        q_norm=q_norm,
        q_up=q_up,
        kv_norm=ops.vector(source.vector("attention.kv_norm", layer)),
        k_up=ops.head_maps(np.ascontiguousarray(k_up)),
        v_up=ops.head_maps(np.ascontiguousarray(v_up)),
    )


def _head_maps(source: Any, heads: int, latent: LatentAttention, layer: int) -> tuple[Array, Array]:
    """From plain queries to latents, and from latents to values, for each head."""
    if latent.is_absorbed:
        k_up: Matrix = source.matrix("attention.k_up", layer)
        v_up: Matrix = source.matrix("attention.v_up", layer)
        return k_up.to_dense().reshape(heads, latent.kv_rank, -1), v_up.to_dense().reshape(
            heads, latent.value, -1
        )
    up: Matrix = source.matrix("attention.kv_up", layer)
    maps = up.to_dense().reshape(heads, latent.plain + latent.value, latent.kv_rank)
    return maps[:, : latent.plain].transpose(0, 2, 1), maps[:, latent.plain :]


def attend_latent(
    ops: Ops,
    spec: ModelSpec,
    latent: LatentAttention,
    weights: LatentWeights,
    rotation: Handle,
    layer: int,
    x: Tensor,
) -> Tensor:
    """Values of all heads side by side, `[rows, heads · value]`."""
    heads = spec.heads
    q_width = latent.q_rank or heads * (latent.plain + latent.rotated)
    q, kept, shared_key = ops.split(ops.linear(x, weights.down), [q_width, latent.kv_rank, latent.rotated])
    if weights.q_up is not None:
        q = ops.linear(ops.rms_norm(q, weights.q_norm, latent.norm_eps), weights.q_up)
    plain, turned = ops.split(q, [heads * latent.plain, heads * latent.rotated])
    turned = ops.rotate(turned, latent.rotated, rotation)
    query = ops.join_heads([ops.per_head(plain, weights.k_up), turned], heads)
    kept = ops.rms_norm(kept, weights.kv_norm, latent.norm_eps)
    key = ops.join_heads([kept, ops.rotate(shared_key, latent.rotated, rotation)], 1)
    attention = Attention(
        heads=heads,
        kv_heads=1,
        head_dim=latent.kv_rank + latent.rotated,
        scale=spec.attention_scale,
        value_dim=latent.kv_rank,
    )
    return ops.per_head(ops.attend(query, key, None, layer, attention), weights.v_up)


def _query_order(heads: int, latent: LatentAttention) -> Array:
    """Rows of the query matrix so that what does not turn of all heads comes first, then what turns, in halves."""
    rows = np.arange(heads * (latent.plain + latent.rotated)).reshape(heads, -1)
    turned = rows[:, latent.plain :][:, _halves(latent)]
    return np.concatenate([rows[:, : latent.plain].reshape(-1), turned.reshape(-1)])


def _kept_order(latent: LatentAttention) -> Array:
    return np.concatenate([np.arange(latent.kv_rank), latent.kv_rank + _halves(latent)])


def _halves(latent: LatentAttention) -> Array:
    """Where the entries of a rotated part come from, whose pairs may lie side by side."""
    order = np.arange(latent.rotated)
    return order.reshape(-1, 2).T.reshape(-1) if latent.is_interleaved else order
