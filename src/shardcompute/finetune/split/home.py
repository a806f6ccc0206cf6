"""Stages that stay at home in split learning, and what is said of others before the first step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from shardcompute.backends.matrix import Float32
from shardcompute.finetune.data.batches import MicroBatch, pack_batches
from shardcompute.finetune.data.examples import TrainingUnit
from shardcompute.finetune.estimate import check_memory, estimate_run
from shardcompute.finetune.local import DTYPES, LocalOptions, adapted_modules, teacher_bytes
from shardcompute.finetune.losses.teacher import LocalTeacher
from shardcompute.finetune.plan import FinetunePlan
from shardcompute.finetune.preparation import PreparedRun
from shardcompute.finetune.split.ownership import own_stages
from shardcompute.finetune.stage import FinetuneStage, StageOptions
from shardcompute.weights.checkpoint import Checkpoint

_PROBED_BATCHES = 12


@dataclass(frozen=True, slots=True)
class HomeStages:
    """The first and the last stage, with what they began with."""

    first: FinetuneStage
    last: FinetuneStage
    teacher: LocalTeacher | None
    beginning: dict[str, Float32]

    def begin_anew(self) -> None:
        """As if nothing had been learned: the others are new to the run as well."""
        for stage in (self.first, self.last):
            stage.forget()
            stage.load_state(self.beginning)

    def probed_batches(self, units: Sequence[TrainingUnit], plan: FinetunePlan) -> list[MicroBatch]:
        """Batches to measure with what others could read, as large as those that are learned from; none where there are
        too few examples."""
        size = max(1, plan.batch // plan.micro_batches)
        count = min(_PROBED_BATCHES, len(units) // size)
        if count < 2:
            return []
        batches = pack_batches(units[: size * count], count)
        return batches if self.teacher is None else self.teacher.with_words(batches)


def open_home(
    checkpoint: Checkpoint,
    prepared: PreparedRun,
    options: LocalOptions,
    kept: int,
    teacher: Checkpoint | None,
    available_bytes: int,
) -> HomeStages:
    """Those of a run, with their weights; CapacityError where this machine has too little memory for them."""
    torch.set_num_threads(options.threads)
    stages, dtype = own_stages(checkpoint.spec.layer_count, kept), DTYPES[options.dtype]
    needed = estimate_run(
        checkpoint.spec,
        checkpoint.layout,
        stages,
        prepared.plan,
        mean_tokens=prepared.mean_tokens,
        modules=adapted_modules(checkpoint, prepared.plan),
        recomputes=bool(options.recomputes),
        weight_bytes=dtype.itemsize,
        in_flight=prepared.plan.micro_batches,
    )
    if teacher is not None:
        available_bytes -= teacher_bytes(teacher, prepared, options)
    if options.device == "cpu":
        check_memory(needed, available_bytes)
    is_gguf = checkpoint.files.kind == "gguf"
    how = StageOptions(options.device, dtype, bool(options.recomputes), is_gguf=is_gguf)
    first, last = (
        FinetuneStage(checkpoint.spec, checkpoint.layout, each, checkpoint.source(each), prepared.plan, how)
        for each in stages
    )
    speaks = None if teacher is None else LocalTeacher(teacher, prepared.plan, how)
    return HomeStages(first, last, speaks, {**first.state(), **last.state()})
