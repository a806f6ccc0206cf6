"""Shutdown of long-running commands: by a signal, or by the end of whoever started them."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import threading
from collections.abc import Iterator, Mapping
from types import FrameType
from typing import NoReturn

_SIGNALS: tuple[signal.Signals, ...] = (signal.SIGINT, signal.SIGTERM)
if sys.platform == "win32":
    # Ctrl-Break; closing the console's window leaves no time for more than what a crash would keep.
    _SIGNALS = (*_SIGNALS, signal.SIGBREAK)
_GRACE_S = 8.0


@contextlib.contextmanager
def stop_requested() -> Iterator[threading.Event]:
    """An event that the first SIGINT or SIGTERM sets; the second one acts as it would without us."""
    stop = threading.Event()

    def take(number: int, frame: FrameType | None) -> None:
        stop.set()
        _restore(previous)

    previous = {number: signal.signal(number, take) for number in _SIGNALS}
    try:
        yield stop
    finally:
        _restore(previous)


@contextlib.contextmanager
def terminating_as_interrupt() -> Iterator[None]:
    """SIGTERM raises KeyboardInterrupt, as Ctrl-C does, so that everything is closed on the way out."""

    def take(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    previous = {signal.SIGTERM: signal.signal(signal.SIGTERM, take)}
    try:
        yield
    finally:
        _restore(previous)


def exit_at_once(code: int) -> NoReturn:
    """End a process whose resources are closed, without waiting for what still computes.

    A thread inside native code (a shard being loaded) cannot be stopped, and would abort the interpreter's own end.
    """
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def stop_with_parent(stop: threading.Event) -> None:
    """Set `stop` when stdin closes, which our parent holds open while it lives; then end by force if need be."""

    def watch() -> None:
        with contextlib.suppress(OSError, ValueError):
            while os.read(sys.stdin.fileno(), 4096):
                pass
        stop.set()
        # Nobody is left to notice a process that hangs on its way out.
        force = threading.Timer(_GRACE_S, os._exit, args=(1,))
        force.daemon = True
        force.start()

    threading.Thread(target=watch, name="parent", daemon=True).start()


def _restore(previous: Mapping[signal.Signals, object]) -> None:
    for number, former in previous.items():
        signal.signal(number, former)  # type: ignore[arg-type]
