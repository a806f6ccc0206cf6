"""Launching the kernels that take tokens in and pick tokens."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import torch
import triton

from shardcompute.backends.executor import PickRule
from shardcompute.backends.torch.kernels.picks import draw_rows, embed_rows, pick_best
from shardcompute.backends.torch.kernels.workspace import Workspace
from shardcompute.backends.torch.transfers import upload
from shardcompute.core.steps import PICKED

_BEST_PARTS = 16
_DRAW_BLOCK = 4096


class TokenKernels:
    """The kernels of one device; `pdl` as `Kernels` launches. `picked` are the tokens of all slots."""

    def __init__(self, device: torch.device, pdl: dict[str, Any]) -> None:
        self._pdl = pdl
        self._space = Workspace(device)

    def embed(self, table: torch.Tensor, ids: torch.Tensor, picked: torch.Tensor) -> torch.Tensor:
        """The table's row for each id, or for the token that was picked into the slot that it names."""
        rows, width = len(ids), table.shape[1]
        out = torch.empty((rows, width), dtype=table.dtype, device=table.device)
        block = min(triton.next_power_of_2(width), 1024)
        if rows:
            embed_rows[(rows, triton.cdiv(width, block))](
                ids, picked, table, out, width, PICKED=PICKED, BLOCK=block, **self._pdl
            )
        return out

    def best(self, logits: torch.Tensor, slots: torch.Tensor, picked: torch.Tensor) -> torch.Tensor:
        """The best logit and token of every row, `[rows, 2]` float64; the tokens are put into their slots."""
        rows, vocab_size = logits.shape
        out = torch.empty((rows, 2), dtype=torch.float64, device=logits.device)
        pick_best[(rows, _BEST_PARTS)](
            logits,
            slots,
            picked,
            out,
            self._space.parts(rows * _BEST_PARTS * 2),
            self._space.counters(rows),
            vocab_size,
            PARTS=_BEST_PARTS,
            BLOCK=1024,
            **self._pdl,
        )
        return out

    def draw(
        self,
        logits: torch.Tensor,
        rules: Sequence[PickRule],
        slots: Sequence[int],
        picked: torch.Tensor,
    ) -> torch.Tensor:
        """What `picking.draw_rows` gives, `[rows, 2]` int64: token, unsure; the tokens are put into their slots."""
        rows, vocab_size = logits.shape
        out = torch.empty((rows, 2), dtype=torch.int64, device=logits.device)
        packed = torch.tensor(
            [_pack(rule, slot) for rule, slot in zip(rules, slots, strict=True)],
            dtype=torch.int64,
        )
        block = min(max(triton.next_power_of_2(vocab_size), 128), _DRAW_BLOCK)
        draw_rows[(rows,)](
            logits,
            upload(packed, logits.device),
            picked,
            out,
            vocab_size,
            BLOCK=block,
            num_warps=max(1, block // 256),
        )
        return out


def _pack(rule: PickRule, slot: int) -> tuple[int, ...]:
    numbers = struct.pack("=4d", rule.temperature, rule.reach, rule.top_p, rule.least_score)
    key = rule.key - (1 << 64) if rule.key >> 63 else rule.key
    return (*struct.unpack("=4q", numbers), rule.top_k, key, slot)
