"""Split learning: the bytes of one process, nothing of the data with others, and what these could still read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from shardcompute.bench.finetune.leak import LeakBench, run_leak_bench
from shardcompute.core.errors import UsageError
from shardcompute.finetune.data.batches import MicroBatch, pack_batches
from shardcompute.finetune.data.examples import PreferencePair
from shardcompute.finetune.plan import FinetunePlan, LoraShape, LossShape
from shardcompute.finetune.split.leak import measure_leak
from shardcompute.finetune.split.ownership import lent_stages, own_stages
from shardcompute.finetune.split.search import search_tokens
from shardcompute.finetune.split.split_pipeline import SplitPipeline, StagesHere
from shardcompute.finetune.stage import FinetuneStage
from shardcompute.models.spec import Stage
from shardcompute.weights.checkpoint import Checkpoint
from support.finetuning import batches_of, open_pipeline, open_stages, open_tiny, random_examples
from support.models.tiny_checkpoint import save_tiny_llama

PLAN = FinetunePlan(
    steps=6, batch=4, micro_batches=3, rate=5e-3, longest=32, lora=LoraShape(rank=3, alpha=6.0, dropout=0.1)
)


class WatchedStages(StagesHere):
    """Keeps whatever others are told."""

    def __init__(self, stages: Sequence[FinetuneStage]) -> None:
        super().__init__(stages)
        self.told: list[MicroBatch] = []

    def begin(self, batches: Sequence[MicroBatch], *, learns: bool) -> None:
        self.told += batches
        super().begin(batches, learns=learns)


def open_split(
    checkpoint: Checkpoint, plan: FinetunePlan, kept: int, workers: int
) -> tuple[SplitPipeline, WatchedStages]:
    own = own_stages(6, kept)
    lent = lent_stages(6, kept, workers)
    edges = [own[0].start, *(each.start for each in lent), own[1].start, own[1].stop]
    first, *between, last = open_stages(checkpoint, edges, plan)
    watched = WatchedStages(between)
    return SplitPipeline(first, watched, last), watched


@pytest.mark.parametrize(("kept", "workers", "loss"), [(1, 2, "cross-entropy"), (2, 1, "dpo")])
def test_keeping_the_ends_at_home_changes_no_bit(kept: int, workers: int, loss: str, tmp_path: Path) -> None:
    base = save_tiny_llama(tmp_path / "base")
    plan = replace(PLAN, loss=LossShape(loss))  # type: ignore[arg-type]
    examples = random_examples(12)
    if loss == "dpo":
        units = [PreferencePair(*both) for both in zip(examples[::2], examples[1::2], strict=True)]
    else:
        units = list(examples)  # type: ignore[arg-type]
    with open_tiny(base) as checkpoint:
        whole = open_pipeline(checkpoint, (0, 6), plan)
        split, watched = open_split(checkpoint, plan, kept, workers)
    split.observe(batches_of(units, plan, 5))
    for step in range(plan.steps):
        batches = batches_of(units, plan, step)
        assert split.learn(step, batches) == whole.learn(step, batches)
    watchful = pack_batches(units, 2)
    assert split.evaluate(watchful) == whole.evaluate(watchful)
    expected, found = whole.state(), split.state()
    assert expected.keys() == found.keys()
    assert all(np.array_equal(found[name], values) for name, values in expected.items())
    for batch in watched.told:
        assert not batch.ids.any()
        assert not batch.targets.any()
        assert batch.total == 1, "nor how much is learned"
    split.load_state(expected)


def test_layers_are_owned_once_and_in_order() -> None:
    for layers in range(3, 12):
        for kept in range(1, (layers - 1) // 2 + 1):
            first, last = own_stages(layers, kept)
            for workers in range(1, layers - 2 * kept + 1):
                stages = [first, *lent_stages(layers, kept, workers), last]
                held = [layer for stage in stages for layer in range(stage.start, stage.stop)]
                assert held == list(range(layers))
                assert not any(each.is_first or each.is_last for each in stages[1:-1])
    assert lent_stages(6, 0, 2)[0] == Stage(0, 3, 6)
    for kept in (-1, 0, 3):
        with pytest.raises(UsageError, match="cannot be kept here"):
            own_stages(6, kept)


def test_what_can_be_read_is_measured(tmp_path: Path) -> None:
    """A probe finds something in what comes out of the first layers of a model of chance, and nothing in noise."""
    base = save_tiny_llama(tmp_path / "base")
    chance = np.random.default_rng(4)
    batches = batches_of(random_examples(64), replace(PLAN, batch=64, micro_batches=8), 0)
    with open_tiny(base) as checkpoint:
        split, _ = open_split(checkpoint, PLAN, 1, 1)
        open_report = measure_leak(split, batches)
        plain = split.first.forward

        def noise(batch: MicroBatch, hidden: torch.Tensor | None = None) -> torch.Tensor:
            rows = plain(batch, hidden)
            return torch.from_numpy(chance.normal(size=rows.shape).astype(np.float32))

        split.first.forward = noise  # type: ignore[method-assign]
        noisy = measure_leak(split, batches)
    assert open_report.tokens > 0.08
    assert open_report.labels > 0.2
    assert noisy.tokens < 0.05
    assert open_report.predicted < 0.1, "a model of chance expects nothing"
    assert "from gradients" in str(open_report)


def test_whoever_tries_all_tokens_reads_them(tmp_path: Path) -> None:
    base = save_tiny_llama(tmp_path / "base")
    batches = batches_of(random_examples(8), replace(PLAN, batch=8, micro_batches=4), 0)
    with open_tiny(base) as checkpoint:
        split, _ = open_split(checkpoint, PLAN, 2, 1)
    seen = split.observe(batches)
    found = search_tokens([split.first], seen.rows_in, batches, sequences=2, tokens=5, tried=10_000)
    assert found == 1.0


def test_the_bench_reads_at_every_border(tmp_path: Path) -> None:
    base = save_tiny_llama(tmp_path / "base")
    results = run_leak_bench(LeakBench(str(base), kept=(1, 2, 3), tokens=12), lambda _: None)
    found = {(result.labels["kept"], result.metric): result.value for result in results}
    assert {kept for kept, _ in found} == {1, 2}, "of six layers, three at each end leave none"
    for kept in (1, 2):
        common = found[kept, "labels that are the most frequent one"]
        assert found[kept, "labels read from gradients by a probe"] > common
        assert 0 < found[kept, "tokens read from states by searching"] <= 100
