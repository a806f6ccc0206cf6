"""Trained draft heads on disk, and a chain in this process that drafts with one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from shardcompute.backends.executor import ExecutorOptions
from shardcompute.backends.matrix import ChosenRows
from shardcompute.core.errors import UnsupportedModelError
from shardcompute.core.generation import GenerationRequest, Sampling, Speculation, TokenChoice
from shardcompute.core.steps import Draft, Opening, Picked, SessionRows
from shardcompute.models.draft_head import encode_draft_head
from shardcompute.models.spec import cut, head_stage
from shardcompute.node.driver.driver import Driver
from shardcompute.node.driver.limits import ChainShape, DriverLimits
from shardcompute.node.local.chain import LocalChain
from shardcompute.node.local.service import LocalService
from shardcompute.node.service import ServedModel
from shardcompute.node.weights.draft_heads import DRAFT_HEAD, draft_head_attachments, save_draft_head
from shardcompute.runtime.head_drafter import HeadDrafter
from shardcompute.runtime.shard import build_head_drafter, open_shard
from shardcompute.runtime.stage import StageRuntime
from shardcompute.runtime.tail import Tail
from shardcompute.weights.checkpoint import Checkpoint
from shardcompute.weights.loader import ShardTensors
from support.models.draft_heads import random_draft_head
from support.models.tiny_checkpoint import save_tiny_llama
from support.swarm.lab import open_tiny

OPTIONS = ExecutorOptions(kv_bytes=16 << 20, context_length=256, threads=1)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Checkpoint]:
    with open_tiny(save_tiny_llama(tmp_path_factory.mktemp("models") / "tiny", layers=3)) as opened:
        yield opened


def test_a_head_is_kept_and_found(checkpoint: Checkpoint, tmp_path: Path) -> None:
    assert draft_head_attachments(checkpoint, None) == ({}, "")
    assert draft_head_attachments(checkpoint, tmp_path) == ({}, "")
    for seed in (1, 2):
        weights = random_draft_head(checkpoint.spec, seed=seed)
        path = save_draft_head(tmp_path, checkpoint, weights)
        assert draft_head_attachments(checkpoint, tmp_path) == ({DRAFT_HEAD: encode_draft_head(weights)}, "")
    assert list(path.parent.iterdir()) == [path]


def test_a_damaged_head_is_left_out(
    checkpoint: Checkpoint, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = save_draft_head(tmp_path, checkpoint, random_draft_head(checkpoint.spec))
    path.write_bytes(b"cut short")
    found, problem = draft_head_attachments(checkpoint, tmp_path)
    assert found == {}
    assert str(path) in problem
    assert "left out" in caplog.text


def test_a_chain_in_this_process_drafts_too(checkpoint: Checkpoint) -> None:
    answers = []
    for wish in (Speculation("head", tokens=3), Speculation("off")):
        with drafting_service(checkpoint) as service:
            request = GenerationRequest((7, 80, 3), 24, Sampling(temperature=0.8, seed=3), speculation=wish)
            deltas = list(service.stream(request))
        timings = deltas[-1].timings
        assert timings is not None
        assert (timings.drafted_tokens > 0) == (wish.drafter == "head")
        answers.append([choice for delta in deltas for choice in delta.tokens])
    assert answers[0] == answers[1]


def test_drafts_are_the_same_from_an_embedding_that_stays_in_its_file(checkpoint: Checkpoint) -> None:
    spec, drafts = checkpoint.spec, []
    for is_stored in (True, False):
        source = checkpoint.source(head_stage(spec))
        assert source.stored_rows("embedding") is not None
        with pytest.MonkeyPatch.context() as patch:
            if not is_stored:
                patch.setattr(ShardTensors, "stored_rows", lambda self, name: None)
            drafter = build_head_drafter(
                spec, source, random_draft_head(spec), backend="onnx", options=OPTIONS
            )
        drafts.append(_draft(drafter, spec.hidden))
        assert isinstance(drafter._embedding, ChosenRows) == is_stored
        drafter.close()
    assert drafts[0] == drafts[1]
    assert drafts[0]


@pytest.mark.parametrize("backend", ["llamacpp", "transformers"])
def test_backends_that_give_no_states_say_so(checkpoint: Checkpoint, backend: str) -> None:
    spec = checkpoint.spec
    with pytest.raises(UnsupportedModelError, match=backend):
        build_head_drafter(
            spec,
            checkpoint.source(head_stage(spec)),
            random_draft_head(spec),
            backend=backend,
            options=OPTIONS,
        )


def _draft(drafter: HeadDrafter, hidden: int) -> list[Draft]:
    tail = Tail()
    tail.open([Opening(1, Sampling(temperature=0.0), 3)])
    work = SessionRows(1, 0, (7, 80, 3), 1, head_draft_tokens=4)
    tail.follow(work)
    states = np.random.default_rng(0).standard_normal((3, hidden), dtype=np.float32)
    drafter.remember([work], [Picked(1, 2, TokenChoice(80))], states)
    return drafter.draft([work], tail)


def drafting_service(checkpoint: Checkpoint) -> LocalService:
    """The model in two stages of this process, the last of which drafts."""
    spec = checkpoint.spec
    drafter = build_head_drafter(
        spec, checkpoint.source(head_stage(spec)), random_draft_head(spec), backend="onnx", options=OPTIONS
    )
    stages = [
        StageRuntime(
            open_shard(checkpoint, stage=stage, options=OPTIONS),
            is_first=stage.is_first,
            is_last=stage.is_last,
            drafter=drafter if stage.is_last else None,
        )
        for stage in cut(spec, 2)
    ]
    tokenizer = checkpoint.tokenizer()
    driver = Driver(tokenizer, DriverLimits(spec.vocab_size, 256, has_draft_head=True))
    chain = LocalChain(stages, driver)
    driver.connect(chain, ChainShape(1024, stages=2))
    return LocalService(
        ServedModel("tiny", driver.context_length, 0, digest="", size_bytes=0), tokenizer, driver, chain
    )
