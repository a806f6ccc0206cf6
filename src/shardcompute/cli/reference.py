"""The reference of all commands as Markdown, made from the commands themselves.

python -m shardcompute.cli.reference > docs/cli.md
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from enum import Enum
from typing import Any

import typer

from shardcompute.cli.exits import EXIT_CODES
from shardcompute.cli.main import build_app
from shardcompute.core import settings

_OPENING = """\
# Commands

Answers, listings and JSON go to stdout; everything said to people goes to stderr. On a terminal there are tables
and progress bars, anywhere else plain lines. `shardcompute --install-completion` sets up the shell's completion.

This page is made from the commands: `python -m shardcompute.cli.reference > docs/cli.md`."""


def render() -> str:
    """The whole page."""
    root = typer.main.get_command(build_app())
    parts = [_OPENING, *_command_parts(root, "shardcompute")]
    parts += ["## Exit codes", _table(("code", "meaning"), [(str(code), text) for code, text in EXIT_CODES])]
    parts += ["## Environment", f"```text\n{_environment()}\n```"]
    return "\n\n".join(parts) + "\n"


def _command_parts(command: Any, path: str) -> Iterator[str]:
    """A command's section, and those of its subcommands."""
    arguments = [param for param in command.params if param.param_type_name == "argument"]
    options = [param for param in command.params if param.param_type_name == "option" and not param.hidden]
    commands = getattr(command, "commands", None) or {}
    children = {name: child for name, child in commands.items() if not child.hidden}
    usage = [path, "[OPTIONS]", *map(_argument_usage, arguments), *(["COMMAND …"] if children else [])]
    yield f"## {path}"
    yield f"```text\n{' '.join(usage)}\n```"
    yield inspect.cleandoc(command.help or "")
    if arguments:
        yield _table(("argument", "meaning"), [(f"`{_name(param)}`", _meaning(param)) for param in arguments])
    if options:
        yield _table(("option", "meaning"), [(_option_names(param), _meaning(param)) for param in options])
    for name, child in children.items():
        yield from _command_parts(child, f"{path} {name}")


def _name(param: Any) -> str:
    return str(param.metavar or param.name).upper()


def _argument_usage(param: Any) -> str:
    return _name(param) if param.required else f"[{_name(param)}]"


def _option_names(param: Any) -> str:
    names = ", ".join(f"`{name}`" for name in (*param.opts, *param.secondary_opts))
    return names if getattr(param, "is_flag", False) else f"{names} `{param.metavar or 'VALUE'}`"


def _meaning(param: Any) -> str:
    default = param.default
    is_said = (
        default is None or default is ... or default == "" or callable(default) or isinstance(default, bool)
    )
    text = param.help or ""
    return text if is_said or default in ((), []) else f"{text} Default: {_plain(default)}."


def _plain(value: Any) -> str:
    return str(value.value) if isinstance(value, Enum) else str(value)


def _table(headings: tuple[str, str], rows: list[tuple[str, str]]) -> str:
    lines = [headings, ("---", "---"), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines)


def _environment() -> str:
    """The list of variables in the docstring of `core.settings`."""
    lines = inspect.cleandoc(settings.__doc__ or "").splitlines()
    return inspect.cleandoc("\n".join(line for line in lines if line.startswith("    ")))


def main() -> None:
    sys.stdout.write(render())


if __name__ == "__main__":
    main()
