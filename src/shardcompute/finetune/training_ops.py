"""The primitives of `backends.ops`, differentiable: rows of whole examples, no KV, additions that are being learned.

Everything but attention and the maps with additions is what serving computes with torch, so that every family of the
decoder can be taught.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Any

import torch
from torch.nn import functional

from shardcompute.backends.ops import Attention, RankGroup
from shardcompute.backends.torch.attention import attend_one
from shardcompute.backends.torch.ops import TorchOps
from shardcompute.backends.torch.weights import DeviceLinear
from shardcompute.core.batch import Segment
from shardcompute.finetune.adapters.taught_linear import InputSpan, TaughtLinear
from shardcompute.finetune.tensor_ranks import sum_forward


class TrainingOps(TorchOps):
    """`begin_rows` says what the next calls are about."""

    def __init__(self, context_length: int, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__(None, context_length, device, dtype)
        self._lengths: tuple[int, ...] = ()
        self._padded_rows = torch.empty(0, dtype=torch.int64)
        self._dropout = 0.0
        self._is_taught = True
        self._key: tuple[int, ...] = ()

    def begin_rows(
        self,
        lengths: Sequence[int],
        logit_rows: torch.Tensor,
        *,
        dropout: float = 0.0,
        key: tuple[int, ...] = (),
    ) -> None:
        """Rows of examples of these lengths; inputs of additions are dropped by chance that `key` decides."""
        self._lengths = tuple(lengths)
        longest = max(lengths)
        positions = torch.cat([torch.arange(length) for length in lengths])
        owners = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(self._lengths))
        self._positions = positions.to(self._device)
        self._padded_rows = (owners * longest + positions).to(self._device)
        self._logit_rows = logit_rows.to(self._device)
        self._dropout, self._key = dropout, key

    @contextmanager
    def untaught(self) -> Iterator[None]:
        """The frozen model alone, in this block."""
        self._is_taught = False
        try:
            yield
        finally:
            self._is_taught = True

    def linear(self, x: Any, matrix: DeviceLinear) -> Any:
        rows = self._value(x)
        if not isinstance(matrix, TaughtLinear):
            return matrix.apply(rows)
        return matrix.apply_taught(rows, self._dropped) if self._is_taught else matrix.apply(rows)

    def _dropped(self, rows: torch.Tensor, name: str, span: InputSpan | None) -> torch.Tensor:
        if not self._dropout:
            return rows
        chance = torch.Generator()
        chance.manual_seed(zlib.crc32(repr((self._key, name)).encode()))
        width = rows.shape[1] if span is None else span.width
        kept = torch.rand((len(rows), width), generator=chance) >= self._dropout
        if span is not None:
            kept = kept[:, span.start : span.stop]
        return rows * (kept.to(rows.device, rows.dtype) / (1 - self._dropout))

    def all_reduce(self, x: Any, group: RankGroup) -> torch.Tensor:
        return sum_forward(self._value(x), group)

    def attend(self, q: Any, k: Any, v: Any, layer: int, attention: Attention) -> torch.Tensor:
        longest = max(self._lengths)
        is_plain = attention.softcap is None and attention.sinks is None and attention.value_dim is None
        sees_all = (attention.window is None or longest <= attention.window) and (
            attention.chunk is None or longest <= attention.chunk
        )
        if is_plain and sees_all:
            return self._attend_padded(q, k, v, attention, longest)
        return self._attend_each(q, k, k if v is None else v, attention)

    def _attend_padded(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, attention: Attention, longest: int
    ) -> torch.Tensor:
        """All examples at once. Rows that only fill up come last, where nobody looks back at them."""
        count = len(self._lengths)

        def padded(x: torch.Tensor, heads: int) -> torch.Tensor:
            filled = x.new_zeros(count * longest, x.shape[-1]).index_copy(0, self._padded_rows, x)
            return filled.view(count, longest, heads, -1).transpose(1, 2)

        mixed = functional.scaled_dot_product_attention(
            padded(q, attention.heads),
            padded(k, attention.kv_heads),
            padded(v, attention.kv_heads),
            is_causal=True,
            scale=attention.scale,
            enable_gqa=attention.heads != attention.kv_heads,
        )
        rows = mixed.transpose(1, 2).reshape(count * longest, -1)
        return rows.index_select(0, self._padded_rows)

    def _attend_each(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, attention: Attention
    ) -> torch.Tensor:
        out = []
        for stop, length in zip(accumulate(self._lengths), self._lengths, strict=True):
            rows = slice(stop - length, stop)
            keys, values = (
                each[rows].unflatten(-1, (attention.kv_heads, -1)).transpose(0, 1) for each in (k, v)
            )
            segment = Segment(0, 0, length, 0)
            out.append(attend_one(q[rows].contiguous(), keys, values, segment, attention))
        return torch.cat(out)
