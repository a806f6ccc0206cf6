"""Where processes log: one file each under a folder's `logs/`, rotated by size, with secrets masked.

Every line starts with a UTC time that sorts as text, so that the files of several processes can be merged.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any

from shardcompute.security.secrets import RedactSecrets

MOST_BYTES = 8 << 20
KEPT_FILES = 3
_FORMAT = "%(asctime)s.%(msecs)03dZ %(levelname)s %(name)s: %(message)s"
_TIME_FORMAT = "%Y-%m-%dT%H:%M:%S"


def log_folder(folder: Path) -> Path:
    return folder / "logs"


def log_path(folder: Path, name: str) -> Path:
    return log_folder(folder) / f"{name}.log"


@contextmanager
def logging_to_file(folder: Path, name: str) -> Iterator[None]:
    """Everything that this process logs goes to its file while the block runs."""
    with _on_root(_file_handler(log_path(folder, name))):
        yield


@contextmanager
def logging_to_stderr(*, is_brief: bool) -> Iterator[None]:
    """For people (`is_brief`: without times), or for whoever started this process and keeps its lines."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(message)s") if is_brief else _formatter())
    handler.addFilter(RedactSecrets())
    with _on_root(handler):
        yield


class LineFile:
    """A rotated file for lines that another process has written."""

    def __init__(self, folder: Path, name: str) -> None:
        self._handler = _file_handler(log_path(folder, name))
        self._handler.setFormatter(logging.Formatter("%(message)s"))

    def write(self, line: str) -> None:
        self._handler.handle(logging.LogRecord("", logging.INFO, "", 0, line, None, None))

    def write_now(self, line: str) -> None:
        """A line of our own, with the time."""
        now_s = time.time()
        stamp = time.strftime(_TIME_FORMAT, time.gmtime(now_s))
        self.write(f"{stamp}.{int(now_s % 1 * 1000):03d}Z WARNING supervisor: {line}")

    def close(self) -> None:
        self._handler.close()


class _PrivateRotatingFile(RotatingFileHandler):
    """Logs tell who talks to whom: they are for their owner alone."""

    def _open(self) -> Any:
        return open(
            os.open(self.baseFilename, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600),
            "a",
            encoding="utf-8",
            errors="replace",
        )


def _file_handler(path: Path) -> logging.Handler:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    handler = _PrivateRotatingFile(path, maxBytes=MOST_BYTES, backupCount=KEPT_FILES, encoding="utf-8")
    handler.setFormatter(_formatter())
    handler.addFilter(RedactSecrets())
    return handler


def _formatter() -> logging.Formatter:
    formatter = logging.Formatter(_FORMAT, _TIME_FORMAT)
    formatter.converter = time.gmtime
    return formatter


@contextmanager
def _on_root(handler: logging.Handler) -> Iterator[None]:
    root = logging.getLogger()
    former = root.level
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    try:
        yield
    finally:
        root.setLevel(former)
        root.removeHandler(handler)
        handler.close()
