"""Progress of what a command waits for: bars on a terminal, a line now and then anywhere else."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

from shardcompute.cli.console import Screen
from shardcompute.weights.sources.progress import Progress

_STEP_PERCENT = 10
_PAUSE_S = 5.0


class LineProgress:
    """A line when a task starts, at every tenth of it, and every five seconds while it moves."""

    def __init__(self, say: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._say = say
        self._clock = clock
        self._label = ""
        self._total: int | None = None
        self._done = 0
        self._said_step = 0
        self._said_s = 0.0

    def start(self, label: str, total_bytes: int | None) -> None:
        self._label, self._total, self._done = label, total_bytes, 0
        self._said_step, self._said_s = 0, self._clock()
        self._say(label if total_bytes is None else f"{label} ({_megabytes(total_bytes)} MB)")

    def advance(self, count_bytes: int) -> None:
        self._done = max(0, self._done + count_bytes)
        step = self._percent() // _STEP_PERCENT
        now = self._clock()
        if step > self._said_step or now - self._said_s >= _PAUSE_S:
            self._said_step, self._said_s = step, now
            self._say(f"{self._label}: {self._amount()}")

    def finish(self) -> None:
        """The next task or the command itself says what comes next."""

    def _percent(self) -> int:
        return 100 * self._done // self._total if self._total else 0

    def _amount(self) -> str:
        if self._total is None:
            return f"{_megabytes(self._done)} MB"
        return f"{self._percent()} % ({_megabytes(self._done)} of {_megabytes(self._total)} MB)"


@contextlib.contextmanager
def waiting(screen: Screen, doing: str, *, is_quiet: bool = False) -> Iterator[Progress]:
    """Shows `doing` while the block runs, and tasks inside it through the progress given.

    Off a terminal, `is_quiet` leaves `doing` out: a script that gets its answer need not hear of it.
    """
    if not screen.is_live:
        if not is_quiet:
            screen.say(doing)
        yield LineProgress(screen.say)
        return
    from shardcompute.cli.bars import showing_bars

    with showing_bars(screen, doing) as progress:
        yield progress


def _megabytes(count: int) -> int:
    return round(count / 1e6)


class _StatusLine:
    """The last line of a terminal, which says what is going on."""

    def __init__(self, screen: Screen | None) -> None:
        self._status = screen.err.status("") if screen is not None and screen.is_live else None
        self._is_shown = False

    def __call__(self, text: str) -> None:
        if self._status is None:
            return
        if text:
            self._status.update(text)
        if bool(text) is not self._is_shown:
            self._is_shown = bool(text)
            (self._status.start if text else self._status.stop)()


@contextlib.contextmanager
def status_line(screen: Screen | None) -> Iterator[Callable[[str], None]]:
    """Shows a text, or nothing for "", until the block ends; on terminals alone."""
    line = _StatusLine(screen)
    try:
        yield line
    finally:
        line("")
