"""What a step computes, on the device."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from shardcompute.backends.torch.plan import Int32


@dataclass(frozen=True, slots=True)
class Computed:
    """A step's result in float32 and, from the last slice, the normed rows behind its logits, the best tokens, and the
    states of all rows behind the last layer."""

    result: torch.Tensor
    normed: torch.Tensor | None = None
    best: torch.Tensor | None = None
    """The best logit of every row, and its token as a number: `[rows, 2]` float64."""
    final: torch.Tensor | None = None

    def first(self, rows: int, logit_rows: int) -> Computed:
        """Without the rows that only fill a graph's bucket."""
        if self.final is None:
            return Computed(self.result[:rows])
        normed, best = (None if each is None else each[:logit_rows] for each in (self.normed, self.best))
        return Computed(self.result[:logit_rows], normed, best, self.final[:rows])


def reordered(rows: torch.Tensor, order: Int32 | None) -> torch.Tensor:
    """Rows of a step back in the batch's order, from that of its plan."""
    if order is None:
        return rows
    places = torch.from_numpy(order).to(rows.device, torch.int64)
    return torch.empty_like(rows).index_copy_(0, places, rows)
