"""Phases of a start, or of a move: what a process does until it serves, and how long each part takes.

Every phase is one line in the log, with its seconds and the moment at which it ended, so that the phases of several
processes can be put side by side (`bench serve` and `bench migration` do). What ends before there is a log is kept
until there is one.
"""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import psutil

log = logging.getLogger(__name__)
_LINE = re.compile(r"phase (?P<name>[^:]+): (?P<seconds>\d+\.\d+) s, until (?P<until>\d+\.\d+)")
_LEAST_S = 0.02
"""What is shorter explains nothing."""


@dataclass(frozen=True, slots=True)
class Phase:
    """`until_s` is the time of day at its end."""

    name: str
    seconds: float
    until_s: float

    def __str__(self) -> str:
        return f"phase {self.name}: {self.seconds:.3f} s, until {self.until_s:.3f}"


class _PhaseLog:
    """Methods may be called from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: list[Phase] | None = []

    def add(self, phase: Phase) -> None:
        with self._lock:
            if self._kept is not None:
                self._kept.append(phase)
                return
        log.info("%s", phase)

    def open(self) -> None:
        with self._lock:
            kept, self._kept = self._kept or [], None
        for phase in kept:
            log.info("%s", phase)


_PHASES = _PhaseLog()


@contextmanager
def phase(name: str, *, is_brief: bool = False) -> Iterator[None]:
    """The block is a phase of this name, if it takes any time to speak of; where others wait for all of it, also if it
    `is_brief`."""
    began = time.monotonic()
    try:
        yield
    finally:
        seconds = time.monotonic() - began
        if is_brief or seconds >= _LEAST_S:
            _PHASES.add(Phase(name, seconds, time.time()))


def note_imports() -> None:
    """All until now, since the process began, was the interpreter's and what it has imported."""
    now_s = time.time()
    _PHASES.add(Phase("imports", max(0.0, now_s - psutil.Process().create_time()), now_s))


def log_phases() -> None:
    """There is a log: from now on phases are written there, and first those that were kept."""
    _PHASES.open()


def read_phases(lines: Iterable[str]) -> list[Phase]:
    """The phases in lines of a log, as they ended."""
    found = (_LINE.search(line) for line in lines)
    return [Phase(each["name"], float(each["seconds"]), float(each["until"])) for each in found if each]
