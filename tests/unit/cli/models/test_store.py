"""The commands about models on disk, over a real cache."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shardcompute.weights.sources.cache import CachedReference, FileRecord, ModelCache
from shardcompute.weights.sources.progress import NullProgress
from shardcompute.weights.sources.reference import EmbeddedReference, HubReference

Cli = Callable[..., Any]


def _add(home: Path, reference: CachedReference, name: str, quant: str | None = None) -> Path:
    cache = ModelCache(home)
    with cache.lock(reference, NullProgress()):
        (cache.open_incoming(reference) / name).write_bytes(b"12345")
        return cache.publish(reference, [FileRecord(name, 5)], commit="c0ffee", quant=quant).path


def test_nothing_yet(cli: Cli) -> None:
    listed, as_json = cli("list"), cli("list", "--json")
    assert (listed.exit_code, listed.stdout) == (0, "")
    assert "no model has been fetched yet" in listed.stderr
    assert as_json.stdout == "[]\n"


def test_models_are_listed(cli: Cli, home: Path) -> None:
    _add(home, EmbeddedReference(), "m.gguf")
    _add(home, HubReference("org/repo", "v1"), "model.safetensors")
    lines = [line.split() for line in cli("list").stdout.splitlines()]
    assert lines[0] == ["NAME", "REFERENCE", "SIZE", "KIND", "AGE"]
    assert [(line[0], line[1], line[-2], line[-1]) for line in lines[1:]] == [
        ("org/repo", "org/repo@v1", "safetensors", "now"),
        ("SmolLM2-135M-Instruct", "smollm2", "gguf", "now"),
    ]


def test_listing_as_json(cli: Cli, home: Path) -> None:
    folder = _add(home, HubReference("org/repo"), "m.gguf", "Q4_0")
    [entry] = json.loads(cli("list", "--json").stdout)
    assert entry.pop("created").startswith("20")
    assert entry.pop("size_bytes") > 5
    assert entry == {
        "name": "org/repo",
        "reference": "org/repo",
        "kind": "gguf",
        "commit": "c0ffee",
        "quant": "Q4_0",
        "folder": str(folder),
        "damage": None,
    }


def test_damaged_models_are_listed_with_what_to_do(cli: Cli, home: Path) -> None:
    (_add(home, HubReference("org/repo"), "m.gguf") / "m.gguf").unlink()
    result = cli("list")
    assert "damaged" in result.stdout
    assert "m.gguf is missing; remove it with: shardcompute rm org/repo" in result.stderr
    assert json.loads(cli("list", "--json").stdout)[0]["damage"] == "m.gguf is missing"


def test_removal(cli: Cli, home: Path) -> None:
    folder = _add(home, HubReference("org/repo"), "m.gguf")
    refused = cli("rm", "org/repo")
    assert refused.exit_code == 2
    assert "add --yes" in refused.stderr
    assert folder.exists()
    assert cli("rm", "org/repo", "--yes").exit_code == 0
    assert not folder.exists()
    assert cli("rm", "org/repo", "--yes").exit_code == 3


def test_quantisation_kept_for_its_repository_can_be_removed_by_its_name(cli: Cli, home: Path) -> None:
    folder = _add(home, HubReference("org/repo"), "m.gguf", "Q4_0")
    assert cli("rm", "org/repo:Q4_0", "-y").exit_code == 0
    assert not folder.exists()


@pytest.mark.parametrize(("typed", "is_kept"), [("y", False), ("YES ", False), ("n", True), ("", True)])
def test_removal_asks_on_a_terminal(
    cli: Cli, home: Path, monkeypatch: pytest.MonkeyPatch, typed: str, is_kept: bool
) -> None:
    folder = _add(home, HubReference("org/repo"), "m.gguf")
    monkeypatch.setattr("shardcompute.cli.models.store.has_terminal_input", lambda stream: True)
    result = cli("rm", "org/repo", stdin=f"{typed}\n" if typed else "")
    assert result.exit_code == 0
    assert "delete org/repo, " in result.stderr
    assert folder.exists() == is_kept


def test_local_models_are_not_removed(cli: Cli, tmp_path: Path) -> None:
    assert cli("rm", str(tmp_path), "--yes").exit_code == 2
    assert tmp_path.exists()


def test_pull_of_what_is_here(cli: Cli, home: Path) -> None:
    folder = _add(home, HubReference("org/repo"), "m.gguf")
    result = cli("pull", "org/repo")
    assert result.exit_code == 0
    assert result.stderr == f"org/repo was already on this machine: 5 bytes in {folder}\n"


def test_pull_offline_says_why_not(cli: Cli) -> None:
    result = cli("pull", "org/repo")
    assert result.exit_code == 6
    assert "offline" in result.stderr


def test_pull_needs_a_model(cli: Cli) -> None:
    assert cli("pull").exit_code == 2


def test_interrupted_pull_says_how_to_go_on(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("shardcompute.weights.sources.resolve.resolve", interrupt)
    result = cli("pull", "org/repo@v1")
    assert result.exit_code == 130
    assert "hint: shardcompute pull org/repo@v1 goes on where this stopped" in result.stderr


def test_the_catalogue_lists_names_with_their_facts(cli: Cli) -> None:
    told = cli("list", "--catalogue").stdout
    line = next(line for line in told.splitlines() if line.startswith("qwen3:8b"))
    assert line.split()[:3] == ["qwen3:8b", "*", "8.19"]
    assert "Apache-2.0" in line
    assert "thinking, tools" in line
    assert line.endswith("Qwen/Qwen3-8B-GGUF:Q4_K_M")
    facts = {each["name"]: each for each in json.loads(cli("list", "--catalogue", "--json").stdout)}
    assert facts["gpt-oss:120b"]["file_bytes"] == 63_387_346_208
    assert facts["qwen3:8b"]["is_default"] is True
    assert facts["qwen3:4b"]["is_default"] is False
