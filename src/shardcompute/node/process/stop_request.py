"""Stop requests: how one process asks another of the same user to end as if by SIGTERM.

Windows has no such signal between processes: what is called terminating there is killing. So whoever runs from a folder
watches it there for a file that names its process, and raises the signal in itself.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil

from shardcompute.core.errors import ShardComputeError
from shardcompute.security.private_files import read_owned, replace_private

_FILE = "stop.request"
_LOOK_S = 0.5
NEEDS_FILE = sys.platform == "win32"


def ask_to_stop(process: Any, folder: Path, *, by_file: bool = NEEDS_FILE) -> None:
    """Have `process`, which runs from `folder`, end in its own order; nothing where it has ended already."""
    if by_file:
        replace_private(folder / _FILE, str(process.pid).encode())
        return
    with contextlib.suppress(psutil.Error):
        process.terminate()


def _raise_term() -> None:
    signal.raise_signal(signal.SIGTERM)


@contextlib.contextmanager
def heeding_requests(
    folder: Path,
    pid: int,
    *,
    by_file: bool = NEEDS_FILE,
    stop: Callable[[], None] = _raise_term,
    look_s: float = _LOOK_S,
) -> Iterator[None]:
    """Inside the block a request for `pid` is followed; nothing to do where signals bring them."""
    if not by_file:
        yield
        return
    over = threading.Event()
    watching = threading.Thread(
        target=_watch, args=(folder / _FILE, pid, over, stop, look_s), name="stop request", daemon=True
    )
    watching.start()
    try:
        yield
    finally:
        over.set()
        watching.join()


def _watch(path: Path, pid: int, over: threading.Event, stop: Callable[[], None], look_s: float) -> None:
    while not over.wait(look_s):
        try:
            asked = read_owned(path, is_secret=False)
        except (FileNotFoundError, ShardComputeError):
            continue
        # One for a process that is gone means nobody any more.
        with contextlib.suppress(OSError):
            path.unlink()
        if asked == str(pid).encode():
            stop()
            return
