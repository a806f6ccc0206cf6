"""`finetune --loss`: preferences and teachers from the command line, and what is said before the first step."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from shardcompute.cli.main import build_app
from support.models.tiny_checkpoint import save_tiny_llama


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("models") / "base", layers=3)


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "pairs.jsonl"
    lines = [{"prompt": f"say {n}", "chosen": f"yes, {n}", "rejected": "no"} for n in range(8)]
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "texts.jsonl"
    path.write_text("\n".join(json.dumps({"text": f"the number is {n}"}) for n in range(8)))
    return path


def finetune(*arguments: object, code: int = 0) -> str:
    options = ("--steps", 4, "--rate", 0.02, "--rank", 3, "--threads", 1, "--no-samples")
    result = CliRunner().invoke(
        build_app(["finetune", "list"]), ["finetune", *map(str, (*arguments, *options))]
    )
    assert result.exit_code == code, result.output
    return " ".join(result.output.split())


def curve(out: Path) -> list[float]:
    return [point["loss"] for point in json.loads((out / "training.json").read_text())["curve"]]


def test_preferences_are_learned(base: Path, pairs: Path, tmp_path: Path) -> None:
    said = finetune(base, pairs, "--out", tmp_path / "out", "--loss", "dpo", "--beta", 0.5, "--eval", pairs)
    assert "8 examples" in said
    found = curve(tmp_path / "out")
    assert found[0] == pytest.approx(0.6931, abs=1e-3)
    assert found[-1] < found[0]


def test_a_student_is_taught_by_a_teacher(base: Path, texts: Path, tmp_path: Path) -> None:
    wise = save_tiny_llama(tmp_path / "wise", layers=2, seed=5)
    out = tmp_path / "out"
    finetune(base, texts, "--out", out, "--loss", "kl", "--teacher", wise, "--temperature", 2)
    found = curve(out)
    assert found[-1] < found[0]
    loss = json.loads((out / "training.json").read_text())["plan"]["loss"]
    assert loss["kind"] == "kl"
    assert loss["teacher"], "a run towards another teacher is another run"
    same = tmp_path / "same"
    finetune(base, texts, "--out", same, "--loss", "kl", "--teacher", base)
    assert curve(same)[0] == pytest.approx(0, abs=1e-5)


def test_what_does_not_go_together_is_said_before_the_first_step(
    base: Path, pairs: Path, texts: Path, tmp_path: Path
) -> None:
    out = ("--out", tmp_path / "out")
    assert "use one of" in finetune(base, pairs, *out, "--loss", "ppo", code=2)
    assert "learn from preferences with --loss dpo" in finetune(base, pairs, *out, code=2)
    assert "no text as its prompt" in finetune(base, texts, *out, "--loss", "dpo", code=2)
    assert "--beta is 0" in finetune(base, pairs, *out, "--loss", "dpo", "--beta", 0, code=2)
    assert "belong together" in finetune(base, texts, *out, "--loss", "kl", code=2)
    assert "belong together" in finetune(base, texts, *out, "--teacher", base, code=2)
    teaching = ("--loss", "kl", "--teacher", base)
    assert "--keep-local 1" in finetune(base, texts, *out, *teaching, "--swarm", code=2)
    assert "--keep-local is for --swarm" in finetune(base, texts, *out, "--keep-local", 1, code=2)
    swarm = ("--swarm", "--keep-local", 2)
    assert "cannot be kept here" in finetune(base, texts, *out, *swarm, code=2)
    assert not (tmp_path / "out").exists()
