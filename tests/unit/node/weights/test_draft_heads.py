"""Fitted draft heads on disk, and how they are asked for."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from shardcompute.backends.executor import ExecutorOptions
from shardcompute.cli.models.draft_head import check_fitted
from shardcompute.core.errors import UsageError
from shardcompute.core.generation import GenerationRequest, Sampling, Speculation
from shardcompute.draft_training.lens_fit import fit_lenses
from shardcompute.models.spec import cut
from shardcompute.node.driver.chain_port import ChainShape
from shardcompute.node.driver.driver import Driver
from shardcompute.node.driver.limits import DriverLimits
from shardcompute.node.local.chain import LocalChain
from shardcompute.node.local.service import LocalService
from shardcompute.node.weights.draft_heads import DraftHeadStore
from shardcompute.runtime.drafting import DraftLimits, SelfDrafter
from shardcompute.runtime.lens import decode_lens
from shardcompute.runtime.shard import open_head, open_shard
from shardcompute.runtime.stage import StageRuntime
from shardcompute.weights.checkpoint import Checkpoint
from support.models.tiny_checkpoint import HIDDEN, save_tiny_llama
from support.swarm.lab import open_tiny

OPTIONS = ExecutorOptions(kv_bytes=16 << 20, context_length=256, threads=1)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Checkpoint]:
    with open_tiny(save_tiny_llama(tmp_path_factory.mktemp("models") / "tiny", layers=3)) as opened:
        yield opened


def test_heads_are_fitted_kept_and_found(checkpoint: Checkpoint, tmp_path: Path) -> None:
    store = DraftHeadStore(tmp_path)
    with pytest.raises(UsageError, match="draft-head fit"):
        check_fitted(checkpoint, tmp_path, "tiny")
    lenses = fit_lenses(checkpoint, [2], OPTIONS, tokens=64)
    again = fit_lenses(checkpoint, [1, 2], OPTIONS, tokens=64)
    assert np.array_equal(lenses[2].weights, again[2].weights), "the same questions, the same answers"
    folder = store.save(checkpoint, lenses)
    check_fitted(checkpoint, tmp_path, "tiny")
    check_fitted(checkpoint, None, "tiny")
    found = store.attachments(checkpoint)
    assert list(found) == ["draft-head.2"]
    assert np.allclose(decode_lens(found["draft-head.2"], HIDDEN).weights, lenses[2].weights, atol=1e-2)
    store.save(checkpoint, again)
    assert list(store.attachments(checkpoint)) == ["draft-head.1", "draft-head.2"]
    assert len(list(folder.iterdir())) == 2


def test_a_damaged_head_is_left_out(
    checkpoint: Checkpoint, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = DraftHeadStore(tmp_path)
    folder = store.save(checkpoint, fit_lenses(checkpoint, [1, 2], OPTIONS, tokens=64))
    (folder / "1.lens").write_bytes(b"cut short")
    assert list(store.attachments(checkpoint)) == ["draft-head.2"]
    assert "left out" in caplog.text


@pytest.mark.parametrize("layers", [[], [0], [3], [1, 9]])
def test_layers_must_lie_inside_the_model(checkpoint: Checkpoint, layers: list[int]) -> None:
    with pytest.raises(UsageError, match="layers 1 to 2"):
        fit_lenses(checkpoint, layers, OPTIONS, tokens=64)


def test_text_that_is_given_is_learned_from(checkpoint: Checkpoint) -> None:
    text = "Rain fell on the harbour all night. " * 20
    plain = fit_lenses(checkpoint, [2], OPTIONS, tokens=64)
    informed = fit_lenses(checkpoint, [2], OPTIONS, tokens=64, text=text)
    assert not np.allclose(plain[2].weights, informed[2].weights, atol=1e-3)


def test_a_chain_in_this_process_drafts_too(checkpoint: Checkpoint) -> None:
    answers = []
    for drafter in ("self", "off"):
        with drafting_service(checkpoint) as service:
            wish = Speculation("self" if drafter == "self" else "off", tokens=3)
            request = GenerationRequest((7, 80, 3), 24, Sampling(temperature=0.8, seed=3), speculation=wish)
            deltas = list(service.stream(request))
        timings = deltas[-1].timings
        assert timings is not None
        assert (timings.drafted_tokens > 0) == (drafter == "self")
        answers.append([choice for delta in deltas for choice in delta.tokens])
    assert answers[0] == answers[1]


def drafting_service(checkpoint: Checkpoint) -> LocalService:
    """The model in two stages of this process, the first of which drafts."""
    head = open_head(checkpoint, options=OPTIONS)
    drafter = SelfDrafter(head, DraftLimits(context_length=256, confidence=0.0))
    stages = [
        StageRuntime(
            open_shard(checkpoint, stage=stage, options=OPTIONS),
            is_first=stage.is_first,
            is_last=stage.is_last,
            drafter=drafter if stage.is_first else None,
        )
        for stage in cut(checkpoint.spec, 2)
    ]
    tokenizer = checkpoint.tokenizer()
    driver = Driver(tokenizer, DriverLimits(checkpoint.spec.vocab_size, 256))
    chain = LocalChain(stages, driver)
    driver.connect(chain, ChainShape(1024, stages=2, can_self_draft=True))
    return LocalService("tiny", tokenizer, driver, chain)
