"""The program as a whole: help is quick, the version is right, the reference is up to date."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from shardcompute.cli import reference

Cli = Callable[..., Any]
COMMANDS = (
    "run",
    "up",
    "join",
    "worker",
    "coordinator",
    "down",
    "logs",
    "doctor",
    "pull",
    "list",
    "show",
    "rm",
    "token",
    "key",
    "service",
    "backup",
    "restore",
    "completion",
    "bench",
)
HEAVY = ("onnxruntime", "onnx", "numpy", "tokenizers", "torch", "uvicorn", "starlette", "httpx")


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys\n"
        "from shardcompute.cli.main import build_for\n"
        "try:\n    build_for(['--help'])(['--help'])\nexcept SystemExit as end:\n    assert not end.code\n"
        f"print([name for name in {HEAVY} if name in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
    assert all(f" {command} " in done.stdout for command in COMMANDS)


def test_nothing_that_is_made_can_be_written_by_everybody() -> None:
    code = (
        "import os, sys; os.umask(0); sys.argv[1:] = ['--version']\n"
        "from shardcompute.cli.main import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "print(oct(os.umask(0)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "0o2"


def test_version(cli: Cli) -> None:
    assert cli("--version").stdout == f"shardcompute {metadata.version('shardcompute')}\n"


def test_without_a_command_there_is_help(cli: Cli) -> None:
    assert "Usage: shardcompute" in cli().output


def test_unknown_commands_get_a_suggestion(cli: Cli) -> None:
    result = cli("rum")
    assert result.exit_code == 2
    assert "run" in result.stderr


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(cli: Cli, command: str) -> None:
    result = cli(command, "-h")
    assert result.exit_code == 0
    assert f"Usage: shardcompute {command}" in result.stdout


@pytest.mark.parametrize("command", ["", "status", "up", "token create"])
def test_help_tells_no_types_of_flags_and_names(cli: Cli, command: str) -> None:
    shown = cli(*command.split(), "--help").stdout
    assert "--help" in shown
    assert "<bool>" not in shown
    assert "<str>" not in shown


def test_wrong_settings_are_said_but_not_to_those_who_ask_for_help(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHARDCOMPUTE_THREADS", "many")
    assert cli("list", "--help").exit_code == 0
    result = cli("list")
    assert result.exit_code == 2
    assert "SHARDCOMPUTE_THREADS" in result.stderr


def test_debug_shows_where_something_unforeseen_happened(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise ZeroDivisionError("unforeseen")

    monkeypatch.setattr("shardcompute.cli.models.store.load_settings", fail)
    brief, full = cli("list"), cli("--debug", "list")
    assert brief.exit_code == full.exit_code == 1
    assert "Traceback" not in brief.stderr
    assert "Traceback" in full.stderr


def test_reference_is_up_to_date() -> None:
    page = Path(__file__).parents[3] / "docs" / "cli.md"
    assert page.read_text(encoding="utf-8") == reference.render(), (
        "run: python -m shardcompute.cli.reference > docs/cli.md"
    )


def test_a_command_imports_no_other() -> None:
    code = (
        "import sys; sys.argv[1:] = ['--debug', 'status', '--help']\n"
        "from shardcompute.cli.main import main\n"
        "try: main()\n"
        "except SystemExit as end: assert not end.code\n"
        "print([name for name in sys.modules if name.startswith('shardcompute.cli.')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    imported = done.stdout.splitlines()[-1]
    assert "shardcompute.cli.cluster.status" in imported
    others = ("serve", "chat", "service", "tools", "cluster.plan", "cluster.key", "models")
    assert not [name for name in others if f"shardcompute.cli.{name}" in imported]


def test_a_command_that_calls_others_finds_them(cli: Cli) -> None:
    shown = cli("service", "install", "up", "smollm2", "--print")
    assert shown.exit_code == 0, shown.stderr
    assert "shardcompute" in shown.stdout
