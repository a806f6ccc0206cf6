"""A drafter is fitted to a model's own text: it learns, it is the same for the same seed, and it can be kept."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from shardcompute.core.errors import BackendError, UsageError
from shardcompute.core.settings import Settings
from shardcompute.draft_training import __main__ as job
from shardcompute.draft_training.train import TrainedDraftHead, TrainingOptions, train_draft_head
from shardcompute.models.draft_head import decode_draft_head, encode_draft_head
from shardcompute.weights.checkpoint import Checkpoint, open_checkpoint
from shardcompute.weights.sources.reference import parse_reference
from shardcompute.weights.sources.resolve import resolve
from support.models.draft_heads import random_draft_head
from support.models.tiny_checkpoint import HIDDEN, make_predictable, save_tiny_llama

pytest.importorskip("torch")

SMALL = TrainingOptions(
    tokens=1200, epochs=0.5, sessions=12, layers=1, width=64, vocabulary=32, device="cpu", context_length=96
)
LONGER = replace(SMALL, tokens=3000, epochs=3, sessions=32, vocabulary=16_384, rate=2e-3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """There is something to learn of it."""
    return make_predictable(save_tiny_llama(tmp_path_factory.mktemp("models") / "tiny", layers=1))


@pytest.fixture(scope="module")
def checkpoint(folder: Path) -> Iterator[Checkpoint]:
    with open_checkpoint(resolve(parse_reference(str(folder)), Settings(data_dir=folder))) as opened:
        yield opened


@pytest.fixture(scope="module")
def learned(checkpoint: Checkpoint) -> tuple[TrainedDraftHead, list[str]]:
    lines: list[str] = []
    in_use = random_draft_head(checkpoint.spec)
    return train_draft_head(checkpoint, LONGER, in_use=in_use, say=lines.append), lines


def test_it_learns_what_the_model_says(learned: tuple[TrainedDraftHead, list[str]]) -> None:
    trained, lines = learned
    seen = trained.examination.seen
    assert trained.tokens >= 3000
    assert seen.rows > 50
    assert seen.acceptance[0] > 0.5, "by chance one in 250 would be right"
    assert seen.tokens_per_round(3) == pytest.approx(1 + np.cumprod(seen.acceptance[:3]).sum())
    assert any(line.startswith("trained: 100%") for line in lines)


def test_it_is_compared_with_what_is_in_use(learned: tuple[TrainedDraftHead, list[str]]) -> None:
    trained, lines = learned
    assert trained.in_use is not None
    assert trained.in_use.seen.rows == trained.examination.seen.rows, "on the same rows"
    assert trained.in_use.score < 1.2 < trained.examination.score
    assert trained.is_better
    assert not replace(trained, examination=trained.in_use, in_use=trained.examination).is_better
    assert any(line.startswith("in use until now") for line in lines)


def test_the_same_seed_gives_the_same_drafter(checkpoint: Checkpoint) -> None:
    first, second = (encode_draft_head(train_draft_head(checkpoint, SMALL).weights) for _ in range(2))
    assert first == second


def test_it_knows_only_so_many_tokens_and_always_the_end(checkpoint: Checkpoint) -> None:
    trained = train_draft_head(checkpoint, SMALL, text="something to read " * 40)
    assert len(trained.weights.ids) == 32
    assert checkpoint.tokenizer().eos_ids <= set(trained.weights.ids.tolist())


def test_a_run_that_was_cut_short_is_gone_on_with(
    checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardcompute.draft_training.training_loop._SAVE_S", 0.0)
    file, lines = tmp_path / "heads" / "training.pt", list[str]()
    first = train_draft_head(checkpoint, SMALL, resumed=file, say=lines.append)
    assert file.exists()
    assert not any("goes on" in line for line in lines)
    second = train_draft_head(checkpoint, SMALL, resumed=file, say=lines.append)
    assert any("goes on" in line for line in lines)
    assert np.array_equal(second.weights.ids, first.weights.ids)
    assert second.loss < first.loss
    file.write_bytes(file.read_bytes()[:1000])
    train_draft_head(checkpoint, SMALL, resumed=file)


def test_a_batch_job_writes_the_file(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "head.draft"
    options = ["--tokens", "900", "--epochs", "0.2", "--width", "64", "--sessions", "8", "--device", "cpu"]
    assert job.main([str(folder), str(file), *options, "--layers", "2", "--context-length", "96"]) == 0
    assert len(decode_draft_head(file.read_bytes(), HIDDEN).layers) == 2
    assert "tokens per round" in capsys.readouterr().out
    assert job.main([str(folder / "missing"), str(file)]) == 1
    assert "there is no folder" in capsys.readouterr().err


def test_too_little_text_is_refused(checkpoint: Checkpoint) -> None:
    with pytest.raises(UsageError, match="too few to learn from"):
        train_draft_head(checkpoint, replace(SMALL, tokens=60, sessions=1))
    with pytest.raises(UsageError, match="how long"):
        train_draft_head(checkpoint, TrainingOptions(minutes=None))


def test_without_torch_the_error_says_what_to_install(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(BackendError) as caught:
        train_draft_head(checkpoint, SMALL)
    assert "shardcompute[torch]" in caught.value.hint
