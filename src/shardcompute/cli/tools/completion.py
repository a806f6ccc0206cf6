"""`shardcompute completion`: scripts that make shells complete what is typed."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from shardcompute.cli.console import open_screen


class Shell(StrEnum):
    BASH = "bash"
    ZSH = "zsh"
    FISH = "fish"


def completion(
    shell: Annotated[Shell, typer.Argument(metavar="|".join(Shell), help="The shell to write it for.")],
) -> None:
    """Print a script that makes a shell complete commands, options, and names of models and nodes.

    For bash: eval "$(shardcompute completion bash)" in ~/.bashrc. For zsh the same in ~/.zshrc, behind compinit. For
    fish: shardcompute completion fish > ~/.config/fish/completions/shardcompute.fish.
    `shardcompute --install-completion` does it for the shell that it runs in.
    """
    from typer.completion import get_completion_script  # type: ignore[attr-defined]

    script = get_completion_script(
        prog_name="shardcompute", complete_var="_SHARDCOMPUTE_COMPLETE", shell=shell.value
    )
    open_screen().write(f"{script}\n")
