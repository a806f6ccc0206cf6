"""What a run will take, before its first step: memory of each stage, bytes between them, and time, nearly.

Weights and what is learned are counted; activations are the sum of what autograd keeps of a dense layer, with some to
spare. Times come from how fast this machine multiplies matrices and are good to a factor of two.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from shardcompute.core.errors import CapacityError
from shardcompute.core.units import format_bytes
from shardcompute.finetune.adapters.parts import count_parameters
from shardcompute.finetune.modules import AdaptedMap
from shardcompute.finetune.plan import FinetunePlan
from shardcompute.models.layout import Layout
from shardcompute.models.spec import ModelSpec, Stage

_STATE_COPIES = 4
"""Of what is learned: itself, its gradients and two moments."""
_LOGIT_COPIES = 3
_FLOAT_BYTES = 4
SPARE_SHARE = 0.9
"""So much of the memory that is free may be planned with."""


@dataclass(frozen=True, slots=True)
class StageNeed:
    """Bytes that one stage holds while it learns."""

    stage: Stage
    weights_bytes: int
    learned_bytes: int
    activation_bytes: int

    @property
    def total_bytes(self) -> int:
        return self.weights_bytes + self.learned_bytes + self.activation_bytes


@dataclass(frozen=True, slots=True)
class RunEstimate:
    """A whole run: what stages need, what goes between them, and how long it takes."""

    stages: tuple[StageNeed, ...]
    parameters: int
    """Numbers that are learned."""
    step_tokens: int
    wire_bytes: int
    """Of the whole run, between all stages, in both directions."""
    operations: float
    """Multiplications and additions of the whole run."""
    recomputes: bool

    @property
    def total_bytes(self) -> int:
        return sum(need.total_bytes for need in self.stages)

    def seconds(self, operations_per_s: float) -> float:
        return self.operations / operations_per_s


def estimate_run(
    spec: ModelSpec,
    layout: Layout,
    stages: Sequence[Stage],
    plan: FinetunePlan,
    *,
    mean_tokens: float,
    modules: Sequence[AdaptedMap],
    recomputes: bool,
    weight_bytes: int = _FLOAT_BYTES,
    in_flight: int | None = None,
) -> RunEstimate:
    """Of examples that have so many tokens each, on average; the longest may fill a whole micro-batch. `in_flight` is
    how many micro-batches a stage holds, where `stages` are not all there are."""
    step_tokens = math.ceil(plan.batch * mean_tokens)
    # Of preferences, two answers come together, and rows of the frozen model go forward beside them.
    is_paired = plan.loss.kind == "dpo"
    rows = math.ceil(step_tokens / plan.micro_batches) + plan.longest * (2 if is_paired else 1)
    needs, matrix_numbers, parameters = [], 0, 0
    for place, stage in enumerate(stages):
        shapes = [(name, each.shape) for name, each in layout.stage_tensors(stage)]
        numbers = sum(math.prod(shape) for _, shape in shapes)
        matrix_numbers += sum(
            math.prod(shape) for name, shape in shapes if len(shape) == 2 and name != "embedding"
        )
        here = [module for module in modules if stage.start <= module.layer < stage.stop]
        learned = sum(count_parameters(module, plan.lora) for module in here)
        parameters += learned
        # With one forward, one backward at a time, earlier stages hold more micro-batches than later ones.
        held = in_flight or min(plan.micro_batches, len(stages) - place)
        needs.append(
            StageNeed(
                stage,
                numbers * weight_bytes,
                learned * _STATE_COPIES * _FLOAT_BYTES,
                _activation_bytes(spec, stage, rows, recomputes) * held + _logit_bytes(spec, stage, rows),
            )
        )
    passes = 2 + recomputes + is_paired
    boundaries = len(stages) - 1
    return RunEstimate(
        tuple(needs),
        parameters,
        step_tokens,
        plan.steps * boundaries * (2 + is_paired) * step_tokens * spec.hidden * _FLOAT_BYTES,
        2.0 * matrix_numbers * passes * step_tokens * plan.steps,
        recomputes,
    )


def check_memory(estimate: RunEstimate, available_bytes: int) -> None:
    """CapacityError where the stages of one machine need more than it has."""
    needed = estimate.total_bytes
    if needed > SPARE_SHARE * available_bytes:
        raise CapacityError(
            f"this run needs about {format_bytes(needed)} of memory, and {format_bytes(available_bytes)} are free",
            hint="use --recompute, more --micro-batches, a smaller --max-length or --batch, or teach in a swarm",
        )


def _activation_bytes(spec: ModelSpec, stage: Stage, rows: int, recomputes: bool) -> int:
    heads = (2 * spec.heads + 4 * spec.kv_heads) * spec.head_dim
    layer = 8 * spec.hidden + 2 * heads + 6 * spec.intermediate
    kept = spec.hidden * stage.count + layer if recomputes else layer * stage.count
    return rows * kept * _FLOAT_BYTES


def _logit_bytes(spec: ModelSpec, stage: Stage, rows: int) -> int:
    return rows * spec.vocab_size * _LOGIT_COPIES * _FLOAT_BYTES if stage.is_last else 0
