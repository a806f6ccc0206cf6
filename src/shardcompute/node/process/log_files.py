"""Log files of processes: one each under a folder's `logs/`, rotated by size, with secrets masked.

Every line starts with a UTC time that sorts as text, so that the files of several processes can be merged. How they
look and how much is logged is one choice for all processes of a machine (see `core.settings`): plain lines, or one
JSON object per line, with the ids of requests, sessions and chains as fields of their own.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any

from shardcompute.core.settings import load_settings
from shardcompute.security.secrets import RedactSecrets

MOST_BYTES = 8 << 20
KEPT_FILES = 3
_FORMAT = "%(asctime)s.%(msecs)03dZ %(levelname)s %(name)s: %(message)s"
_TIME_FORMAT = "%Y-%m-%dT%H:%M:%S"
_FIELDS = ("request", "session", "chain")
"""What a log line may say about itself besides its text."""


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
    """For whoever started this process and keeps its lines; for people (`is_brief`) only what failed, without times."""
    handler = logging.StreamHandler(sys.stderr)
    is_plain = is_brief and load_settings().log_format == "text"
    handler.setFormatter(logging.Formatter("%(message)s") if is_plain else _formatter())
    handler.addFilter(RedactSecrets())
    if is_brief and load_settings().log_level != "debug":
        handler.setLevel(logging.ERROR)
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
        record = logging.LogRecord("supervisor", logging.WARNING, "", 0, line, None, None)
        self.write(_formatter().format(record))

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


class JsonLines(logging.Formatter):
    """One JSON object per line. The time comes first, so that lines sort as text."""

    def __init__(self) -> None:
        super().__init__()
        self.converter = time.gmtime

    def format(self, record: logging.LogRecord) -> str:
        fields: dict[str, Any] = {
            "time": f"{self.formatTime(record, _TIME_FORMAT)}.{int(record.msecs):03d}Z",
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        fields |= {
            name: str(record.__dict__[name]) for name in _FIELDS if record.__dict__.get(name) is not None
        }
        if record.exc_info and not record.exc_text:
            record.exc_text = self.formatException(record.exc_info)
        if record.exc_text:
            fields["error"] = record.exc_text
        return json.dumps(fields, ensure_ascii=False, separators=(",", ":"), default=str)


def _formatter() -> logging.Formatter:
    if load_settings().log_format == "json":
        return JsonLines()
    formatter = logging.Formatter(_FORMAT, _TIME_FORMAT)
    formatter.converter = time.gmtime
    return formatter


@contextmanager
def _on_root(handler: logging.Handler) -> Iterator[None]:
    root = logging.getLogger()
    former = root.level
    root.addHandler(handler)
    root.setLevel(load_settings().log_level.upper())
    try:
        yield
    finally:
        root.setLevel(former)
        root.removeHandler(handler)
        handler.close()
