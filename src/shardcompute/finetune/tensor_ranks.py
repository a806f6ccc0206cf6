"""Tensor ranks of a stage that learns: column → row cuts of the serving decoder, with sums forward and backward.

A rank has its heads, inner columns and rows of the vocabulary of the frozen base, and computes with the same parts of
each addition: of a map whose outputs are cut with all of `down` and its own rows of `up`, of one whose inputs are cut
with its own columns of `down` and all of `up`. Gradients of what several ranks compute with are parts of a sum. They
are added up where copies add up theirs, and the optimiser's state is shared out with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from shardcompute.backends.ops import Handle, Ops, RankGroup, Tensor
from shardcompute.core.errors import UnsupportedModelError, UsageError
from shardcompute.finetune.plan import FinetunePlan
from shardcompute.models.spec import ModelSpec
from shardcompute.models.tensor_rank import TensorRank
from shardcompute.models.tensor_share import TensorCut, split_tensors, tensor_cuts


class _SumForward(torch.autograd.Function):  # type: ignore[misc]
    """The sum over all ranks. Each of them has the gradient of the whole sum, which is that of its part."""

    @staticmethod
    def forward(_context: Any, x: torch.Tensor, group: RankGroup) -> torch.Tensor:
        return _summed(x, group)

    @staticmethod
    def backward(_context: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradients[0], None


class _SumBackward(torch.autograd.Function):  # type: ignore[misc]
    """What all ranks have, on its way into parts of theirs: its gradient is the sum of what they send back."""

    @staticmethod
    def forward(context: Any, x: torch.Tensor, group: RankGroup) -> torch.Tensor:
        context.group = group
        return x.view_as(x)

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _summed(gradients[0], context.group), None


def _summed(x: torch.Tensor, group: RankGroup) -> torch.Tensor:
    values = group.all_reduce(x.detach().float().contiguous().cpu().numpy())
    return torch.from_numpy(values).to(x.device, x.dtype)


def sum_forward(x: torch.Tensor, group: RankGroup) -> torch.Tensor:
    found: torch.Tensor = _SumForward.apply(x, group)
    return found


def sum_backward(x: torch.Tensor, group: RankGroup) -> torch.Tensor:
    found: torch.Tensor = _SumBackward.apply(x, group)
    return found


@dataclass(frozen=True, slots=True)
class LearningRank(TensorRank):
    """A `TensorRank` through which gradients go back."""

    def enter(self, ops: Ops, x: Tensor, matrix: Handle) -> Tensor:
        return ops.linear(sum_backward(x, self.group), matrix)

    def enter_head(self, x: torch.Tensor) -> torch.Tensor:
        """Rows that this rank makes logits of its part of the vocabulary from."""
        return sum_backward(x, self.group)

    def cuts(self) -> Mapping[str, TensorCut]:
        """By our name what this rank has of each tensor that is cut."""
        return tensor_cuts(self.spec, self.share, self.split.exchange)

    def cross_entropies(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Of rows whose logits are shared out. Three numbers of each row are exchanged, not its logits."""
        start, stop = self.share.vocabulary
        # A row's best is taken off before its powers are summed, and cancels out: it needs no gradient.
        best = logits.detach().max(dim=-1).values.float().cpu().numpy()
        highest = torch.from_numpy(np.max(self.group.all_gather(best), axis=0)).to(logits.device)
        powers = (logits - highest[:, None]).exp().sum(dim=-1)
        is_here = (start <= targets) & (targets < stop)
        own = logits.gather(1, torch.where(is_here, targets - start, 0)[:, None])[:, 0]
        both = torch.stack([powers, torch.where(is_here, own, 0.0)])
        summed, aimed = sum_forward(both, self.group)
        return summed.log() + highest - aimed


def open_learning_rank(
    spec: ModelSpec, plan: FinetunePlan, group: RankGroup, *, block: int = 1
) -> LearningRank:
    """This rank among those of `group`, with even shares; quantised inputs are cut at multiples of `block`."""
    check_ranks(spec, plan, group.size)
    return LearningRank(spec, split_tensors(spec, [1.0] * group.size, block=block), group)


def check_ranks(spec: ModelSpec, plan: FinetunePlan, size: int) -> None:
    """UsageError or UnsupportedModelError where so many ranks cannot teach a model as planned."""
    if spec.latent is not None or spec.experts is not None:
        raise UnsupportedModelError(
            f"tensor ranks teach dense models, and {spec.family} has experts or latent attention",
            hint="teach with one rank: more workers are more stages",
        )
    if plan.lora.kind != "lora" or plan.loss.kind == "kl":
        raise UsageError(
            "tensor ranks learn LoRA, from examples or preferences",
            hint="teach with one rank, or plain LoRA",
        )
    split_tensors(spec, [1.0] * size)
