"""Shared parts of the `bench` commands: options, the model that is measured, progress and results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from shardcompute.core.errors import UsageError
from shardcompute.sim import Emulator

if TYPE_CHECKING:
    from shardcompute.bench.report import Result

_MODEL = "Model: a folder, a .gguf file, org/repo, or nothing for the default."
Model = Annotated[str, typer.Argument(help=_MODEL)]
ModelOption = Annotated[str, typer.Option("--model", help=_MODEL)]
WeightsName = Annotated[str, typer.Option("--weights", help="Weight form.")]
Mbit = Annotated[float, typer.Option(min=0.1, help="Mbit/s of every machine's line, up and down.")]
EmulatorName = Annotated[
    Emulator,
    typer.Option(help="Network namespaces (root on Linux: real TCP), or shaped links (anywhere)."),
]
JsonFile = Annotated[Path | None, typer.Option("--json", help="Write raw results to this file.")]


def model_path(model: str) -> str:
    """The model's file or folder, fetched if it must be, so that every arm reads the same."""
    from shardcompute.core.settings import load_settings
    from shardcompute.weights.sources.reference import parse_reference
    from shardcompute.weights.sources.resolve import resolve

    files = resolve(parse_reference(model), load_settings())
    folder = files.folder or Path()
    return str(folder / files.main_file if files.kind == "gguf" else folder)


def read_numbers(text: str, option: str, *, is_whole: bool = False) -> list[str]:
    """Numbers that an option has, separated by commas, as they were written."""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    for part in parts:
        if not (part if is_whole else part.replace(".", "", 1)).isdigit():
            what = "whole number" if is_whole else "number"
            raise UsageError(f"{option} has {part!r}, which is no {what}", hint="write numbers with commas")
    return parts


class BenchProgress:
    """What is being measured now: one changing line on a terminal, plain lines otherwise."""

    def __init__(self) -> None:
        self._console = Console(stderr=True)
        self._status = self._console.status("starting") if self._console.is_terminal else None

    def __enter__(self) -> BenchProgress:
        if self._status is not None:
            self._status.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._status is not None:
            self._status.stop()

    def __call__(self, message: str) -> None:
        if self._status is not None:
            self._status.update(message)
        else:
            self._console.print(message, highlight=False)


def write_results(path: Path | None, content: Mapping[str, object]) -> None:
    """As JSON, where a file was asked for."""
    from shardcompute.bench.report import write_json

    if path is not None:
        write_json(path, content)
        Console(stderr=True).print(f"raw results: {path}", highlight=False)


def finish(results: Sequence[Result], table: str, path: Path | None) -> None:
    """Show what was measured, and keep it where a file was asked for."""
    from shardcompute.bench.report import listed

    typer.echo(table)
    write_results(path, {"results": listed(results)})
