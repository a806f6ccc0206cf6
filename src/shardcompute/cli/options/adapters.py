"""Options of adapters: LoRA folders that are kept beside a model, or merged into it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from shardcompute.core.errors import UsageError

_ENGINE = "Engine"

AdapterOption = Annotated[
    list[str] | None,
    typer.Option(
        "--adapter",
        metavar="NAME=FOLDER",
        help="PEFT LoRA folder to keep beside the model; requests choose it as MODEL:NAME. May be repeated.",
        rich_help_panel=_ENGINE,
    ),
]
MergedAdapter = Annotated[
    Path | None,
    typer.Option(
        "--merge-adapter",
        metavar="FOLDER",
        help="PEFT LoRA folder to merge into the weights when they are read.",
        rich_help_panel=_ENGINE,
    ),
]


@dataclass(frozen=True, slots=True)
class AdapterArguments:
    """Adapters of the model that is loaded."""

    adapter: AdapterOption = None
    merge_adapter: MergedAdapter = None

    @property
    def folders(self) -> dict[str, Path]:
        return parse_adapters(self.adapter or ())


def parse_adapters(given: Sequence[str]) -> dict[str, Path]:
    """Folders by name; UsageError for what is not NAME=FOLDER, or a name given twice."""
    folders: dict[str, Path] = {}
    for each in given:
        name, mark, folder = each.partition("=")
        if not (name and mark and folder):
            raise UsageError(
                f"--adapter {each!r} is not NAME=FOLDER", hint="such as --adapter polite=./my-lora"
            )
        if name in folders:
            raise UsageError(f"--adapter gives {name!r} twice", hint="give every adapter a name of its own")
        folders[name] = Path(folder).expanduser().absolute()
    return folders
