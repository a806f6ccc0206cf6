"""Every way to end has its code and its words."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

import pytest
import typer

from shardcompute.cli.exits import EXIT_CODES, guard
from shardcompute.core.errors import DiskFullError, ShardComputeError, UsageError


def _all_errors(kind: type[ShardComputeError] = ShardComputeError) -> Iterator[type[ShardComputeError]]:
    yield kind
    for child in kind.__subclasses__():
        yield from _all_errors(child)


def _end_of(error: BaseException, *, is_debug: bool = False) -> int:
    with pytest.raises(typer.Exit) as ended, guard(is_debug=is_debug):
        raise error
    return ended.value.exit_code


def test_every_error_has_a_documented_code() -> None:
    codes = {code for code, _ in EXIT_CODES}
    assert {
        kind.exit_code for kind in _all_errors() if kind.__module__ == ShardComputeError.__module__
    } <= codes


def test_our_errors_are_told_with_their_hint(capsys: pytest.CaptureFixture[str]) -> None:
    assert _end_of(DiskFullError("the disk is full", hint="free some space")) == 6
    assert capsys.readouterr().err == "error: the disk is full\nhint: free some space\n"
    assert _end_of(UsageError("no")) == 2
    assert capsys.readouterr().err == "error: no\n"


def test_unforeseen_errors_show_a_traceback_only_when_asked(capsys: pytest.CaptureFixture[str]) -> None:
    assert _end_of(ZeroDivisionError("by zero")) == 1
    said = capsys.readouterr().err
    assert "error: something unforeseen happened: ZeroDivisionError: by zero" in said
    assert "Traceback" not in said
    assert _end_of(ZeroDivisionError("by zero"), is_debug=True) == 1
    assert "Traceback" in capsys.readouterr().err


def test_interrupt_and_memory(capsys: pytest.CaptureFixture[str]) -> None:
    assert _end_of(KeyboardInterrupt()) == 130
    assert capsys.readouterr().err == "interrupted\n"
    assert _end_of(MemoryError()) == 7
    assert "memory of this machine is used up" in capsys.readouterr().err


def test_brackets_in_messages_are_text(capsys: pytest.CaptureFixture[str]) -> None:
    _end_of(UsageError("[red]x[/nothing] \x1b[31m"))
    assert capsys.readouterr().err == "error: [red]x[/nothing] [31m\n"


def test_what_typer_raises_passes() -> None:
    with pytest.raises(typer.BadParameter), guard():
        raise typer.BadParameter("no")
    with pytest.raises(typer.Exit) as ended, guard():
        raise typer.Exit(5)
    assert ended.value.exit_code == 5


def test_reader_who_leaves_ends_it_quietly(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    errors, error_writer = os.pipe()
    with os.fdopen(writer, "w") as pipe, os.fdopen(error_writer, "w") as said:
        monkeypatch.setattr(sys, "stdout", pipe)
        monkeypatch.setattr(sys, "stderr", said)
        with pytest.raises(typer.Exit) as ended, guard():
            print("text that is still in the buffer")
        assert ended.value.exit_code == 141
    os.close(errors)
