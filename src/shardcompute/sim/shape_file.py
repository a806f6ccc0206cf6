"""Shape file, through which processes on an emulated network hear of its conditions, and of every change."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
from msgspec import Struct

from shardcompute.core.errors import SourceError, UsageError
from shardcompute.sim.conditions import Conditions

_LOOK_S = 0.05


class NetworkShape(Struct, frozen=True):
    """The conditions, and which machine listens at which `host:port`."""

    conditions: Conditions
    addresses: dict[str, str]


def write_shape(path: Path, shape: NetworkShape) -> None:
    """Whole or not at all: readers never see half a file."""
    fresh = path.with_suffix(".new")
    fresh.write_bytes(msgspec.json.encode(shape))
    os.replace(fresh, path)


def parse_shape_option(text: str) -> tuple[str, Path]:
    """`MACHINE@FILE`, as the option --shape has it."""
    machine, separator, path = text.partition("@")
    if not (machine and separator and path):
        raise UsageError(f"--shape {text!r} names no machine and file", hint="write MACHINE@FILE")
    return machine, Path(path)


class ShapeReader:
    """What the file says now, read again at most every 50 ms. Methods may be called from any thread."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._path = path
        self._clock = clock
        self._lock = threading.Lock()
        self._stamp = (0, 0)
        self._looked_s = clock()
        self._shape = self._read()

    def shape(self) -> NetworkShape:
        with self._lock:
            now_s = self._clock()
            if now_s - self._looked_s >= _LOOK_S:
                self._looked_s = now_s
                if self._stamp_of_file() != self._stamp:
                    self._shape = self._read()
            return self._shape

    def _read(self) -> NetworkShape:
        try:
            self._stamp = self._stamp_of_file()
            return msgspec.json.decode(self._path.read_bytes(), type=NetworkShape)
        except (OSError, msgspec.DecodeError) as error:
            raise SourceError(
                f"the network's conditions cannot be read from {self._path}: {error}",
                hint="check the file that --shape names",
            ) from error

    def _stamp_of_file(self) -> tuple[int, int]:
        try:
            status = self._path.stat()
        except OSError:
            # The network is being taken down; its last conditions stay in force.
            return self._stamp
        return status.st_mtime_ns, status.st_ino
