"""Progress bars on a terminal."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from rich import progress as bars
from rich.console import RenderableType

from shardcompute.cli.console import Screen, without_controls


class BarProgress:
    """A bar for each task under the line of what is going on; see `weights.sources.progress.Progress`."""

    def __init__(self, display: bars.Progress) -> None:
        self._display = display
        self._task: bars.TaskID | None = None

    def start(self, label: str, total_bytes: int | None) -> None:
        self._task = self._display.add_task(without_controls(label), total=total_bytes)

    def advance(self, count_bytes: int) -> None:
        if self._task is not None:
            self._display.advance(self._task, count_bytes)

    def finish(self) -> None:
        if self._task is not None:
            self._display.remove_task(self._task)
            self._task = None


@contextlib.contextmanager
def showing_bars(screen: Screen, doing: str) -> Iterator[BarProgress]:
    """Shows `doing` while the block runs, and under it the tasks of the progress given."""
    columns = (
        bars.SpinnerColumn(),
        bars.TextColumn("{task.description}", markup=False),
        _BytesColumn(bars.BarColumn()),
        _BytesColumn(bars.DownloadColumn(binary_units=True)),
        _BytesColumn(bars.TransferSpeedColumn()),
        _BytesColumn(bars.TimeRemainingColumn()),
    )
    with bars.Progress(*columns, console=screen.err, transient=True) as display:
        display.add_task(without_controls(doing), total=None)
        yield BarProgress(display)


class _BytesColumn(bars.ProgressColumn):
    """A column that only tasks of known size fill."""

    def __init__(self, column: bars.ProgressColumn) -> None:
        super().__init__()
        self._column = column

    def render(self, task: bars.Task) -> RenderableType:
        return "" if task.total is None else self._column.render(task)
