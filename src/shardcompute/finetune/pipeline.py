"""Stages one behind the other: a step of learning over all of them, here within one process.

`learn` is the same whoever holds the stages: micro-batches forward and backward, the norm of all gradients together,
and the optimiser of each stage with the share of it that is left.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from shardcompute.backends.matrix import Float32
from shardcompute.finetune.batches import MicroBatch
from shardcompute.finetune.plan import FinetunePlan
from shardcompute.finetune.stage import FinetuneStage


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """Mean loss of a step's tokens before it was learned from, and the norm of its gradients before it was clipped."""

    loss: float
    norm: float


class Pipeline(Protocol):
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


class LocalPipeline:
    """Stages of this process, in order. A copy of several learns from its own micro-batches of each step."""

    def __init__(
        self, stages: Sequence[FinetuneStage], plan: FinetunePlan, *, copy: int = 0, copies: int = 1
    ) -> None:
        self._stages = list(stages)
        self._plan = plan
        self._copy, self._copies = copy, copies

    def learn(self, step: int, batches: Sequence[MicroBatch]) -> StepOutcome:
        loss = 0.0
        for batch in batches[self._copy :: self._copies]:
            x: torch.Tensor | None = None
            for stage in self._stages:
                x = stage.forward(batch, x)
            assert x is not None
            loss += float(x)
            gradient: torch.Tensor | None = None
            for stage in reversed(self._stages):
                gradient = stage.backward(batch.key[1], gradient)
        squares = [square for stage in self._stages for square in stage.gather_gradients()]
        norm, scale = clip_scale(squares, self._plan.clip)
        for stage in self._stages:
            stage.apply_gradients(step, scale)
        return StepOutcome(loss, norm)

    def evaluate(self, batches: Sequence[MicroBatch]) -> float:
        weighted = learned = 0.0
        for batch in batches:
            x: torch.Tensor | None = None
            for stage in self._stages:
                x = stage.evaluate(batch, x)
            assert x is not None
            weighted += float(x) * batch.total
            learned += len(batch.targets)
        return weighted / learned

    def state(self) -> dict[str, Float32]:
        return {name: values for stage in self._stages for name, values in stage.state().items()}

    def load_state(self, state: Mapping[str, Float32]) -> None:
        for stage in self._stages:
            stage.load_state(state)
