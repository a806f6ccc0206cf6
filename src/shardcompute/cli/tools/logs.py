"""`shardcompute logs`: what the processes of a cluster or worker have written down."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated

import typer

from shardcompute.cli.console import Screen, open_screen
from shardcompute.cli.options.cluster import ClusterFolder, cluster_folder
from shardcompute.core.errors import UsageError
from shardcompute.core.settings import load_settings

_LOOK_S = 0.25
_TIME_CHARACTERS = len("2000-01-01T00:00:00.000Z")


def logs(
    name: Annotated[
        str,
        typer.Argument(
            metavar="PROCESS", help="One of them, such as coordinator or worker-1; all if left out."
        ),
    ] = "",
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Go on with what is written from now on.")
    ] = False,
    lines: Annotated[
        int,
        typer.Option("--lines", "-n", metavar="N", min=0, help="How many of the last lines of each to show."),
    ] = 100,
    data_dir: ClusterFolder = None,
) -> None:
    """Show the logs of the cluster's coordinator and local workers, in order of time."""
    from shardcompute.node.process.log_files import log_folder

    screen = open_screen()
    folder = log_folder(cluster_folder(load_settings(), data_dir))
    files = find_logs(folder, name)
    tails = [LogTail(path) for path in files]
    for line in merge({tail.name: tail.last(lines) for tail in tails}):
        screen.write(line)
    if follow:
        _follow(tails, screen)


def find_logs(folder: Path, name: str) -> list[Path]:
    """The files to show; UsageError that names the choices when there is nothing of this name."""
    found = sorted(folder.glob("*.log"))
    chosen = [path for path in found if name in ("", path.stem)]
    if not found:
        raise UsageError(f"there are no logs in {folder}", hint="choose another --data-dir")
    if not chosen:
        raise UsageError(
            f"nothing called {name!r} has logged there", hint=f"use one of {', '.join(p.stem for p in found)}"
        )
    return chosen


class LogTail:
    """Reads a log from its end on, over rotations."""

    def __init__(self, path: Path) -> None:
        self.name = path.stem
        self._path = path
        self._position = 0
        self._identity = 0
        self._rest = ""

    def last(self, count: int) -> list[str]:
        kept: deque[str] = deque(self.more(), maxlen=count)
        return list(kept)

    def more(self) -> Iterator[str]:
        """Whole lines written since the last call."""
        try:
            with self._path.open(encoding="utf-8", errors="replace") as file:
                status = self._path.stat()
                if status.st_ino != self._identity or status.st_size < self._position:
                    self._identity, self._position, self._rest = status.st_ino, 0, ""
                file.seek(self._position)
                text = self._rest + file.read()
                self._position = file.tell()
        except FileNotFoundError:
            return
        *whole, self._rest = text.split("\n")
        yield from whole


def merge(written: dict[str, list[str]]) -> Iterator[str]:
    """Lines of several logs by time, each with its log's name; lines without a time stay where they are."""
    width = max(map(len, written), default=0)
    entries: list[tuple[str, str]] = []
    for name, lines in written.items():
        stamp = ""
        for line in lines:
            text = line.removeprefix('{"time":"')
            stamp = text[:_TIME_CHARACTERS] if text[:4].isdigit() else stamp
            entries.append((stamp, f"{name:<{width}}  {line}\n" if len(written) > 1 else f"{line}\n"))
    entries.sort(key=lambda entry: entry[0])
    return (line for _, line in entries)


def _follow(tails: list[LogTail], screen: Screen, pause: Callable[[float], None] = time.sleep) -> None:
    while True:
        for line in merge({tail.name: list(tail.more()) for tail in tails}):
            screen.write(line)
        pause(_LOOK_S)
