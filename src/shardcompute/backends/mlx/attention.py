"""Attention of groups of segments over their gathered pages.

By MLX's own kernel where it has one for what the family asks; scores that are squashed (`softcap`) are not among
them and are computed step by step. Scores and softmax are float32 in both.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from shardcompute.backends.ops import Attention
from shardcompute.core.batch import PAGE_TOKENS


def attend_group(
    q: Any, positions: Any, keys: Any, values: Any, tables: Any, attention: Attention, ends: Any | None = None
) -> Any:
    """Queries `[segments, count, heads · head_dim]` at `positions [segments, count]` over the pages of `tables`.
    Without `values`, they are the first entries of the keys. With `ends`, rows see up to those."""
    segments, count = positions.shape
    heads = q.reshape(segments, count, attention.heads, attention.head_dim).transpose(0, 2, 1, 3)
    past = [_gather(pool, tables) for pool in ((keys,) if values is None else (keys, values))]
    if values is None:
        past.append(past[0][..., : attention.value_dim])
    mask = _seen(positions, tables.shape[1] * PAGE_TOKENS, attention, ends)
    if attention.softcap is None:
        sinks = None if attention.sinks is None else attention.sinks.astype(q.dtype)
        mixed = mx.fast.scaled_dot_product_attention(
            heads, *past, scale=attention.scale, mask=mask, sinks=sinks
        )
    else:
        mixed = _attend_capped(heads, past[0], past[1], mask, attention)
    return mixed.transpose(0, 2, 1, 3).reshape(segments, count, -1)


def _gather(pool: Any, tables: Any) -> Any:
    """`[segments, kv_heads, tokens, head_dim]` of the pages in `tables`."""
    pages = pool.reshape(-1, PAGE_TOKENS, *pool.shape[1:])[tables]
    return pages.reshape(len(tables), -1, *pool.shape[1:]).transpose(0, 2, 1, 3)


def _seen(positions: Any, length: int, attention: Attention, ends: Any | None) -> Any:
    here = positions[:, None, :, None]
    there = mx.arange(length)[None, None, None, :]
    seen = there <= here if ends is None else there < ends[:, None, :, None]
    if attention.window is not None:
        seen = seen & (there > here - attention.window)
    if attention.chunk is not None:
        seen = seen & (there >= here // attention.chunk * attention.chunk)
    return seen


def _attend_capped(q: Any, keys: Any, values: Any, mask: Any, attention: Attention) -> Any:
    segments, heads, count, width = q.shape
    group = heads // attention.kv_heads
    grouped = q.astype(mx.float32).reshape(segments, attention.kv_heads, group, count, width)
    keys, values = (each.astype(mx.float32)[:, :, None] for each in (keys, values))
    scores = grouped @ keys.swapaxes(-1, -2) * attention.scale
    cap: Any = attention.softcap
    scores = mx.tanh(scores / cap) * cap
    scores = mx.where(mask[:, :, None], scores, -mx.inf)
    if attention.sinks is not None:
        sinks = attention.sinks.reshape(1, attention.kv_heads, group, 1, 1)
        sinks = mx.broadcast_to(sinks, (*scores.shape[:-1], 1)).astype(mx.float32)
        weights = mx.softmax(mx.concatenate([scores, sinks], axis=-1), axis=-1)[..., :-1]
    else:
        weights = mx.softmax(scores, axis=-1)
    return (weights @ values).reshape(segments, heads, count, width).astype(q.dtype)
