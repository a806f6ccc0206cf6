"""Processes that a benchmark starts and that are gone when its block ends."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

_STOP_S = 20.0


@contextlib.contextmanager
def running(command: Sequence[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Asked to stop at the end, then made to. Supervised workers also end with our end of their stdin."""
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=output, stderr=subprocess.STDOUT)
    try:
        yield process
    finally:
        process.terminate()
        assert process.stdin is not None
        with contextlib.suppress(OSError):
            process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_STOP_S)
        if process.poll() is None:
            process.kill()
            process.wait()


def last_words(log: Path) -> str:
    """The end of what a process has written."""
    return "; ".join(log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-4:])
