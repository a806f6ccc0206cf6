"""A run in one process: all stages here, one behind the other."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from shardcompute.core.errors import UsageError
from shardcompute.finetune.estimate import SPARE_SHARE, RunEstimate, check_memory, estimate_run
from shardcompute.finetune.local_pipeline import LocalPipeline
from shardcompute.finetune.modules import AdaptedMap, choose_modules
from shardcompute.finetune.plan import FinetunePlan, plan_digest
from shardcompute.finetune.preparation import PreparedRun
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
    on_step: OnStep = lambda _point, _seconds: None,
    say: Callable[[str], None] = lambda _: None,
) -> Taught:
    """Run it, or what is left of it."""
    torch.set_num_threads(options.threads)
    needed = plan_here(checkpoint, prepared, options, available_bytes)
    if options.device == "cpu":
        check_memory(needed, available_bytes)
    pipeline = open_local_pipeline(checkpoint, prepared, options, recomputes=needed.recomputes)
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


def open_local_pipeline(
    checkpoint: Checkpoint, prepared: PreparedRun, options: LocalOptions, *, recomputes: bool
) -> LocalPipeline:
    """The stages with weights, at the first step."""
    how = StageOptions(
        options.device, DTYPES[options.dtype], recomputes, is_gguf=checkpoint.files.kind == "gguf"
    )
    stages = [
        FinetuneStage(checkpoint.spec, checkpoint.layout, stage, checkpoint.source(stage), prepared.plan, how)
        for stage in cut(checkpoint.spec, options.stages)
    ]
    return LocalPipeline(stages, prepared.plan)


def measure_operations(threads: int, device: str) -> float:
    """Multiplications and additions a second, of matrices of float32 about as large as a layer's."""
    torch.set_num_threads(threads)
    left = torch.ones(_PROBE_SIZE, _PROBE_SIZE, device=device)
    count, started = 0, time.monotonic()
    while (passed := time.monotonic() - started) < _PROBE_S:
        float((left @ left)[0, 0])
        count += 1
    return 2.0 * _PROBE_SIZE**3 * count / passed
