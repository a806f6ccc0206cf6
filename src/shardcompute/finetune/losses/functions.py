"""Losses of a micro-batch at the last stage, each summed over its units: learned tokens, or pairs of answers."""

from __future__ import annotations

import numpy as np
import torch
from torch.nn import functional

from shardcompute.finetune.data.batches import MicroBatch
from shardcompute.finetune.tensor_ranks import LearningRank


def token_loss(logits: torch.Tensor, batch: MicroBatch, rank: LearningRank | None = None) -> torch.Tensor:
    """Cross-entropy of all learned tokens; `rank`: of logits that are this rank's part of the vocabulary."""
    targets = _targets(batch, logits)
    if rank is not None:
        return rank.cross_entropies(logits, targets).sum()
    return functional.cross_entropy(logits, targets, reduction="sum")


def sequence_log_probs(
    logits: torch.Tensor, batch: MicroBatch, rank: LearningRank | None = None
) -> torch.Tensor:
    """How likely the learned tokens of each sequence are together."""
    targets = _targets(batch, logits)
    if rank is not None:
        each = -rank.cross_entropies(logits, targets)
    else:
        each = -functional.cross_entropy(logits, targets, reduction="none")
    owners = np.searchsorted(np.cumsum(batch.lengths), batch.rows, side="right").astype(np.int64)
    return each.new_zeros(len(batch.lengths)).index_add(0, torch.from_numpy(owners).to(each.device), each)


def preference_loss(found: torch.Tensor, reference: torch.Tensor, beta: float) -> torch.Tensor:
    """DPO's loss of pairs, of the log-probabilities of chosen and rejected sequences in turn."""
    gained = found - reference
    return -functional.logsigmoid(beta * (gained[0::2] - gained[1::2])).sum()


def teacher_loss(logits: torch.Tensor, teacher: torch.Tensor, temperature: float) -> torch.Tensor:
    """The Kullback-Leibler divergence of a teacher's log-probabilities `[tokens, vocabulary]`, which are of this
    temperature already. The square keeps gradients as large as they are at 1."""
    found = functional.log_softmax(logits / temperature, dim=-1)
    return functional.kl_div(found, teacher, reduction="sum", log_target=True) * temperature**2


def _targets(batch: MicroBatch, logits: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(batch.targets).to(logits.device, torch.int64)
