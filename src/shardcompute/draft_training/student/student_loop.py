"""Training loop of a student: what its parent's head makes of the parent's state of a row, it is to make of the same.

At first states themselves are compared, which says more than what comes of them and costs less than a head.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from shardcompute.draft_training.dialogue import GIVEN
from shardcompute.draft_training.draft_net import rms
from shardcompute.draft_training.student.student_net import StudentNet
from shardcompute.draft_training.training_loop import (
    Distillation,
    DistillationLoop,
    FrozenWeights,
    LoopOptions,
    teach,
)
from shardcompute.draft_training.training_rows import SequenceBatch, TrainingRows

_GIVEN_SHARE = 0.5
"""Of the rows that were given, and only read, so many are learned from as well."""
_STATES_UNTIL = 0.35
"""In the first part of a run only states are compared."""
_STATE_WEIGHT = 1.0


class StudentLoop(DistillationLoop):
    """Of a student, whose head and embedding are in `frozen`: those of all tokens."""

    def __init__(
        self,
        net: StudentNet,
        dataset: TrainingRows,
        frozen: FrozenWeights,
        options: LoopOptions,
        *,
        seed: int,
    ) -> None:
        super().__init__(net, dataset, frozen, options, seed=seed)
        self._net = net

    def loss(self, batch: SequenceBatch, share: float) -> tuple[torch.Tensor, torch.Tensor]:
        chosen = self._choose_rows(batch)
        found = self._net.run(self._frozen.embed(batch.tokens)).flatten(0, 1)[chosen]
        truth = batch.states.flatten(0, 1)[chosen].float()
        # Both are seen as the last norm leaves them: nothing else of a state counts.
        eps = self._net.shape.spec.norm_eps
        apart = functional.mse_loss(rms(found, eps), truth)
        if share < _STATES_UNTIL:
            return apart, torch.zeros(1, device=self._device)
        target, best = teach(self._frozen, self._head, truth, self._options.soft)
        weight = torch.full((len(chosen),), 1 / max(1, len(chosen)), device=self._device)
        rows = self._net.normed(found).to(self._head.dtype)
        said, likely = Distillation.apply(rows, self._head, target, best, weight)
        return said + _STATE_WEIGHT * apart, likely.mean()[None]

    def _choose_rows(self, batch: SequenceBatch) -> torch.Tensor:
        """Those behind which the model chose, and some of the others."""
        predicted = torch.cat([batch.origins[:, 1:], batch.origins[:, -1:]], dim=1)
        draws = torch.rand(predicted.shape, generator=self._random, device=self._device)
        is_chosen = batch.is_there & ((predicted != GIVEN) | (draws < _GIVEN_SHARE))
        return is_chosen.flatten().nonzero()[:, 0]
