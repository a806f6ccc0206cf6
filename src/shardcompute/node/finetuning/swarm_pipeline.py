"""A `finetune.pipeline.LearningPipeline` whose stages are on the workers of a crew."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from shardcompute.backends.matrix import Float32
from shardcompute.finetune.data.batches import MicroBatch
from shardcompute.finetune.pipeline import StepOutcome, clip_scale
from shardcompute.finetune.swarm.frames import ApplyStep, LearnStep, NoFacts, StepSums, pack_batch
from shardcompute.node.finetuning.crew import Crew, RunOrder


class SwarmPipeline:
    """Holds no tensors. `wire_bytes` is what went between stages so far, `busy_s` how long each has computed."""

    def __init__(self, crew: Crew, order: RunOrder) -> None:
        self._crew = crew
        self._order = order
        self.wire_bytes = 0
        self.busy_s = [0.0] * len(crew.stages)

    def learn(self, step: int, batches: Sequence[MicroBatch]) -> StepOutcome:
        sums = self._run("learn", batches)
        norm, scale = clip_scale([each for part in sums for each in part.squares], self._order.plan.clip)
        self._crew.ask_all("apply", ApplyStep(step, scale), "applied", NoFacts)
        return StepOutcome(sums[-1].loss, norm)

    def evaluate(self, batches: Sequence[MicroBatch]) -> float:
        numbered = [replace(batch, key=(0, number)) for number, batch in enumerate(batches)]
        sums = self._run("evaluate", numbered)
        return sums[-1].loss / sum(len(batch.targets) for batch in batches)

    def state(self) -> dict[str, Float32]:
        return self._crew.state()

    def load_state(self, state: Mapping[str, Float32]) -> None:
        self._crew.load_state(state, self._order.modules)

    def _run(self, kind: str, batches: Sequence[MicroBatch]) -> list[StepSums]:
        order = LearnStep([pack_batch(batch) for batch in batches])
        sums = self._crew.ask_all(kind, order, "sums", StepSums)
        self.wire_bytes += sum(part.sent_bytes for part in sums)
        self.busy_s = [before + part.busy_s for before, part in zip(self.busy_s, sums, strict=True)]
        return sums
