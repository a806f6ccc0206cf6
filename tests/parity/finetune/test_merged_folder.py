"""Merged models: what `--merge` writes is opened by `transformers` and by us, with the logits of base and adapter."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from typer.testing import CliRunner

from shardcompute.backends.executor import ExecutorOptions
from shardcompute.backends.matrix import Float32
from shardcompute.cli.main import build_app
from shardcompute.core.batch import Segment
from shardcompute.core.errors import UnsupportedModelError
from shardcompute.finetune.peft_folder import AdapterCard
from shardcompute.finetune.plan import FinetunePlan
from shardcompute.finetune.result.merged_folder import write_merged_folder
from shardcompute.runtime.shard import open_shard
from shardcompute.weights.checkpoint import Checkpoint
from support.finetuning import open_tiny
from support.models.tiny_checkpoint import save_tiny_llama

IDS = (5, 17, 3, 99, 42, 7, 7, 120, 64, 33, 8, 2, 77)
OPTIONS = ExecutorOptions(kv_bytes=8 << 20, context_length=64, max_rows=64, max_logit_rows=64)


def finetune(*arguments: object, code: int = 0) -> str:
    result = CliRunner().invoke(build_app(["finetune", "list"]), ["finetune", *map(str, arguments)])
    assert result.exit_code == code, result.output
    return result.output


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("models") / "base", layers=3)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "data.jsonl"
    lines = [{"prompt": f"say {n}", "completion": f"yes, {n}"} for n in range(8)]
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


def usual(base: Path, data: Path, out: Path) -> tuple[object, ...]:
    return (base, data, "--out", out, "--steps", 4, "--rate", 0.05, "--rank", 3, "--threads", 1)


def logits_of_peft(base: Path, adapter: Path) -> Float32:
    import peft

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # what peft asks of transformers
        model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
        model = peft.PeftModel.from_pretrained(model, adapter)
    with torch.no_grad():
        found: Float32 = model(torch.tensor([IDS])).logits[0].numpy()
    return found


def served_logits(checkpoint: Checkpoint) -> Float32:
    found: Float32 = open_shard(checkpoint, options=OPTIONS).step(
        [Segment(1, 0, len(IDS), len(IDS))], np.asarray(IDS)
    )
    return found


@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_a_merged_model_has_the_logits_of_base_and_adapter(
    kind: str, base: Path, data: Path, tmp_path: Path
) -> None:
    out, merged = tmp_path / "out", tmp_path / "merged"
    flags = ["--dora"] if kind == "dora" else []
    said = finetune(*usual(base, data, out), *flags, "--merge", merged, "--licence", "MIT")
    assert f"serve it: shardcompute up {merged}" in " ".join(said.split())
    assert "after:" in said
    expected = logits_of_peft(base, out)
    model = transformers.AutoModelForCausalLM.from_pretrained(merged, dtype=torch.float32)
    with torch.no_grad():
        found = model(torch.tensor([IDS])).logits[0].numpy()
        plain = transformers.AutoModelForCausalLM.from_pretrained(base)(torch.tensor([IDS])).logits[0]
    assert np.abs(expected - plain.numpy()).max() > 0.05, "it is to matter"
    np.testing.assert_allclose(found, expected, atol=1e-4)
    with open_tiny(merged) as checkpoint, open_tiny(base) as plain_base:
        assert checkpoint.tokenizer().encode("say") == plain_base.tokenizer().encode("say")
        np.testing.assert_allclose(served_logits(checkpoint), expected, atol=2e-3)
    with open_tiny(base) as checkpoint:
        np.testing.assert_allclose(served_logits(checkpoint.with_merged(out)), expected, atol=2e-3)
    card = (merged / "README.md").read_text()
    assert "MIT" in card
    assert json.loads((out / "training.json").read_text())["data_sha256"] in card


def test_large_models_are_written_in_several_files(base: Path, data: Path, tmp_path: Path) -> None:
    finetune(*usual(base, data, tmp_path / "out"), "--no-samples")
    card = AdapterCard("base", "MIT", "data", "", 1, FinetunePlan(steps=1), ())
    with open_tiny(base) as checkpoint:
        write_merged_folder(tmp_path / "merged", checkpoint, tmp_path / "out", card, shard_bytes=100_000)
        expected = served_logits(checkpoint.with_merged(tmp_path / "out"))
    assert len(list((tmp_path / "merged").glob("model-*.safetensors"))) > 1
    with open_tiny(tmp_path / "merged") as checkpoint:
        np.testing.assert_array_equal(served_logits(checkpoint), expected)


def test_what_cannot_be_served_or_merged_is_said_before_the_first_step(
    base: Path, data: Path, tmp_path: Path
) -> None:
    out, full = tmp_path / "out", tmp_path / "full"
    full.mkdir()
    (full / "file").touch()
    swarm = ("--swarm", "--serve-as", "x")
    assert "changes the length" in finetune(*usual(base, data, out), "--dora", *swarm, code=2)
    assert "bottlenecks are not served" in finetune(*usual(base, data, out), "--bottleneck", *swarm, code=2)
    assert "two kinds" in finetune(*usual(base, data, out), "--bottleneck", "--dora", code=2)
    merge = ("--merge", tmp_path / "merged")
    assert "no change of weights" in finetune(*usual(base, data, out), "--bottleneck", *merge, code=2)
    assert "is there already" in finetune(*usual(base, data, out), "--merge", full, code=2)
    assert not out.exists()


@pytest.mark.parametrize(("flag", "words"), [("--dora", "DoRA"), ("--bottleneck", "BOTTLENECK")])
def test_such_adapters_are_taught_and_shown_and_refused_beside_others(
    flag: str, words: str, base: Path, data: Path, tmp_path: Path
) -> None:
    assert "after:" in finetune(*usual(base, data, tmp_path / "out"), flag)
    with open_tiny(base) as checkpoint, pytest.raises(UnsupportedModelError, match=words):
        checkpoint.with_adapters({"taught": tmp_path / "out"})
