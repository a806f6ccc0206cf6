"""`logs` merges by time, follows over rotations, and says which logs there are."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shardcompute.cli.tools.logs import LogTail, merge

Cli = Callable[..., Any]


@pytest.fixture
def folder(home: Path) -> Path:
    folder = home / "cluster" / "logs"
    folder.mkdir(parents=True)
    return folder


def test_lines_are_merged_by_time(cli: Cli, folder: Path) -> None:
    (folder / "coordinator.log").write_text(
        "2026-01-01T00:00:01.000Z INFO a: first\n2026-01-01T00:00:03.000Z ERROR a: third\n  with a traceback\n"
    )
    (folder / "worker-1.log").write_text("2026-01-01T00:00:02.000Z INFO b: second\n")
    result = cli("logs")
    assert result.exit_code == 0
    said = [line.split(": ")[-1] for line in result.stdout.splitlines()]
    assert said == ["first", "second", "third", "coordinator    with a traceback"]
    assert result.stdout.startswith("coordinator  2026")
    assert cli("logs", "worker-1").stdout == "2026-01-01T00:00:02.000Z INFO b: second\n"
    assert cli("logs", "coordinator", "-n", "1").stdout == "  with a traceback\n"


def test_unknown_names_get_the_choices(cli: Cli, folder: Path) -> None:
    result = cli("logs")
    assert result.exit_code == 2
    (folder / "coordinator.log").touch()
    result = cli("logs", "worker-7")
    assert result.exit_code == 2
    assert "use one of coordinator" in result.stderr


def test_tail_follows_over_a_rotation(tmp_path: Path) -> None:
    path = tmp_path / "worker.log"
    path.write_text("one\ntwo\nhal")
    tail = LogTail(path)
    assert tail.last(1) == ["two"]
    with path.open("a") as file:
        file.write("f\nfour\n")
    assert list(tail.more()) == ["half", "four"]
    assert list(tail.more()) == []
    path.rename(tmp_path / "worker.log.1")
    assert list(tail.more()) == []
    path.write_text("new\n")
    assert list(tail.more()) == ["new"]


def test_merging_nothing() -> None:
    assert list(merge({})) == []
    assert list(merge({"a": [], "b": []})) == []


def test_lines_of_json_are_merged_by_time_too() -> None:
    early, late = (f'{{"time":"2026-01-01T00:00:0{second}.000Z","level":"INFO"}}' for second in (1, 3))
    plain = "2026-01-01T00:00:02.000Z WARNING supervisor: between"
    merged = [line.split("  ", 1)[1].rstrip("\n") for line in merge({"a": [early, late], "b": [plain]})]
    assert merged == [early, plain, late]
