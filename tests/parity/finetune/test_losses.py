"""Preference and distillation losses against plain torch: the same losses and norms, however the model is cut."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from shardcompute.core.errors import UsageError
from shardcompute.finetune.data.batches import MicroBatch, pack_batches
from shardcompute.finetune.data.examples import PreferencePair
from shardcompute.finetune.losses.teacher import DistillingPipeline, LocalTeacher, check_teacher
from shardcompute.finetune.plan import FinetunePlan, LoraShape, LossShape
from shardcompute.finetune.stage import StageOptions
from support.finetuning import PeftRun, batches_of, open_pipeline, open_tiny, random_examples
from support.models.tiny_checkpoint import save_tiny_llama

STEPS = 20
CUTS = ((0, 6), (0, 1, 4, 6))
PLAN = FinetunePlan(
    steps=STEPS, batch=4, micro_batches=2, rate=1e-3, longest=32, lora=LoraShape(rank=4, alpha=8.0)
)


def log_probs(model: torch.nn.Module, batch: MicroBatch) -> list[torch.Tensor]:
    """Of each sequence, the log-probabilities of all tokens at its learned rows, one sequence at a time."""
    found, first = [], 0
    for length in batch.lengths:
        rows = [int(row) - first for row in batch.rows if first <= row < first + length]
        ids = torch.from_numpy(batch.ids[first : first + length]).long()[None]
        found.append(torch.log_softmax(model(input_ids=ids).logits[0, rows].float(), dim=-1))
        first += length
    return found


def chosen_sums(model: torch.nn.Module, batch: MicroBatch) -> torch.Tensor:
    sums, first = [], 0
    for each in log_probs(model, batch):
        targets = torch.from_numpy(batch.targets[first : first + len(each)]).long()
        sums.append(each[torch.arange(len(each)), targets].sum())
        first += len(each)
    return torch.stack(sums)


class PlainPreferences(PeftRun):
    """DPO as its paper writes it, over a model of `peft` whose adapters are switched off for the reference."""

    def loss(self, batch: MicroBatch) -> torch.Tensor:
        with torch.no_grad(), self.model.disable_adapter():
            reference = chosen_sums(self.model, batch)
        ratios = (chosen_sums(self.model, batch) - reference).view(-1, 2)
        margins = self.plan.loss.beta * (ratios[:, 0] - ratios[:, 1])
        return torch.log1p(torch.exp(-margins)).sum() / batch.total


def pairs_of(count: int) -> list[PreferencePair]:
    examples = random_examples(2 * count)
    return [PreferencePair(*both) for both in zip(examples[::2], examples[1::2], strict=True)]


@pytest.mark.parametrize(
    ("steps", "dropout"), [(4, 0.0), (2, 0.3), pytest.param(STEPS, 0.0, marks=pytest.mark.long)]
)
def test_preferences_are_learned_as_plain_torch_does(steps: int, dropout: float, tmp_path: Path) -> None:
    base = save_tiny_llama(tmp_path / "base")
    lora = replace(PLAN.lora, dropout=dropout)
    plan, pairs = replace(PLAN, lora=lora, loss=LossShape("dpo", beta=0.3)), pairs_of(10)
    with open_tiny(base) as checkpoint:
        reference = PlainPreferences(base, checkpoint, plan, tmp_path / "begin")
        runs = [open_pipeline(checkpoint, edges, plan, recomputes=edges == CUTS[1]) for edges in CUTS]
    outcomes = []
    for step in range(steps):
        batches = batches_of(pairs, plan, step)
        found = [run.learn(step, batches) for run in runs]
        assert found[1:] == found[:-1], "cuts and recomputation change no bit"
        if not dropout:
            expected = reference.learn(step, batches)
            np.testing.assert_allclose([found[0].loss, found[0].norm], expected, rtol=1e-5)
        outcomes.append(found[0])
    assert outcomes[0].loss == pytest.approx(np.log(2), rel=1e-5)
    held_out = pack_batches(pairs, 3)
    losses = {run.evaluate(held_out) for run in runs}
    assert len(losses) == 1
    if not dropout:
        with torch.no_grad():
            expected_loss = sum(float(reference.loss(batch)) for batch in held_out)
        assert losses.pop() == pytest.approx(expected_loss, rel=1e-4)


class PlainDistillation(PeftRun):
    teacher: torch.nn.Module

    def loss(self, batch: MicroBatch) -> torch.Tensor:
        heat = self.plan.loss.temperature
        total = torch.zeros(())
        with torch.no_grad():
            wanted = log_probs(self.teacher, batch)
        for student, teacher in zip(log_probs(self.model, batch), wanted, strict=True):
            # A softmax of log-probabilities is that of the logits.
            p, q = (torch.softmax(each / heat, dim=-1) for each in (teacher, student))
            total = total + (p * (p.log() - q.log())).sum() * heat**2
        return total / batch.total


def test_a_student_comes_near_to_its_teacher_as_plain_torch_does(tmp_path: Path) -> None:
    base, wise = save_tiny_llama(tmp_path / "base"), save_tiny_llama(tmp_path / "wise", layers=3, seed=9)
    plan = replace(PLAN, loss=LossShape("kl", temperature=2.0))
    examples = random_examples(12)
    with open_tiny(base) as checkpoint, open_tiny(wise) as other:
        reference = PlainDistillation(base, checkpoint, plan, tmp_path / "begin")
        reference.teacher = transformers.AutoModelForCausalLM.from_pretrained(wise, dtype=torch.float32)
        teacher = LocalTeacher(other, plan, StageOptions())
        plain = [open_pipeline(checkpoint, edges, plan) for edges in CUTS]
        check_teacher(checkpoint, other, examples, plan.longest)
        with pytest.raises(UsageError, match="at most"):
            check_teacher(checkpoint, other, examples, 1 << 20)
    runs = [DistillingPipeline(each, teacher) for each in plain]
    for step in range(3):
        batches = batches_of(examples, plan, step)
        expected = reference.learn(step, batches)
        for run in runs:
            outcome = run.learn(step, batches)
            np.testing.assert_allclose([outcome.loss, outcome.norm], expected, rtol=1e-5)
    watched = pack_batches(examples, 3)
    with torch.no_grad():
        expected_loss = sum(float(reference.loss(batch)) for batch in watched)
    assert runs[1].evaluate(watched) == pytest.approx(expected_loss, rel=1e-4)
    with pytest.raises(UsageError, match="without its teacher's words"):
        plain[0].learn(0, batches)


def test_pairs_stay_together(tmp_path: Path) -> None:
    pairs = pairs_of(7)
    batches: Sequence[MicroBatch] = pack_batches(pairs, 3)
    assert sum(batch.units(is_paired=True) for batch in batches) == batches[0].total == 7
    lengths = sorted(
        (batch.lengths[place], batch.lengths[place + 1])
        for batch in batches
        for place in range(0, len(batch.lengths), 2)
    )
    assert lengths == sorted((len(each.chosen.ids), len(each.rejected.ids)) for each in pairs)
