"""The loop of a run: step after step, with checkpoints, a look at what is held out, and an early end.

It holds no tensors itself: a `LearningPipeline` does, in this process or in a swarm.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from shardcompute.backends.matrix import Float32
from shardcompute.core.errors import BackendError
from shardcompute.finetune.checkpoints import TrainingState, read_checkpoint, write_checkpoint
from shardcompute.finetune.data.batches import MicroBatch, pack_batches, step_batches
from shardcompute.finetune.data.examples import TrainingUnit
from shardcompute.finetune.pipeline import LearningPipeline, learned_of
from shardcompute.finetune.plan import FinetunePlan


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """One step of a run. `held_out` is the loss on what is not learned from, where it was looked at after it."""

    step: int
    loss: float
    norm: float
    rate: float
    tokens: int
    held_out: float | None = None


@dataclass(frozen=True, slots=True)
class RunCadence:
    """When checkpoints are written and held-out examples looked at, in steps; after `patience` looks without a better
    one it ends (0: never)."""

    checkpoint_every: int = 10
    evaluate_every: int = 20
    patience: int = 0


@dataclass(frozen=True, slots=True)
class Taught:
    """What came of a run: `learned` is the last state, or the best where examples were held out."""

    learned: Mapping[str, Float32]
    curve: tuple[CurvePoint, ...]
    seconds: float
    is_early: bool = False


OnStep = Callable[[CurvePoint, float], None]
"""Hears of every step, with how many seconds it took."""


@dataclass(slots=True)
class _Progress:
    """What of a run is not in its tensors."""

    curve: list[CurvePoint] = field(default_factory=list)
    best: dict[str, Float32] = field(default_factory=dict)
    best_loss: float | None = None
    waited: int = 0


def teach(
    pipeline: LearningPipeline,
    plan: FinetunePlan,
    examples: Sequence[TrainingUnit],
    folder: Path,
    digest: str,
    options: RunCadence,
    *,
    held_out: Sequence[TrainingUnit] = (),
    on_step: OnStep = lambda _point, _seconds: None,
    say: Callable[[str], None] = lambda _: None,
) -> Taught:
    """Run a plan, from the checkpoint that an earlier run of it has left in `folder`, if there is one."""
    progress, step = _Progress(), 0
    kept = read_checkpoint(folder, digest)
    if kept is not None:
        pipeline.load_state(kept.state)
        progress, step = _progress_of(kept), kept.step
        say(f"goes on after step {step}, from the checkpoint in {folder}")
    started = time.monotonic()
    watched = _cut_held_out(held_out, plan)
    is_early = False
    while step < plan.steps and not is_early:
        begun = time.monotonic()
        batches = step_batches(
            examples, step, batch=plan.batch, micro_batches=plan.micro_batches, seed=plan.seed
        )
        outcome = pipeline.learn(step, batches)
        if not outcome.loss < float("inf"):
            raise BackendError(
                f"the loss of step {step + 1} is {outcome.loss}",
                hint="lower --rate, raise --warmup, or compute in float32",
            )
        step += 1
        is_last = step == plan.steps
        held_out_loss = None
        if watched and (is_last or step % options.evaluate_every == 0):
            held_out_loss = pipeline.evaluate(watched)
            is_early = _note_best(progress, held_out_loss, pipeline, options.patience) and not is_last
        tokens = sum(len(batch.ids) for batch in batches)
        point = CurvePoint(step, outcome.loss, outcome.norm, plan.rate_at(step - 1), tokens, held_out_loss)
        progress.curve.append(point)
        on_step(point, time.monotonic() - begun)
        if step % options.checkpoint_every == 0 or is_last or is_early:
            write_checkpoint(folder, digest, _state_of(pipeline, progress, step))
    learned = progress.best or learned_of(pipeline.state())
    return Taught(learned, tuple(progress.curve), time.monotonic() - started, is_early)


def _cut_held_out(examples: Sequence[TrainingUnit], plan: FinetunePlan) -> list[MicroBatch]:
    """In batches like those that are learned from: the memory is planned for these."""
    size = max(1, plan.batch // plan.micro_batches)
    return [
        batch
        for start in range(0, len(examples), size)
        for batch in pack_batches(examples[start : start + size], 1)
    ]


def _note_best(progress: _Progress, loss: float, pipeline: LearningPipeline, patience: int) -> bool:
    """Whether patience is at its end."""
    if progress.best_loss is None or loss < progress.best_loss:
        progress.best, progress.best_loss, progress.waited = learned_of(pipeline.state()), loss, 0
        return False
    progress.waited += 1
    return bool(patience) and progress.waited >= patience


def _state_of(pipeline: LearningPipeline, progress: _Progress, step: int) -> TrainingState:
    facts = {
        "curve": [asdict(point) for point in progress.curve],
        "best_loss": progress.best_loss,
        "waited": progress.waited,
    }
    return TrainingState(step, pipeline.state(), progress.best, facts)


def _progress_of(kept: TrainingState) -> _Progress:
    curve = [CurvePoint(**point) for point in kept.facts["curve"]]
    return _Progress(curve, dict(kept.best), kept.facts["best_loss"], kept.facts["waited"])
