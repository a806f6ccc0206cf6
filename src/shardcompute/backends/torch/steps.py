"""What a step computes, on the device."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from shardcompute.backends.torch.plan import Int32


@dataclass(frozen=True, slots=True)
class Computed:
    """A step's result in float32 and, from the last slice, the normed rows behind its logits and the best tokens."""

    result: torch.Tensor
    normed: torch.Tensor | None = None
    best: torch.Tensor | None = None
    """The best logit of every row, and its token as a number: `[rows, 2]` float64."""

    def first(self, rows: int) -> Computed:
        """Without the rows that only fill a graph's bucket."""
        optional = (None if each is None else each[:rows] for each in (self.normed, self.best))
        return Computed(self.result[:rows], *optional)

    def reordered(self, order: Int32) -> Computed:
        """Hidden rows back in the batch's order, from that of a plan."""
        places = torch.from_numpy(order).to(self.result.device, torch.int64)
        return replace(self, result=torch.empty_like(self.result).index_copy_(0, places, self.result))
