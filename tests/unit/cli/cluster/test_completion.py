"""Shells are offered commands, options and names; whatever fails offers nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from shardcompute.cli.cluster.completion import complete_fetched, complete_nodes, complete_served
from shardcompute.cli.main import build_app

from ..cluster_lab import Lab, say_running

Cli = Callable[..., Any]


@pytest.mark.parametrize(
    ("shell", "word"), [("bash", "complete -o default"), ("zsh", "compdef"), ("fish", "complete --command")]
)
def test_scripts_are_printed(cli: Cli, shell: str, word: str) -> None:
    result = cli("completion", shell)
    assert result.exit_code == 0
    assert word in result.stdout
    assert "_SHARDCOMPUTE_COMPLETE" in result.stdout
    assert cli("completion", "basic").exit_code == 2


def _complete(home: Path, line: str) -> list[str]:
    words = line.split(" ")
    asked = {
        "_SHARDCOMPUTE_COMPLETE": "complete_bash",
        "COMP_WORDS": line,
        "COMP_CWORD": str(len(words) - 1),
        "SHARDCOMPUTE_HOME": str(home),
    }
    result = CliRunner().invoke(build_app(), [], env=asked, prog_name="shardcompute")
    return str(result.stdout).split()


def test_names_are_offered(home: Path, lab: Lab, recognised: None, monkeypatch: pytest.MonkeyPatch) -> None:
    (home / "models").mkdir(parents=True)
    assert {"nodes"} <= set(_complete(home, "shardcompute no"))
    assert "--speculate" in _complete(home, "shardcompute chat --spec")
    sizes = ["smollm2", "smollm2:1.7b", "smollm2:135m", "smollm2:360m"]
    assert _complete(home, "shardcompute show smo") == sizes
    assert _complete(home, "shardcompute drain ") == []
    say_running(home / "cluster")
    assert _complete(home, "shardcompute drain ") == ["A", "B", "C"]
    assert _complete(home, "shardcompute drain b") == ["b"]
    assert _complete(home, "shardcompute drain --url http://far:1 ") == []
    monkeypatch.setattr("shardcompute.cluster_client.ClusterClient.models", lambda self: ["org/tiny", "b"])
    assert _complete(home, "shardcompute chat org") == ["org/tiny"]
    assert _complete(home, "shardcompute unload org") == ["org/tiny"]


def test_trouble_offers_nothing(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("shardcompute.cli.cluster.access.ClusterLocation.find", fail)
    context: Any = SimpleNamespace(params={})
    assert complete_served(context, "") == []
    assert complete_nodes(context, "") == []
    monkeypatch.setenv("SHARDCOMPUTE_THREADS", "many")
    assert complete_fetched("") == []
