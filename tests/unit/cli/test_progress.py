"""Progress is told in moderation."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from shardcompute.cli.console import Screen
from shardcompute.cli.progress import LineProgress, waiting

MB = 1_000_000


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_a_line_for_every_tenth(clock: Clock) -> None:
    lines: list[str] = []
    progress = LineProgress(lines.append, clock)
    progress.start("fetching x", 93 * MB)
    for _ in range(93):
        progress.advance(MB)
    progress.finish()
    assert lines[0] == "fetching x (93 MB)"
    assert lines[1] == "fetching x: 10 % (10 of 93 MB)"
    assert lines[-1] == "fetching x: 100 % (93 of 93 MB)"
    assert len(lines) == 11


def test_a_line_every_five_seconds_when_it_is_slow(clock: Clock) -> None:
    lines: list[str] = []
    progress = LineProgress(lines.append, clock)
    progress.start("fetching x", 1000 * MB)
    for _ in range(9):
        clock.now += 1
        progress.advance(MB)
    assert lines == ["fetching x (1000 MB)", "fetching x: 0 % (5 of 1000 MB)"]


def test_task_that_starts_over_and_unknown_sizes(clock: Clock) -> None:
    lines: list[str] = []
    progress = LineProgress(lines.append, clock)
    progress.start("fetching x", 100 * MB)
    progress.advance(50 * MB)
    progress.advance(-50 * MB)
    progress.advance(20 * MB)
    assert lines[1:] == ["fetching x: 50 % (50 of 100 MB)"]
    progress.start("asking pip", None)
    clock.now += 5
    progress.advance(3 * MB)
    assert lines[2:] == ["asking pip", "asking pip: 3 MB"]


def test_empty_task(clock: Clock) -> None:
    lines: list[str] = []
    progress = LineProgress(lines.append, clock)
    progress.start("fetching nothing", 0)
    progress.advance(0)
    assert lines == ["fetching nothing (0 MB)"]


def _screen(*, is_terminal: bool) -> tuple[Screen, io.StringIO]:
    written = io.StringIO()
    console = Console(file=written, force_terminal=is_terminal, width=200, color_system=None, _environ={})
    return Screen(console, console), written


def test_off_a_terminal_there_are_lines() -> None:
    screen, written = _screen(is_terminal=False)
    with waiting(screen, "opening x") as progress:
        progress.start("fetching y", 10 * MB)
        progress.advance(10 * MB)
        progress.finish()
    assert written.getvalue() == "opening x\nfetching y (10 MB)\nfetching y: 100 % (10 of 10 MB)\n"


def test_quiet_waiting_still_tells_of_tasks() -> None:
    screen, written = _screen(is_terminal=False)
    with waiting(screen, "opening x", is_quiet=True) as progress:
        progress.start("fetching y", None)
    assert written.getvalue() == "fetching y\n"


def test_on_a_terminal_there_are_bars() -> None:
    screen, written = _screen(is_terminal=True)
    with waiting(screen, "opening [x]") as progress:
        progress.start("fetching y", 10 << 20)
        progress.advance(5 << 20)
        progress.start("unpacking z", None)  # makes the display draw itself
        progress.finish()
    shown = written.getvalue()
    assert "opening [x]" in shown
    assert "5.0/10.0 MiB" in shown
