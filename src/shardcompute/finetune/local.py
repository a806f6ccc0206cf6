"""A run in one process: all stages here, one behind the other."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from shardcompute.backends.matrix import Float32
from shardcompute.core.errors import UsageError
from shardcompute.finetune.estimate import SPARE_SHARE, RunEstimate, check_memory, estimate_run
from shardcompute.finetune.local_pipeline import LocalPipeline
from shardcompute.finetune.losses.teacher import DistillingPipeline, LocalTeacher
from shardcompute.finetune.modules import AdaptedMap, choose_modules
from shardcompute.finetune.pipeline import LearningPipeline
from shardcompute.finetune.plan import FinetunePlan, plan_digest
from shardcompute.finetune.preparation import PreparedRun
from shardcompute.finetune.samples import sample_stage
from shardcompute.finetune.stage import FinetuneStage, StageOptions
from shardcompute.finetune.training import OnStep, RunCadence, Taught, teach
from shardcompute.models.spec import cut
from shardcompute.weights.checkpoint import Checkpoint
from shardcompute.weights.served import weights_key

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_PROBE_SIZE = 768
_PROBE_S = 0.3


@dataclass(frozen=True, slots=True)
class LocalOptions:
    """How one process computes a run. `recomputes` None: where memory is short without."""

    device: str = "cpu"
    dtype: str = "float32"
    threads: int = 1
    stages: int = 1
    recomputes: bool | None = None


def plan_here(
    checkpoint: Checkpoint, prepared: PreparedRun, options: LocalOptions, available_bytes: int
) -> RunEstimate:
    """What the run needs in this process, with recomputation if it is wanted, or needed and left open."""
    if options.dtype not in DTYPES:
        raise UsageError(f"there is no --dtype {options.dtype}", hint=f"use {' or '.join(DTYPES)}")
    if not 1 <= options.stages <= checkpoint.spec.layer_count:
        raise UsageError(
            f"{checkpoint.spec.layer_count} layers cannot be cut into {options.stages} stages",
            hint="use fewer --stages",
        )

    def estimate(recomputes: bool) -> RunEstimate:
        return estimate_run(
            checkpoint.spec,
            checkpoint.layout,
            cut(checkpoint.spec, options.stages),
            prepared.plan,
            mean_tokens=prepared.mean_tokens,
            modules=adapted_modules(checkpoint, prepared.plan),
            recomputes=recomputes,
            weight_bytes=DTYPES[options.dtype].itemsize,
        )

    if options.recomputes is not None:
        return estimate(options.recomputes)
    stored = estimate(recomputes=False)
    fits = stored.total_bytes <= SPARE_SHARE * available_bytes
    return stored if fits else estimate(recomputes=True)


def adapted_modules(checkpoint: Checkpoint, plan: FinetunePlan) -> tuple[AdaptedMap, ...]:
    """All that a run adapts."""
    is_gguf = checkpoint.files.kind == "gguf"
    return choose_modules(checkpoint.spec, checkpoint.layout, plan.lora, is_gguf=is_gguf)


def run_digest(checkpoint: Checkpoint, prepared: PreparedRun) -> str:
    return plan_digest(prepared.plan, weights_key(checkpoint), prepared.sha256)


def teach_here(
    checkpoint: Checkpoint,
    prepared: PreparedRun,
    resume: Path,
    options: LocalOptions,
    loop: RunCadence,
    *,
    available_bytes: int,
    teacher: Checkpoint | None = None,
    on_step: OnStep = lambda _point, _seconds: None,
    say: Callable[[str], None] = lambda _: None,
) -> Taught:
    """Run it, or what is left of it; towards `teacher`, where it distils one."""
    torch.set_num_threads(options.threads)
    if teacher is not None:
        available_bytes -= teacher_bytes(teacher, prepared, options)
    needed = plan_here(checkpoint, prepared, options, available_bytes)
    if options.device == "cpu":
        check_memory(needed, available_bytes)
    pipeline: LearningPipeline = open_local_pipeline(
        checkpoint, prepared, options, recomputes=needed.recomputes
    )
    if teacher is not None:
        how = StageOptions(options.device, DTYPES[options.dtype])
        pipeline = DistillingPipeline(pipeline, LocalTeacher(teacher, prepared.plan, how))
    return teach(
        pipeline,
        prepared.plan,
        prepared.taught.examples,
        resume,
        run_digest(checkpoint, prepared),
        loop,
        held_out=prepared.held_out,
        on_step=on_step,
        say=say,
    )


def teacher_bytes(teacher: Checkpoint, prepared: PreparedRun, options: LocalOptions) -> int:
    """What a teacher takes: its weights, and its words on a step's tokens, thrice while they are made."""
    tensors = (place for part in (teacher.layout.model, *teacher.layout.layers) for place in part.values())
    numbers = sum(math.prod(place.shape) for place in tensors)
    rows = math.ceil(prepared.plan.batch * prepared.mean_tokens)
    return int(numbers * DTYPES[options.dtype].itemsize) + 3 * rows * teacher.spec.vocab_size * 4


def open_local_pipeline(
    checkpoint: Checkpoint, prepared: PreparedRun, options: LocalOptions, *, recomputes: bool
) -> LocalPipeline:
    """The stages with weights, at the first step."""
    return LocalPipeline(
        _open_stages(checkpoint, prepared.plan, options, recomputes=recomputes), prepared.plan
    )


def _open_stages(
    checkpoint: Checkpoint, plan: FinetunePlan, options: LocalOptions, *, recomputes: bool
) -> list[FinetuneStage]:
    how = StageOptions(
        options.device, DTYPES[options.dtype], recomputes, is_gguf=checkpoint.files.kind == "gguf"
    )
    return [
        FinetuneStage(checkpoint.spec, checkpoint.layout, stage, checkpoint.source(stage), plan, how)
        for stage in cut(checkpoint.spec, options.stages)
    ]


def sample_here(
    checkpoint: Checkpoint,
    prepared: PreparedRun,
    learned: Mapping[str, Float32],
    prompts: Sequence[Sequence[int]],
    options: LocalOptions,
) -> list[tuple[list[int], list[int]]]:
    """Answers to prompts without and with what was learned, computed as it is taught."""
    torch.set_num_threads(options.threads)
    (stage,) = _open_stages(checkpoint, prepared.plan, replace(options, stages=1), recomputes=False)
    stage.load_state(learned)
    return sample_stage(stage, prompts, checkpoint.tokenizer().eos_ids)


def measure_operations(threads: int, device: str) -> float:
    """Multiplications and additions a second, of matrices of float32 about as large as a layer's."""
    torch.set_num_threads(threads)
    left = torch.ones(_PROBE_SIZE, _PROBE_SIZE, device=device)
    count, started = 0, time.monotonic()
    while (passed := time.monotonic() - started) < _PROBE_S:
        float((left @ left)[0, 0])
        count += 1
    return 2.0 * _PROBE_SIZE**3 * count / passed
