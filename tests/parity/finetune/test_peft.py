"""Fine-tuning against `peft` in one process: the same losses, gradients and norms, however the model is cut."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shardcompute.collectives import run_ranks, thread_groups
from shardcompute.collectives.fabric_group import FabricGroup
from shardcompute.finetune.local_pipeline import LocalPipeline
from shardcompute.finetune.pipeline import StepOutcome
from shardcompute.finetune.plan import FinetunePlan, LoraShape
from support.finetuning import PeftRun, batches_of, open_pipeline, open_stages, open_tiny, random_examples
from support.models.tiny import save_tiny, save_tiny_talker
from support.models.tiny_checkpoint import save_tiny_llama

STEPS = 50
PLAN = FinetunePlan(
    steps=STEPS, batch=4, micro_batches=2, rate=1e-3, warmup=5, schedule="cosine", weight_decay=0.01,
    longest=32, lora=LoraShape(rank=4, alpha=8.0),
)  # fmt: skip
CUTS = ((0, 6), (0, 2, 6), (0, 1, 4, 6), (0, 1, 2, 3, 5, 6))
"""One, two, three and five stages."""


def save_six_layers(family: str, folder: Path) -> Path:
    words = save_tiny_llama(folder / "words")
    return save_tiny_talker(family, folder / "base", words, layers=6)


@pytest.mark.parametrize("family", ["llama", pytest.param("qwen3", marks=pytest.mark.long)])
def test_curves_are_those_of_peft_with_any_number_of_stages(family: str, tmp_path: Path) -> None:
    base = save_six_layers(family, tmp_path)
    examples = random_examples(20)
    with open_tiny(base) as checkpoint:
        reference = PeftRun(base, checkpoint, PLAN, tmp_path / "begin")
        runs = [open_pipeline(checkpoint, edges, PLAN) for edges in CUTS]
    for step in range(STEPS):
        batches = batches_of(examples, PLAN, step)
        expected = reference.learn(step, batches)
        for run in runs:
            outcome = run.learn(step, batches)
            np.testing.assert_allclose([outcome.loss, outcome.norm], expected, rtol=1e-5)
    first, *others = (run.state() for run in runs)
    for state in others:
        for name, values in first.items():
            np.testing.assert_array_equal(state[name], values, err_msg=name)


@pytest.mark.parametrize(
    "family", ["llama-biases", "gemma2", "phi3", "olmo2", "cohere", "mixtral", "gpt-oss", "gemma2-capped"]
)
def test_gradients_are_those_of_peft_in_every_kind_of_family(family: str, tmp_path: Path) -> None:
    """Fused maps, windows, soft caps, norms in other places, parallel blocks, experts and sinks."""
    base = save_tiny(family, tmp_path / "base")
    plan = FinetunePlan(steps=4, batch=3, micro_batches=1, rate=1e-3, longest=32, clip=0.0,
                        lora=LoraShape(rank=3, alpha=6.0, is_rank_stabilised=True))  # fmt: skip
    examples = random_examples(9)
    with open_tiny(base) as checkpoint:
        reference = PeftRun(base, checkpoint, plan, tmp_path / "begin")
        stages = open_stages(checkpoint, (0, 2, 3), plan)
    pipeline = LocalPipeline(stages, plan)
    for step in range(3):
        batches = batches_of(examples, plan, step)
        outcome, expected = pipeline.learn(step, batches), reference.learn(step, batches)
        np.testing.assert_allclose([outcome.loss, outcome.norm], expected, rtol=1e-4)
    (batch,) = batches_of(examples, plan, 3)
    stages[1].forward(batch, stages[0].forward(batch))
    stages[0].backward(0, stages[1].backward(0))
    reference.optimizer.zero_grad()
    reference.loss(batch).backward()
    wanted, found = reference.gradients(), {**stages[0].gradients(), **stages[1].gradients()}
    assert wanted.keys() == found.keys()
    size = max(np.abs(each).max() for each in wanted.values())
    for name, values in wanted.items():
        np.testing.assert_allclose(found[name], values, atol=1e-5 * size, rtol=1e-3, err_msg=name)


@settings(max_examples=5, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    inner=st.sets(st.integers(1, 5)),
    recomputes=st.booleans(),
    micro_batches=st.integers(1, 4),
    dropout=st.sampled_from((0.0, 0.2)),
)
def test_every_cut_gives_the_same_bits(
    inner: set[int],
    recomputes: bool,
    micro_batches: int,
    dropout: float,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    base = save_tiny_llama(tmp_path_factory.getbasetemp() / "cut")
    lora = LoraShape(rank=2, alpha=4.0, dropout=dropout)
    plan = FinetunePlan(steps=3, batch=4, micro_batches=micro_batches, rate=1e-2, longest=32, lora=lora)
    examples = random_examples(8)
    with open_tiny(base) as checkpoint:
        whole = open_pipeline(checkpoint, (0, 6), plan)
        cut = open_pipeline(checkpoint, (0, *sorted(inner), 6), plan, recomputes=recomputes)
    for step in range(3):
        batches = batches_of(examples, plan, step)
        assert whole.learn(step, batches) == cut.learn(step, batches)
    expected, found = whole.state(), cut.state()
    assert all(np.array_equal(found[name], values) for name, values in expected.items())


@pytest.mark.parametrize("edges", [(0, 6), (0, 2, 6)])
def test_copies_share_the_work_and_the_optimiser(edges: tuple[int, ...], tmp_path: Path) -> None:
    base = save_tiny_llama(tmp_path / "base")
    examples = random_examples(20)
    groups = thread_groups(2)
    with open_tiny(base) as checkpoint:
        one = open_stages(checkpoint, edges, PLAN)
        opened = [open_stages(checkpoint, edges, PLAN, copies=group) for group in groups]
    alone = LocalPipeline(one, PLAN)
    expected = [alone.learn(step, batches_of(examples, PLAN, step)) for step in range(STEPS)]

    def run(group: FabricGroup) -> list[StepOutcome]:
        pipeline = LocalPipeline(opened[group.rank], PLAN, copy=group.rank, copies=2)
        return [pipeline.learn(step, batches_of(examples, PLAN, step)) for step in range(STEPS)]

    first, second = run_ranks(groups, run)
    for wanted, one_half, other_half in zip(expected, first, second, strict=True):
        np.testing.assert_allclose(one_half.loss + other_half.loss, wanted.loss, rtol=1e-5)
        np.testing.assert_allclose([one_half.norm, other_half.norm], wanted.norm, rtol=1e-5)
    for mine, other, whole in zip(*opened, one, strict=True):
        for name, values in mine.learned().items():
            np.testing.assert_array_equal(other.learned()[name], values)
        sizes = [mine.optimizer_bytes, other.optimizer_bytes]
        assert sum(sizes) == whole.optimizer_bytes
        assert max(sizes) - min(sizes) <= 8
