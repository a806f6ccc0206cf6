"""Runs of fine-tuning on tiny checkpoints, and the same run by `peft` in one process."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
import transformers
from numpy.typing import NDArray

from shardcompute.collectives import Group
from shardcompute.core.settings import load_settings
from shardcompute.finetune.data.batches import MicroBatch, step_batches
from shardcompute.finetune.data.examples import Example, TrainingUnit
from shardcompute.finetune.local_pipeline import LocalPipeline
from shardcompute.finetune.modules import choose_modules
from shardcompute.finetune.peft_folder import AdapterCard, write_peft_folder
from shardcompute.finetune.plan import FinetunePlan
from shardcompute.finetune.stage import FinetuneStage, StageOptions
from shardcompute.finetune.tensor_ranks import open_learning_rank
from shardcompute.models.spec import Stage
from shardcompute.weights.checkpoint import Checkpoint, open_checkpoint
from shardcompute.weights.sources.reference import parse_reference
from shardcompute.weights.sources.resolve import resolve
from support.models.tiny import VOCABULARY


def open_tiny(folder: Path) -> Checkpoint:
    return open_checkpoint(resolve(parse_reference(str(folder)), load_settings()))


def random_examples(count: int, seed: int = 3, longest: int = 24) -> list[Example]:
    """Of a few tokens each, with a prompt that is not learned."""
    chance = np.random.default_rng(seed)
    made = []
    for _ in range(count):
        length = int(chance.integers(6, longest))
        learned = np.arange(length) >= chance.integers(1, length - 2)
        made.append(Example(chance.integers(3, VOCABULARY, length).astype(np.int32), learned))
    return made


def batches_of(examples: Sequence[TrainingUnit], plan: FinetunePlan, step: int) -> list[MicroBatch]:
    return step_batches(examples, step, batch=plan.batch, micro_batches=plan.micro_batches, seed=plan.seed)


def open_stages(
    checkpoint: Checkpoint,
    edges: Sequence[int],
    plan: FinetunePlan,
    *,
    recomputes: bool = False,
    copies: Group | None = None,
    ranks: Group | None = None,
) -> list[FinetuneStage]:
    """Stages between these edges; `ranks` are some of `copies`."""
    total = checkpoint.spec.layer_count
    options = StageOptions(recomputes=recomputes, is_gguf=checkpoint.files.kind == "gguf")
    rank = None if ranks is None else open_learning_rank(checkpoint.spec, plan, ranks)
    return [
        FinetuneStage(
            checkpoint.spec,
            checkpoint.layout,
            stage,
            checkpoint.source(stage),
            plan,
            options,
            copies,
            rank=rank,
        )
        for stage in (Stage(a, b, total) for a, b in pairwise(edges))
    ]


def open_pipeline(
    checkpoint: Checkpoint, edges: Sequence[int], plan: FinetunePlan, *, recomputes: bool = False
) -> LocalPipeline:
    return LocalPipeline(open_stages(checkpoint, edges, plan, recomputes=recomputes), plan)


class PeftRun:
    """The reference: a plan as `peft`, `transformers` and torch's own AdamW carry it out, from the same beginning."""

    def __init__(self, folder: Path, checkpoint: Checkpoint, plan: FinetunePlan, begin: Path) -> None:
        import peft

        stages = open_stages(checkpoint, (0, checkpoint.spec.layer_count), plan)
        modules = choose_modules(checkpoint.spec, checkpoint.layout, plan.lora, is_gguf=False)
        card = AdapterCard(str(folder), "none", "none", "", 0, plan, ())
        write_peft_folder(begin, stages[0].learned(), modules, card)
        base = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # what peft asks of transformers
            self.model = peft.PeftModel.from_pretrained(base, begin, is_trainable=True)
        self.plan = plan
        self.trained = [each for each in self.model.parameters() if each.requires_grad]
        self.optimizer = torch.optim.AdamW(
            self.trained, lr=plan.rate, betas=plan.betas, eps=plan.epsilon, weight_decay=plan.weight_decay
        )

    def learn(self, step: int, batches: Sequence[MicroBatch]) -> tuple[float, float]:
        """Loss and gradient norm of a step."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.plan.rate_at(step)
        self.optimizer.zero_grad()
        loss = sum((self.loss(batch) for batch in batches), torch.zeros(()))
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.trained, self.plan.clip or float("inf"))
        self.optimizer.step()
        return float(loss.detach()), float(norm)

    def loss(self, batch: MicroBatch) -> torch.Tensor:
        count, longest = len(batch.lengths), max(batch.lengths)
        ids = torch.zeros(count, longest, dtype=torch.int64)
        mask = torch.zeros_like(ids)
        targets = torch.full((count, longest), -100, dtype=torch.int64)
        flat = torch.full((len(batch.ids),), -100, dtype=torch.int64)
        flat[torch.from_numpy(batch.rows).long()] = torch.from_numpy(batch.targets).long()
        first = 0
        for place, length in enumerate(batch.lengths):
            rows = slice(first, first + length)
            ids[place, :length] = torch.from_numpy(batch.ids[rows])
            targets[place, :length] = flat[rows]
            mask[place, :length] = 1
            first += length
        logits = self.model(input_ids=ids, attention_mask=mask).logits
        summed = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1).float(), targets.flatten(), reduction="sum"
        )
        return summed / batch.total

    def gradients(self) -> dict[str, NDArray[np.float32]]:
        return {
            name.replace(".default.", "."): each.grad.numpy().copy()
            for name, each in self.model.named_parameters()
            if each.requires_grad and each.grad is not None
        }
