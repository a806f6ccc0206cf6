"""Stages one behind the other: what a step of learning over all of them is, wherever they are.

`learn` is the same whoever holds the stages: micro-batches forward and backward, the norm of all gradients together,
and the optimiser of each stage with the share of it that is left.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from shardcompute.backends.matrix import Float32
from shardcompute.finetune.data.batches import MicroBatch


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """Mean loss of a step's tokens before it was learned from, and the norm of its gradients before it was clipped."""

    loss: float
    norm: float


class LearningPipeline(Protocol):
    """All stages of a model that learns."""

    def learn(self, step: int, batches: Sequence[MicroBatch]) -> StepOutcome: ...

    def evaluate(self, batches: Sequence[MicroBatch]) -> float:
        """The mean loss of batches that are not learned from."""
        ...

    def state(self) -> dict[str, Float32]:
        """What is learned and the optimiser's moments, of all stages."""
        ...

    def load_state(self, state: Mapping[str, Float32]) -> None: ...


def clip_scale(squares: Sequence[float], clip: float) -> tuple[float, float]:
    """The norm of all gradients and what they are multiplied with, of the squared sums of all layers in order."""
    norm = math.sqrt(math.fsum(squares))
    return norm, min(1.0, clip / (norm + 1e-6)) if clip else 1.0


def learned_of(state: Mapping[str, Float32]) -> dict[str, Float32]:
    """What PEFT's files hold of a state."""
    return {name: values for name, values in state.items() if name.startswith("base_model.")}
