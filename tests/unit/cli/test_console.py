"""Output fits where it goes."""

from __future__ import annotations

import io
import json
import re

import pytest
from rich.console import Console

from shardcompute.cli.console import Screen, open_screen, without_controls

ROWS = [["a", "longer"], ["bb", "x\x1b[31m"]]


def _terminal(monkeypatch: pytest.MonkeyPatch) -> Screen:
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    return open_screen()


def test_controls_are_taken_out() -> None:
    assert without_controls("a\x1b[31mb\x07\x9b\r\x00\tc\n") == "a[31mb\tc\n"


def test_plain_tables_are_aligned_lines(capsys: pytest.CaptureFixture[str]) -> None:
    screen = open_screen()
    screen.write_table(("NAME", "SIZE"), ROWS)
    screen.write_table((), ROWS)
    assert capsys.readouterr().out == "NAME  SIZE\na     longer\nbb    x[31m\na   longer\nbb  x[31m\n"


def test_answers_off_a_terminal_are_untouched(capsys: pytest.CaptureFixture[str]) -> None:
    open_screen().write("a\x1b[31mb\r\n")
    assert capsys.readouterr().out == "a\x1b[31mb\r\n"


def test_terminal_gets_tables_and_no_foreign_controls(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    screen = _terminal(monkeypatch)
    screen.write_table(("NAME", "SIZE"), ROWS)
    screen.write("a\x1b[31mb")
    shown = capsys.readouterr().out
    assert "─" in shown
    assert shown.endswith("a[31mb")


def test_what_does_not_fit_a_terminal_is_not_cut(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    id, model = "9180dc53d0f94c7e8e6f2b7f1c0a5e11", "SmolLM2-135M-Instruct.Q4_1"
    _terminal(monkeypatch).write_table(
        ("ID", "MODEL", "CHAIN", "STATE"), [[id, model, f"{model}#1", "done (stop)"]]
    )
    shown = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out)
    assert "…" not in shown
    assert id in shown
    lines = shown.splitlines()
    assert max(map(len, lines)) <= 60
    # Read column by column, nothing is missing.
    start = next(line for line in lines if id in line).index(id) + len(id)
    folded = "".join(line[start:] for line in lines[2:])
    assert all(folded.count(letter) >= f"{model}{model}#1".count(letter) for letter in f"{model}#1")


def test_no_color_is_plain_on_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    _terminal(monkeypatch).say("careful", "bold red")
    assert "\x1b[" in capsys.readouterr().err
    monkeypatch.setenv("NO_COLOR", "1")
    _terminal(monkeypatch).say("careful", "bold red")
    assert capsys.readouterr().err == "careful\n"


def test_long_lines_are_not_wrapped(capsys: pytest.CaptureFixture[str]) -> None:
    open_screen().say("word " * 100)
    assert capsys.readouterr().err.count("\n") == 1


def test_json_is_one_line_off_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    value = {"text": "ä\n", "list": [1, 2]}
    open_screen().write_json(value)
    plain = capsys.readouterr().out
    _terminal(monkeypatch).write_json(value)
    spread = capsys.readouterr().out
    assert plain.count("\n") == 1
    assert spread.count("\n") > 1
    assert json.loads(plain) == json.loads(spread) == value


def test_dumb_terminals_get_lines() -> None:
    def screen(term: str) -> Screen:
        console = Console(file=io.StringIO(), force_terminal=True, _environ={"TERM": term})
        return Screen(console, console)

    assert screen("xterm").is_live
    assert not screen("dumb").is_live
