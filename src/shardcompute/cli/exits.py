"""Exit codes: every outcome has its own and, unless it is success, a line on stderr."""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from collections.abc import Iterator
from typing import Any

import typer
from typer.core import TyperGroup

from shardcompute.cli.console import open_screen
from shardcompute.cli.failures import explain, show_error

INTERRUPTED = 130
BROKEN_PIPE = 141

EXIT_CODES: tuple[tuple[int, str], ...] = (
    (0, "success"),
    (1, "something unforeseen; `shardcompute --debug …` shows where"),
    (
        2,
        "the command is wrong: an option, an empty prompt, a prompt that does not fit the context, a busy port",
    ),
    (3, "no such model, here or at the source"),
    (4, "the model is known and not supported"),
    (5, "a model's file is damaged or contradicts itself"),
    (6, "a source cannot be reached or read, the disk is full, or a cluster's journal is missing or damaged"),
    (7, "not enough memory, or too many requests"),
    (8, "a backend is missing or failed"),
    (9, "another machine is out of reach or broke the protocol"),
    (10, "a token, key or certificate is not accepted"),
    (INTERRUPTED, "interrupted (Ctrl-C)"),
    (BROKEN_PIPE, "whoever read the output stopped reading"),
)
"""What `core.errors` and this module can end with."""

# Typer may carry its own copy of Click, so its errors are found through one that it exports.
_CLICK_ERROR: type[Exception] = next(
    kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException"
)
_TYPER_ERRORS: tuple[type[Exception], ...] = (typer.Exit, typer.Abort, _CLICK_ERROR)


class GuardedGroup(TyperGroup):
    """The root of all commands: what any of them raises ends the program as `EXIT_CODES` says."""

    def get_params(self, ctx: Any) -> Any:
        for command in _all_commands(self):
            params: Any = super().get_params(ctx) if command is self else command.get_params(ctx)
            for param in params:
                if getattr(param, "is_flag", False) or param.param_type_name == "argument":
                    # Their names say it: `<bool>` behind a flag and `<str>` behind MODEL tell nobody anything.
                    param.display_type_rich = _untold
        return super().get_params(ctx)

    def invoke(self, ctx: Any) -> Any:
        with guard(is_debug=bool(ctx.params.get("debug"))):
            return super().invoke(ctx)


def _all_commands(command: Any) -> Iterator[Any]:
    yield command
    for child in getattr(command, "commands", {}).values():
        yield from _all_commands(child)


def _untold(ctx: Any) -> None:
    """No type is shown."""


@contextlib.contextmanager
def guard(*, is_debug: bool = False) -> Iterator[None]:
    """Turn exceptions into messages and `typer.Exit`; Typer's own pass."""
    try:
        yield
        sys.stdout.flush()
    except _TYPER_ERRORS:
        raise
    except BrokenPipeError:
        _drop_output()
        raise typer.Exit(BROKEN_PIPE) from None
    except KeyboardInterrupt:
        open_screen().say("interrupted")
        raise typer.Exit(INTERRUPTED) from None
    except Exception as error:
        shown = explain(error)
        screen = open_screen()
        if is_debug:
            screen.say("".join(traceback.format_exception(error)).rstrip(), "dim")
        show_error(screen, shown)
        raise typer.Exit(shown.exit_code) from None


def _drop_output() -> None:
    """Send what is still buffered nowhere, or the interpreter would complain about it at its end."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            os.dup2(nowhere, stream.fileno())
    os.close(nowhere)
