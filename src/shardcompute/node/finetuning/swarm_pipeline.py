"""A `finetune.pipeline.LearningPipeline` whose stages are on the workers of a crew."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

from shardcompute.backends.matrix import Float32
from shardcompute.finetune.data.batches import MicroBatch
from shardcompute.finetune.pipeline import StepOutcome, clip_scale
from shardcompute.finetune.swarm.frames import ApplyStep, LearnStep, NoFacts, StepSums, pack_batch
from shardcompute.node.finetuning.crew import Crew, RunOrder


class SwarmPipeline:
    """Holds no tensors. `wire_bytes` is what went between stages so far, `busy_s` how long each worker has computed of
    the `elapsed_s` that its steps took."""

    def __init__(self, crew: Crew, order: RunOrder) -> None:
        self._crew = crew
        self._order = order
        self.wire_bytes = 0
        self.elapsed_s = 0.0
        self.busy_s = [0.0] * len(crew.workers)

    def learn(self, step: int, batches: Sequence[MicroBatch]) -> StepOutcome:
        begun = time.monotonic()
        sums = self._run("learn", batches)
        # Copies have added up their gradients: each has the squares of all.
        first = sums[: len(self._crew.stages)]
        norm, scale = clip_scale([each for part in first for each in part.squares], self._order.plan.clip)
        self._crew.ask_all("apply", ApplyStep(step, scale), "applied", NoFacts)
        self.elapsed_s += time.monotonic() - begun
        return StepOutcome(self._loss(sums), norm)

    def evaluate(self, batches: Sequence[MicroBatch]) -> float:
        numbered = [replace(batch, key=(0, number)) for number, batch in enumerate(batches)]
        begun = time.monotonic()
        sums = self._run("evaluate", numbered)
        self.elapsed_s += time.monotonic() - begun
        is_paired = self._order.plan.loss.kind == "dpo"
        return self._loss(sums) / sum(batch.units(is_paired=is_paired) for batch in batches)

    @property
    def idle_shares(self) -> list[float]:
        """Of the time of all steps, how much each worker has not computed, copy by copy."""
        return [max(0.0, 1 - busy_s / self.elapsed_s) if self.elapsed_s else 0.0 for busy_s in self.busy_s]

    def state(self) -> dict[str, Float32]:
        return self._crew.state()

    def load_state(self, state: Mapping[str, Float32]) -> None:
        self._crew.load_state(state, self._order.modules)

    def _loss(self, sums: Sequence[StepSums]) -> float:
        """What the last stages of all copies have found."""
        return sum(part.loss for part in sums[len(self._crew.stages) - 1 :: len(self._crew.stages)])

    def _run(self, kind: str, batches: Sequence[MicroBatch]) -> list[StepSums]:
        copies = self._crew.copies
        orders = [LearnStep([pack_batch(batch) for batch in batches[copy::copies]]) for copy in range(copies)]
        sums = self._crew.ask_copies(kind, orders, "sums", StepSums)
        self.wire_bytes += sum(part.sent_bytes for part in sums)
        self.busy_s = [before + part.busy_s for before, part in zip(self.busy_s, sums, strict=True)]
        return sums
