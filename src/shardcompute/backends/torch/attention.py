"""Attention of one segment over its session's keys and values, in plain torch."""

from __future__ import annotations

import torch

from shardcompute.backends.ops import Attention
from shardcompute.core.batch import Segment


def attend_one(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    segment: Segment,
    attention: Attention,
    ends: torch.Tensor | None = None,
) -> torch.Tensor:
    """Queries `[count, heads · head_dim]` over `[kv_heads, stop, head_dim]`; scores and softmax in float32."""
    group = attention.heads // attention.kv_heads
    heads = q.view(segment.count, attention.kv_heads, group, attention.head_dim).permute(1, 2, 0, 3)
    heads = heads.reshape(attention.kv_heads, group * segment.count, attention.head_dim)
    scores = torch.bmm(heads.float(), keys.float().transpose(1, 2)) * attention.scale
    scores = scores.view(attention.kv_heads, group, segment.count, segment.stop)
    if attention.softcap is not None:
        scores = torch.tanh(scores / attention.softcap) * attention.softcap
    scores = scores.masked_fill(_hidden(segment, attention, q.device, ends), -torch.inf)
    if attention.sinks is not None:
        sinks = attention.sinks.view(attention.kv_heads, group, 1, 1).expand(-1, -1, segment.count, 1)
        weights = torch.softmax(torch.cat([scores, sinks], dim=-1), dim=-1)[..., :-1]
    else:
        weights = torch.softmax(scores, dim=-1)
    values = values[..., : attention.value_dim].float()
    mixed = torch.bmm(weights.reshape(attention.kv_heads, group * segment.count, -1), values)
    mixed = mixed.view(attention.kv_heads, group, segment.count, -1)
    return mixed.permute(2, 0, 1, 3).reshape(segment.count, -1).to(q.dtype)


def _hidden(
    segment: Segment, attention: Attention, device: torch.device, ends: torch.Tensor | None
) -> torch.Tensor:
    here = torch.arange(segment.start, segment.stop, device=device)[:, None]
    there = torch.arange(segment.stop, device=device)[None, :]
    hidden = there > here if ends is None else there >= ends[:, None]
    if attention.window is not None:
        hidden = hidden | (there <= here - attention.window)
    if attention.chunk is not None:
        hidden = hidden | (there < here // attention.chunk * attention.chunk)
    return hidden
