"""A drafter is fitted to a model's own text: it learns, it is the same for the same seed, and it can be kept."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from shardcompute.backends.executor import ExecutorOptions
from shardcompute.backends.host.numpy_ops import NumpyExecutor
from shardcompute.backends.matrix import DenseMatrix
from shardcompute.core.batch import Segment
from shardcompute.core.errors import BackendError, UsageError
from shardcompute.core.settings import Settings
from shardcompute.draft_training import train
from shardcompute.draft_training.dialogue import ChosenTokens, GivenTokens
from shardcompute.draft_training.questions import ask
from shardcompute.draft_training.scripts import write_scripts
from shardcompute.draft_training.train import TrainedDraftHead, TrainingOptions, train_draft_head
from shardcompute.draft_training.training_loop import load_net
from shardcompute.models.draft_head import DraftHeadNetwork, decode_draft_head, encode_draft_head
from shardcompute.weights.checkpoint import Checkpoint, open_checkpoint
from shardcompute.weights.sources.reference import parse_reference
from shardcompute.weights.sources.resolve import resolve
from support.models.tiny_checkpoint import HIDDEN, save_tiny_llama

SMALL = TrainingOptions(
    tokens=900, epochs=1, sessions=6, width=64, blocks=1, vocabulary=32, device="cpu", context_length=128
)
LONGER = TrainingOptions(
    tokens=5000, epochs=4, soft=0.0, sessions=32, width=128, device="cpu", context_length=128
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its one layer hardly matters: what it says next hangs on the last token, so there is something to learn."""
    folder = save_tiny_llama(tmp_path_factory.mktemp("models") / "tiny", layers=1)
    tensors = load_file(folder / "model.safetensors")
    for name in tensors:
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensors[name] *= 0.02
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.fixture(scope="module")
def checkpoint(folder: Path) -> Iterator[Checkpoint]:
    with open_checkpoint(resolve(parse_reference(str(folder)), Settings(data_dir=folder))) as opened:
        yield opened


@pytest.fixture(scope="module")
def learned(checkpoint: Checkpoint) -> tuple[TrainedDraftHead, list[str]]:
    lines: list[str] = []
    return train_draft_head(checkpoint, LONGER, say=lines.append), lines


def test_it_learns_what_the_model_says(learned: tuple[TrainedDraftHead, list[str]]) -> None:
    trained, lines = learned
    assert trained.tokens >= 5000
    assert trained.loss < 3.5, "by chance it would be the logarithm of the vocabulary, 5.5"
    assert trained.agreement[0] > 0.15, "by chance one in 250 would be right"
    assert trained.acceptance[0] == trained.agreement[0]
    assert trained.accepted == pytest.approx(np.cumprod(trained.acceptance).sum(), abs=1e-9)
    assert any(line.startswith("trained: 100%") for line in lines)


def test_it_is_kept_as_it_was_examined(learned: tuple[TrainedDraftHead, list[str]]) -> None:
    weights = learned[0].weights
    kept = decode_draft_head(encode_draft_head(weights), HIDDEN)
    assert np.array_equal(kept.ids, weights.ids)
    assert np.array_equal(kept.join.to_dense(), weights.join.to_dense())
    assert [block.down.shape for block in kept.blocks] == [(HIDDEN, 128)] * 2


def test_what_is_trained_is_what_will_be_run(
    checkpoint: Checkpoint, learned: tuple[TrainedDraftHead, list[str]]
) -> None:
    weights, spec, rows = learned[0].weights, checkpoint.spec, 5
    random = np.random.default_rng(2)
    states, embedded = (random.standard_normal((rows, HIDDEN)).astype(np.float32) * 3 for _ in range(2))
    blocks = [(block.norm, block.gate_up.to_dense(), block.down.to_dense()) for block in weights.blocks]
    device = torch.device("cpu")
    net = load_net(weights.join.to_dense(), blocks, weights.norm, spec.norm_eps, device)
    trained = net.step(torch.from_numpy(states), torch.from_numpy(embedded)).numpy()

    head = DenseMatrix(np.eye(len(weights.ids), HIDDEN, dtype=np.float32))
    options = ExecutorOptions(kv_bytes=1 << 20, context_length=64)
    executor = NumpyExecutor(DraftHeadNetwork(spec, weights, head), options)
    segments = [Segment(row, 0, 1, 1) for row in range(rows)]
    executor.step(segments, np.concatenate([states, embedded], axis=1), keeps_hidden=True)
    assert np.abs(trained).max() > 1
    assert np.allclose(executor.hidden_rows(), trained, atol=1e-3)


def test_the_same_seed_gives_the_same_drafter(checkpoint: Checkpoint) -> None:
    first, second = (encode_draft_head(train_draft_head(checkpoint, SMALL).weights) for _ in range(2))
    assert first == second


def test_it_knows_only_so_many_tokens_and_always_the_end(checkpoint: Checkpoint) -> None:
    trained = train_draft_head(checkpoint, SMALL, text="something to read " * 40)
    ids = trained.weights.ids
    assert trained.tokens >= 900 + 700, "what is read comes on top of what is said"
    assert len(ids) == 32
    assert checkpoint.tokenizer().eos_ids <= set(ids.tolist())


def test_a_batch_job_writes_the_file(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "head.draft"
    options = ["--tokens", "700", "--epochs", "1", "--width", "64", "--sessions", "8", "--device", "cpu"]
    assert train.main([str(folder), str(file), *options]) == 0
    assert len(decode_draft_head(file.read_bytes(), HIDDEN).blocks) == 2
    assert re.search(r"expected tokens per round: \d\.\d\d", capsys.readouterr().out)
    assert train.main([str(folder / "missing"), str(file)]) == 1
    assert "there is no folder" in capsys.readouterr().err


def test_too_little_text_is_refused(checkpoint: Checkpoint) -> None:
    with pytest.raises(UsageError, match="too few to learn from"):
        train_draft_head(checkpoint, TrainingOptions(tokens=60, sessions=1, device="cpu", context_length=64))
    with pytest.raises(UsageError, match="how long"):
        train_draft_head(checkpoint, TrainingOptions(minutes=None))


def test_without_torch_the_error_says_what_to_install(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(BackendError) as caught:
        train_draft_head(checkpoint, SMALL)
    assert "shardcompute[torch]" in caught.value.hint


def test_half_of_the_questions_are_made_up_by_the_model(checkpoint: Checkpoint) -> None:
    tokenizer = checkpoint.tokenizer()
    invented, asked = islice(write_scripts(tokenizer, 512, seed=3), 2)
    before, question, behind, answer = invented
    assert isinstance(before, GivenTokens)
    assert isinstance(question, ChosenTokens)
    assert isinstance(behind, GivenTokens)
    assert isinstance(answer, ChosenTokens)
    assert tokenizer.decode(before.ids) == "user: "
    assert tokenizer.decode(behind.ids) == "\n"
    assert behind.ids[0] in question.stops
    assert answer.stops == tokenizer.eos_ids
    assert isinstance(asked[0], GivenTokens)
    assert tokenizer.decode(asked[0].ids).startswith("user: ")


def test_questions_are_hardly_ever_asked_twice() -> None:
    random = Random(1)
    questions = [ask(random) for _ in range(2000)]
    assert len(set(questions)) > 1950
    assert not any("{" in question for question in questions)
