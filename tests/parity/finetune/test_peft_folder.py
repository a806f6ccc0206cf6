"""The folder that comes of a run: `peft` and our server compute the same with it; resuming writes the same bytes."""

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
from shardcompute.cli.main import build_app
from shardcompute.core.batch import Segment
from shardcompute.finetune import training as training_module
from shardcompute.finetune.checkpoints import CHECKPOINT_FILE
from shardcompute.finetune.preparation import RESUME_FOLDER
from shardcompute.runtime.shard import open_shard
from support.finetuning import open_tiny
from support.models.tiny_checkpoint import save_tiny_llama

ADAPTER = "adapter_model.safetensors"
IDS = (5, 17, 3, 99, 42, 7, 7, 120, 64, 33, 8, 2, 77)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("models") / "base", layers=3)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "data.jsonl"
    lines = [
        {"messages": [{"role": "user", "content": f"say {n}"}, {"role": "assistant", "content": f"yes, {n}"}]}
        for n in range(12)
    ]
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


def finetune(*arguments: object, code: int = 0) -> str:
    result = CliRunner().invoke(build_app(["finetune", "list"]), ["finetune", *map(str, arguments)])
    assert result.exit_code == code, result.output
    return result.output


def usual(base: Path, data: Path, out: Path) -> tuple[object, ...]:
    return (
        base, data, "--out", out, "--steps", 6, "--rate", 0.02, "--rank", 3, "--dropout", 0.1, "--threads", 1,
        "--checkpoint-every", 2, "--eval", data, "--eval-every", 2,
    )  # fmt: skip


def test_peft_and_our_server_compute_the_same_with_it(base: Path, data: Path, tmp_path: Path) -> None:
    import peft

    said = finetune(*usual(base, data, tmp_path / "out"), "--rslora", "--licence", "MIT")
    assert "after:" in said
    assert "step 6/6: loss " in said
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # what peft asks of transformers
        model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
        adapted = peft.PeftModel.from_pretrained(model, tmp_path / "out")
    with torch.no_grad():
        expected = adapted(torch.tensor([IDS])).logits[0].numpy()
        with adapted.disable_adapter():
            without = adapted(torch.tensor([IDS])).logits[0].numpy()
    assert np.abs(expected - without).max() > 0.05, "it is to matter"
    options = ExecutorOptions(kv_bytes=8 << 20, context_length=64, max_rows=64, max_logit_rows=64)
    with open_tiny(base) as checkpoint:
        served = open_shard(checkpoint.with_adapters({"taught": tmp_path / "out"}), options=options)
        found = served.step([Segment(1, 0, len(IDS), len(IDS), 1)], np.asarray(IDS))
    np.testing.assert_allclose(found, expected, atol=2e-3)
    card = (tmp_path / "out" / "README.md").read_text()
    run = json.loads((tmp_path / "out" / "training.json").read_text())
    assert "MIT" in card
    assert run["data_sha256"] in card
    assert [point["step"] for point in run["curve"]] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("stop_after", [1, 4])
def test_a_run_that_was_cut_short_is_gone_on_with_to_the_same_bytes(
    stop_after: int, base: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    finetune(*usual(base, data, whole), "--no-samples")
    plain = training_module.step_batches

    def dies(*arguments: object, **options: object) -> object:
        if arguments[1] == stop_after:
            raise KeyboardInterrupt
        return plain(*arguments, **options)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(training_module, "step_batches", dies)
        result = CliRunner().invoke(
            build_app(["finetune", "list"]),
            ["finetune", *map(str, usual(base, data, broken)), "--no-samples"],
        )
        assert result.exit_code != 0
    assert (broken / RESUME_FOLDER / CHECKPOINT_FILE).exists() == (stop_after >= 2)
    assert not (broken / ADAPTER).exists()
    said = finetune(*usual(base, data, broken), "--no-samples")
    assert ("goes on after step 4" in said) == (stop_after == 4)
    assert (broken / ADAPTER).read_bytes() == (whole / ADAPTER).read_bytes()
    assert (broken / "training.json").read_bytes() == (whole / "training.json").read_bytes()
    assert not (broken / RESUME_FOLDER).exists()


def test_a_dry_run_says_what_it_takes_and_writes_nothing(base: Path, data: Path, tmp_path: Path) -> None:
    said = finetune(*usual(base, data, tmp_path / "out"), "--dry-run")
    assert "12 examples" in said
    assert "of memory" in said
    assert "for each step between two stages" in said
    assert not (tmp_path / "out").exists()


def test_what_cannot_work_is_said_before_the_first_step(
    base: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    (tmp_path / "empty").write_text("\n")
    assert "has no examples" in finetune(base, tmp_path / "empty", "--out", out, code=2)
    assert "no linear map 'x_proj'" in finetune(*usual(base, data, out), "--targets", "x_proj", code=2)
    assert "--rank is 0" in finetune(*usual(base, data, out), "--rank", 0, code=2)
    with monkeypatch.context() as patch:
        patch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 1 << 20})())
        assert "where 1.0 MiB are free" in finetune(*usual(base, data, out), code=6)
    with monkeypatch.context() as patch:
        patch.setattr("psutil.virtual_memory", lambda: type("Memory", (), {"available": 1 << 20})())
        said = finetune(*usual(base, data, out), code=7)
        assert "this run needs about" in said
        assert "activations computed again" in said
        assert "step 1" not in said
    finetune(*usual(base, data, out), "--no-samples")
    assert "has an adapter already" in finetune(*usual(base, data, out), code=2)
