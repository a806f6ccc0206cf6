"""Tensor ranks that teach: the losses and gradients of `peft`, whatever the cut, with the optimiser shared out."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shardcompute.collectives import run_ranks, thread_groups
from shardcompute.collectives.fabric_group import FabricGroup
from shardcompute.core.errors import UnsupportedModelError, UsageError
from shardcompute.finetune.local_pipeline import LocalPipeline
from shardcompute.finetune.pipeline import StepOutcome
from shardcompute.finetune.plan import FinetunePlan, LoraShape
from shardcompute.finetune.stage import FinetuneStage
from support.finetuning import PeftRun, batches_of, open_pipeline, open_stages, open_tiny, random_examples
from support.models.tiny import save_tiny
from support.models.tiny_checkpoint import save_tiny_llama

STEPS = 50
PLAN = FinetunePlan(
    steps=STEPS, batch=4, micro_batches=2, rate=1e-3, warmup=5, schedule="cosine", weight_decay=0.01,
    longest=32, lora=LoraShape(rank=4, alpha=8.0),
)  # fmt: skip


def open_ranks(
    base: Path,
    edges: tuple[int, ...],
    plan: FinetunePlan,
    size: int,
    copies: int = 1,
    *,
    recomputes: bool = False,
) -> tuple[list[FabricGroup], list[list[FinetuneStage]]]:
    """Groups of all ranks of all copies, copy by copy, and the stages of each."""
    groups = thread_groups(size * copies)
    mates = [range(first, first + size) for first in range(0, size * copies, size)]
    with open_tiny(base) as checkpoint:
        opened = [
            open_stages(
                checkpoint,
                edges,
                plan,
                recomputes=recomputes,
                copies=group,
                ranks=group.split(mates[group.rank // size]),
            )
            for group in groups
        ]
    return groups, opened


def learn_all(
    groups: list[FabricGroup],
    opened: list[list[FinetuneStage]],
    plan: FinetunePlan,
    steps: int,
    copies: int = 1,
) -> list[list[StepOutcome]]:
    examples = random_examples(20)

    def run(group: FabricGroup) -> list[StepOutcome]:
        copy = group.rank * copies // group.size
        pipeline = LocalPipeline(opened[group.rank], plan, copy=copy, copies=copies)
        return [pipeline.learn(step, batches_of(examples, plan, step)) for step in range(steps)]

    return list(run_ranks(groups, run))


@pytest.mark.parametrize(("size", "edges"), [(2, (0, 6)), (3, (0, 2, 6))])
def test_curves_of_ranks_are_those_of_peft(size: int, edges: tuple[int, ...], tmp_path: Path) -> None:
    base = save_tiny_llama(tmp_path / "base")
    examples = random_examples(20)
    with open_tiny(base) as checkpoint:
        reference = PeftRun(base, checkpoint, PLAN, tmp_path / "begin")
        (whole,) = open_stages(checkpoint, (0, 6), PLAN)
    expected = [reference.learn(step, batches_of(examples, PLAN, step)) for step in range(STEPS)]
    groups, opened = open_ranks(base, edges, PLAN, size)
    for found in learn_all(groups, opened, PLAN, STEPS):
        np.testing.assert_allclose([(each.loss, each.norm) for each in found], expected, rtol=1e-5)
    for stages in zip(*opened, strict=True):
        first = stages[0].learned()
        for other in stages[1:]:
            for name, values in other.learned().items():
                np.testing.assert_array_equal(values, first[name], err_msg=name)
    sizes = [sum(stage.optimizer_bytes for stage in stages) for stages in opened]
    assert sum(sizes) == whole.optimizer_bytes
    assert max(sizes) <= whole.optimizer_bytes / size + 64


def test_copies_of_ranks_share_work_and_optimiser(tmp_path: Path) -> None:
    base = save_tiny_llama(tmp_path / "base")
    examples = random_examples(20)
    with open_tiny(base) as checkpoint:
        alone = open_pipeline(checkpoint, (0, 6), PLAN)
    expected = [alone.learn(step, batches_of(examples, PLAN, step)) for step in range(10)]
    groups, opened = open_ranks(base, (0, 6), PLAN, 2, copies=2)
    first, same, second, _ = learn_all(groups, opened, PLAN, 10, copies=2)
    assert first == same
    for wanted, one, other in zip(expected, first, second, strict=True):
        np.testing.assert_allclose(one.loss + other.loss, wanted.loss, rtol=1e-5)
        np.testing.assert_allclose([one.norm, other.norm], wanted.norm, rtol=1e-5)
    moments = 2 * 4 * opened[0][0].learned_numbers
    assert max(stage.optimizer_bytes for (stage,) in opened) <= moments / 4 + 8


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    inner=st.sets(st.integers(1, 5), max_size=2),
    size=st.integers(1, 4),
    recomputes=st.booleans(),
    dropout=st.sampled_from((0.0, 0.2)),
    family=st.sampled_from(("llama-biases", "gemma2", "phi3", "olmo2", "cohere")),
)
def test_every_cut_and_every_number_of_ranks_has_the_gradients_of_one_process(
    inner: set[int],
    size: int,
    recomputes: bool,
    dropout: float,
    family: str,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """Key heads that several ranks keep, fused maps, biases that are added once, norms over all heads, parallel
    blocks."""
    base = tmp_path_factory.getbasetemp() / f"ranks-{family}"
    if not base.exists():
        save_tiny(family, base)
    plan = replace(PLAN, clip=0.0, lora=LoraShape(rank=2, alpha=4.0, dropout=dropout))
    (batch, _) = batches_of(random_examples(20), plan, 0)
    with open_tiny(base) as checkpoint:
        layers = checkpoint.spec.layer_count
        size = min(size, checkpoint.spec.heads)
        whole = open_stages(checkpoint, (0, layers), plan)
    edges = (0, *sorted(each for each in inner if each < layers), layers)
    groups, opened = open_ranks(base, edges, plan, size, recomputes=recomputes)

    def shake(stages: list[FinetuneStage]) -> None:
        chance = np.random.default_rng(5)
        known = {
            name: chance.normal(0, 0.05, values.shape) for name, values in sorted(whole[0].learned().items())
        }
        for stage in stages:
            stage.load_state({name: values.astype(np.float32) for name, values in known.items()})

    def gradients(stages: list[FinetuneStage]) -> tuple[float, dict[str, np.ndarray]]:
        shake(stages)
        x = None
        for stage in stages:
            x = stage.forward(batch, x)
        gradient = None
        for stage in reversed(stages):
            gradient = stage.backward(0, gradient)
        assert x is not None
        return float(x), {name: each for stage in stages for name, each in stage.gradients().items()}

    loss, expected = gradients(whole)
    found = run_ranks(groups, lambda group: gradients(opened[group.rank]))
    largest = max(np.abs(values).max() for values in expected.values())
    for own, _ in found:
        np.testing.assert_allclose(own, loss, rtol=1e-5)
    for name, values in expected.items():
        summed = np.sum([parts[name] for _, parts in found], axis=0)
        np.testing.assert_allclose(summed, values, atol=1e-5 * largest, rtol=1e-4, err_msg=name)


def test_ranks_refuse_what_they_cannot_teach(tmp_path: Path) -> None:
    base = save_tiny_llama(tmp_path / "base")
    with pytest.raises(UsageError, match="tensor ranks learn LoRA"):
        open_ranks(base, (0, 6), replace(PLAN, lora=LoraShape(kind="dora")), 2)
    with pytest.raises(UnsupportedModelError, match="heads"):
        open_ranks(base, (0, 6), PLAN, 64)
    with pytest.raises(UnsupportedModelError, match="experts or latent attention"):
        open_ranks(save_tiny("mixtral", tmp_path / "sparse"), (0, 3), PLAN, 2)
