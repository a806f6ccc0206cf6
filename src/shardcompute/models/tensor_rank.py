"""A decoder's part in a tensor-parallel stage: its rank's share of the tensors, and where it meets the other ranks.

Column → row: a rank's heads and inner columns need nothing of other ranks, and what it makes of them is its part of a
sum, so that attention and feed-forward block meet once each. Or each rank computes some outputs from all inputs, which
are gathered before and behind: more to exchange, and the sums of one process. In a block grid ranks of a row add up
what they make of parts of the hidden values, ranks of a column what they make of inner values. See `tensor_share`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from shardcompute.backends.ops import Handle, Ops, RankGroup, Tensor
from shardcompute.models.spec import ModelSpec
from shardcompute.models.tensor_share import Span, TensorShare, TensorSplit

Inner = Literal["heads", "columns", "shared_columns"]
"""Along what a block's inner values are cut."""


@dataclass(frozen=True, slots=True)
class TensorRank:
    """One rank among those of `split`, which meet in `group`; those of a block grid also by `row` and by `column`."""

    spec: ModelSpec
    """Of the whole model."""
    split: TensorSplit
    group: RankGroup
    row: RankGroup | None = None
    column: RankGroup | None = None

    def __post_init__(self) -> None:
        if self.group.size != self.split.size:
            raise ValueError(f"{self.split.size} shares cannot be held by {self.group.size} ranks")
        if self.split.grid is not None and (self.row is None or self.column is None):
            raise ValueError("ranks of a block grid need groups of their row and column")

    @property
    def share(self) -> TensorShare:
        return self.split.shares[self.group.rank]

    @property
    def sums(self) -> bool:
        return self.split.exchange == "reduce"

    @property
    def owned_experts(self) -> Span | None:
        """The experts of this rank; None: all, or some columns of each."""
        experts, owned = self.spec.experts, self.share.experts
        return None if experts is None or owned == (0, experts.count) else owned

    def enter(self, ops: Ops, x: Tensor, matrix: Handle) -> Tensor:
        """The first linear map of a block: from all hidden values to this rank's inner ones."""
        inputs = self.share.inputs
        if inputs is None or self.row is None:
            return ops.linear(x, matrix)
        own = _part(ops, x, self.spec.hidden, inputs, 1)
        return ops.all_reduce(ops.linear(own, matrix), self.row)

    def project(self, ops: Ops, x: Tensor, matrix: Handle, inner: Inner) -> Tensor:
        """The last linear map of a block: from this rank's inner values to all ranks' answer."""
        if self.row is not None and self.column is not None:
            part = ops.all_reduce(ops.linear(x, matrix), self.column)
            mates = self.split.row_mates(self.group.rank)
            return ops.all_gather(part, self.row, [self._widths("hidden")[mate] for mate in mates])
        if self.sums:
            return self.reduce(ops, ops.linear(x, matrix))
        inputs = ops.all_gather(x, self.group, self._widths(inner))
        return ops.all_gather(ops.linear(inputs, matrix), self.group, self._widths("hidden"))

    def reduce(self, ops: Ops, x: Tensor) -> Tensor:
        return ops.all_reduce(x, self.group)

    def own_heads(self, ops: Ops, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """This rank's heads of queries and keys of the whole model."""
        spec, share = self.spec, self.share
        return (
            _part(ops, q, spec.heads, share.heads, spec.head_dim),
            _part(ops, k, spec.kv_heads, share.kv_heads, spec.head_dim),
        )

    def _widths(self, inner: str) -> list[int]:
        unit = 1
        if inner == "heads":
            unit = self.spec.head_dim if self.spec.latent is None else self.spec.latent.value
        spans = [getattr(share, inner) for share in self.split.shares]
        return [unit * (stop - start) for start, stop in spans]


def _part(ops: Ops, x: Tensor, count: int, span: Span, unit: int) -> Tensor:
    start, stop = span
    sizes = [unit * start, unit * (stop - start), unit * (count - stop)]
    parts = iter(ops.split(x, [size for size in sizes if size]))
    if start:
        next(parts)
    return next(parts)
