"""`bench quality`: what was measured is kept at once, and each source is compared with itself and with the model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from shardcompute.bench import quality
from shardcompute.bench.report import Result
from shardcompute.cli.bench.commands import app
from shardcompute.core.errors import BackendError

PERPLEXITIES = {
    ("model", "float32"): 40.0,
    ("model", "int8"): 42.0,
    ("first", "native"): 44.0,
    ("first", "int8"): 55.0,
}


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Perplexities as in the table above; whatever is not there fails."""

    def measure(files: Callable[[], Any], form: str, *_: object) -> list[Result]:
        if (files(), form) not in PERPLEXITIES:
            raise BackendError(f"{form} of {files()} cannot be opened")
        return [Result("perplexity", PERPLEXITIES[files(), form], "", {"form": form})]

    monkeypatch.setattr(quality, "measure_form", measure)


def run(*sources: str, keep: Callable[[list[Result]], None]) -> list[Result]:
    files: Any = {name: lambda name=name: name for name in ("model", *sources)}
    model = files.pop("model")
    return quality.run_quality_bench(model, ["float32", "int8"], Path(), 1, 1, lambda said: None, files, keep)


@pytest.mark.usefixtures("measured")
def test_what_a_cut_run_has_measured_is_kept() -> None:
    kept: list[list[str]] = []
    with pytest.raises(BackendError):
        run("first", "second", keep=lambda results: kept.append([each.metric for each in results]))
    assert [len(each) for each in kept] == [1, 2, 10]


@pytest.mark.usefixtures("measured")
def test_a_source_is_compared_with_itself_and_with_the_model() -> None:
    found = {
        (each.metric, each.labels["form"]): each.value
        for each in run("first", keep=lambda results: None)
        if each.labels.get("source") == "first"
    }
    assert found["change_from_source", "int8"] == pytest.approx(0.25)
    assert found["perplexity_change", "native"] == pytest.approx(0.1)
    assert found["perplexity_change", "int8"] == pytest.approx(0.375)


def test_the_command_writes_as_it_measures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run_half(*arguments: Any) -> list[Result]:
        keep = arguments[-1]
        keep([Result("perplexity", 40.0, "", {"form": "float32"})])
        raise BackendError("cut short")

    monkeypatch.setattr(quality, "run_quality_bench", run_half)
    file = tmp_path / "found.json"
    told = CliRunner().invoke(app, ["quality", "--data", str(tmp_path), "--json", str(file)])
    assert isinstance(told.exception, BackendError)
    assert json.loads(file.read_text())["results"][0]["value"] == 40.0
