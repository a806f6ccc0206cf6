"""All stages of a model that learns, in one process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from shardcompute.backends.matrix import Float32
from shardcompute.finetune.data.batches import MicroBatch
from shardcompute.finetune.pipeline import StepOutcome, clip_scale
from shardcompute.finetune.plan import FinetunePlan
from shardcompute.finetune.stage import FinetuneStage


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
            learned += batch.units(is_paired=self._plan.loss.kind == "dpo")
        return weighted / learned

    def state(self) -> dict[str, Float32]:
        return {name: values for stage in self._stages for name, values in stage.state().items()}

    def load_state(self, state: Mapping[str, Float32]) -> None:
        for stage in self._stages:
            stage.load_state(state)
