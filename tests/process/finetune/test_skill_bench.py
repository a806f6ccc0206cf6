"""The made-up skill: none of the held-out words is learned from, and what is reported was measured."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardcompute.bench.finetune.skill import SkillBench, run_skill_bench
from shardcompute.bench.finetune.skill_words import HELD_OUT, LEARNED
from support.models.tiny_checkpoint import save_tiny_llama


def test_held_out_words_are_not_learned_and_none_counts_twice() -> None:
    assert not set(LEARNED) & set(HELD_OUT)
    assert len(set(LEARNED)) == len(LEARNED)
    assert len(set(HELD_OUT)) == len(HELD_OUT) >= 80


def test_workers_come_to_the_bytes_of_one_process(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    model = save_tiny_llama(tmp_path / "tiny")
    results = run_skill_bench(SkillBench(str(model), workers=2, steps=2), lambda _: None)
    values = {(each.metric, each.labels["arm"]): each.value for each in results}
    assert values["bytes equal to one process", "swarm"] == 1.0
    assert values["bytes between stages", "swarm"] > 0
    # A model of random weights knows no word, before or after two steps.
    assert values["held-out accuracy", "before"] == values["held-out accuracy", "after"] == 0.0
