"""`distill`: a student is made, and the command says how to draft with it, or why it was not kept."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from shardcompute.cli.models.distill import _parse_layers
from support.models.tiny_checkpoint import save_tiny_llama

Cli = Callable[..., Any]
QUICK = ("--tokens", "1100", "--epochs", "0.2", "--sessions", "8", "--device", "cpu", "--threads", "1")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("models") / "tiny", layers=3, intermediate=32)


def test_a_student_is_kept_in_the_data_folder_by_its_parents_weights(
    model: Path, cli: Cli, home: Path
) -> None:
    found = cli("distill", str(model), *QUICK, "--layers", "0,2")
    assert found.exit_code == 0, found.stderr
    said = " ".join(found.stderr.split())
    kept = list((home / "students").glob("tiny-*/config.json"))
    assert ("--draft-model" in said) == bool(kept), said
    assert ("not kept" in said) != bool(kept), said
    if kept:
        assert json.loads(kept[0].read_text())["num_hidden_layers"] == 2


@pytest.mark.parametrize(
    ("options", "code", "why"),
    [
        (("--layers", "two"), 2, "--layers is 'two'"),
        (("--layers", "3"), 2, "the model itself"),
        (("--layers", "1,0"), 2, "cannot begin with"),
        (("--out", "."), 2, "no student"),
    ],
)
def test_what_cannot_be_done_is_said_at_once(
    model: Path, cli: Cli, options: tuple[str, ...], code: int, why: str
) -> None:
    found = cli("distill", str(model), *QUICK, *options)
    assert found.exit_code == code
    assert why in " ".join(found.stderr.split())


def test_layers_are_a_number_or_a_list() -> None:
    assert (_parse_layers(None), _parse_layers("4"), _parse_layers("0, 3,5")) == (None, 4, (0, 3, 5))
