"""The plan of a fine-tuning run: everything that decides its numbers, complete and frozen.

Two runs with one plan, one model and one training file give the same adapter, however often they were interrupted and
however the model is cut: chance is keyed by seed and place, never by what came before.
"""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import asdict, dataclass, field
from typing import Literal

from shardcompute.core.errors import UsageError
from shardcompute.weights.adapters import MAX_RANK

AdapterKind = Literal["lora", "dora", "bottleneck"]
Schedule = Literal["constant", "linear", "cosine"]
LossKind = Literal["cross-entropy", "dpo", "kl"]
LOSSES: tuple[LossKind, ...] = ("cross-entropy", "dpo", "kl")
SCHEDULES: tuple[Schedule, ...] = ("constant", "linear", "cosine")


@dataclass(frozen=True, slots=True)
class LoraShape:
    """Which linear maps get additions and how large those are. `targets` are the ends of modules' names as PEFT has
    them; none: every map of a layer that can be adapted."""

    rank: int = 8
    alpha: float = 16.0
    targets: tuple[str, ...] = ()
    is_rank_stabilised: bool = False
    dropout: float = 0.0
    kind: AdapterKind = "lora"

    @property
    def scale(self) -> float:
        return self.alpha / (math.sqrt(self.rank) if self.is_rank_stabilised else self.rank)


@dataclass(frozen=True, slots=True)
class LossShape:
    """What is made smaller. `beta` is DPO's: how dear it is to leave the frozen model; `teacher` names the weights that
    are come near to, at a temperature, with KL."""

    kind: LossKind = "cross-entropy"
    beta: float = 0.1
    temperature: float = 1.0
    teacher: str = ""


@dataclass(frozen=True, slots=True)
class FinetunePlan:
    """A run of `steps` optimiser steps, each over `batch` examples in `micro_batches` parts."""

    steps: int
    batch: int = 8
    micro_batches: int = 2
    rate: float = 2e-4
    warmup: int = 0
    schedule: Schedule = "linear"
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.999)
    epsilon: float = 1e-8
    clip: float = 1.0
    """The largest norm that the gradients of all stages may have together; 0: any."""
    seed: int = 1
    longest: int = 512
    """Tokens of an example."""
    lora: LoraShape = field(default_factory=LoraShape)
    loss: LossShape = field(default_factory=LossShape)

    def rate_at(self, step: int) -> float:
        """The learning rate of a step, counted from 0."""
        if step < self.warmup:
            return self.rate * (step + 1) / self.warmup
        done = (step - self.warmup) / max(1, self.steps - self.warmup)
        if self.schedule == "linear":
            return self.rate * (1 - done)
        if self.schedule == "cosine":
            return self.rate * 0.5 * (1 + math.cos(math.pi * done))
        return self.rate


def check_finetune_plan(plan: FinetunePlan) -> FinetunePlan:
    """UsageError where its numbers make no sense."""
    lora = plan.lora
    checks = (
        (1 <= lora.rank <= MAX_RANK, f"--rank is {lora.rank}", f"use 1 to {MAX_RANK}; 8 or 16 are usual"),
        (0 < lora.alpha < 1e6, f"--alpha is {lora.alpha}", "use a positive number; twice the rank is usual"),
        (lora.kind != "bottleneck" or not lora.is_rank_stabilised, "a bottleneck has no scale", "leave out --rslora"),
        (0 <= lora.dropout < 1, f"--dropout is {lora.dropout}", "use a share from 0 up to, not including, 1"),
        (plan.steps >= 1, "there are no steps to take", "use --steps or --epochs above 0"),
        (1 <= plan.micro_batches <= plan.batch, f"{plan.batch} examples cannot be cut into {plan.micro_batches}",
         "use --micro-batches up to --batch"),
        (0 < plan.rate < 1, f"--rate is {plan.rate}", "use a small positive number; 2e-4 is usual"),
        (0 <= plan.warmup < plan.steps or plan.warmup == 0, f"--warmup is {plan.warmup} of {plan.steps} steps",
         "use fewer steps than there are"),
        (plan.clip >= 0, f"--clip is {plan.clip}", "use 0 for no limit, or 1"),
        (0 < plan.loss.beta < 1e3, f"--beta is {plan.loss.beta}", "use a positive number; 0.1 is usual"),
        (0.1 <= plan.loss.temperature <= 100, f"--temperature is {plan.loss.temperature}", "use 0.1 to 100"),
        (plan.longest >= 2, f"--max-length is {plan.longest}", "use at least 2"),
    )  # fmt: skip
    for is_good, message, hint in checks:
        if not is_good:
            raise UsageError(message, hint=hint)
    return plan


def plan_digest(plan: FinetunePlan, model: str, data_sha256: str) -> str:
    """What tells a run from others: a checkpoint of one is never gone on with by another."""
    facts = {"plan": asdict(plan), "model": model, "data": data_sha256}
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
