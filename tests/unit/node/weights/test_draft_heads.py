"""Trained draft heads on disk, and a chain in this process that drafts with one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from shardcompute.backends.executor import ExecutorOptions
from shardcompute.core.generation import GenerationRequest, Sampling, Speculation
from shardcompute.models.head_draft import encode_ahead
from shardcompute.models.spec import cut, head_stage
from shardcompute.node.driver.chain_port import ChainShape
from shardcompute.node.driver.driver import Driver
from shardcompute.node.driver.limits import DriverLimits
from shardcompute.node.local.chain import LocalChain
from shardcompute.node.local.service import LocalService
from shardcompute.node.weights.draft_heads import AHEAD, DraftHeadStore, ahead_attachments
from shardcompute.runtime.shard import build_ahead, open_shard
from shardcompute.runtime.stage import StageRuntime
from shardcompute.weights.checkpoint import Checkpoint
from support.models.ahead import random_ahead
from support.models.tiny_checkpoint import save_tiny_llama
from support.swarm.lab import open_tiny

OPTIONS = ExecutorOptions(kv_bytes=16 << 20, context_length=256, threads=1)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Checkpoint]:
    with open_tiny(save_tiny_llama(tmp_path_factory.mktemp("models") / "tiny", layers=3)) as opened:
        yield opened


def test_a_head_is_kept_and_found(checkpoint: Checkpoint, tmp_path: Path) -> None:
    assert ahead_attachments(checkpoint, None) == {}
    assert ahead_attachments(checkpoint, tmp_path) == {}
    for seed in (1, 2):
        weights = random_ahead(checkpoint.spec, seed=seed)
        path = DraftHeadStore(tmp_path).save(checkpoint, weights)
        assert ahead_attachments(checkpoint, tmp_path) == {AHEAD: encode_ahead(weights)}
    assert list(path.parent.iterdir()) == [path]


def test_a_damaged_head_is_left_out(
    checkpoint: Checkpoint, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = DraftHeadStore(tmp_path).save(checkpoint, random_ahead(checkpoint.spec))
    path.write_bytes(b"cut short")
    assert ahead_attachments(checkpoint, tmp_path) == {}
    assert "left out" in caplog.text


def test_a_chain_in_this_process_drafts_too(checkpoint: Checkpoint) -> None:
    answers = []
    for wish in (Speculation("ahead", tokens=3), Speculation("off")):
        with drafting_service(checkpoint) as service:
            request = GenerationRequest((7, 80, 3), 24, Sampling(temperature=0.8, seed=3), speculation=wish)
            deltas = list(service.stream(request))
        timings = deltas[-1].timings
        assert timings is not None
        assert (timings.drafted_tokens > 0) == (wish.drafter == "ahead")
        answers.append([choice for delta in deltas for choice in delta.tokens])
    assert answers[0] == answers[1]


def drafting_service(checkpoint: Checkpoint) -> LocalService:
    """The model in two stages of this process, the last of which drafts."""
    spec = checkpoint.spec
    ahead = build_ahead(
        spec, checkpoint.source(head_stage(spec)), random_ahead(spec), backend="onnx", options=OPTIONS
    )
    stages = [
        StageRuntime(
            open_shard(checkpoint, stage=stage, options=OPTIONS),
            is_first=stage.is_first,
            is_last=stage.is_last,
            ahead=ahead if stage.is_last else None,
        )
        for stage in cut(spec, 2)
    ]
    tokenizer = checkpoint.tokenizer()
    driver = Driver(tokenizer, DriverLimits(spec.vocab_size, 256, can_foresee=True))
    chain = LocalChain(stages, driver)
    driver.connect(chain, ChainShape(1024, stages=2))
    return LocalService("tiny", tokenizer, driver, chain)
