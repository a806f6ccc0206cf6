"""Pid files, who runs from a folder: `cluster.json`, `worker.json`, `driver.json`, and `places.json` of what keeps the
workers of several devices running, tell of them while they run.

A process is recognised by id, start time and command line, so that a file left behind by a crash, or an id that was
given to somebody else, is never mistaken for it. The files are private, hold no secret, and are replaced in one move.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import psutil

from shardcompute.core.errors import UsageError
from shardcompute.node.process.stop_request import ask_to_stop, heeding_requests
from shardcompute.security.private_files import (
    create_private,
    open_private_folder,
    read_owned,
    replace_private,
)

CLUSTER_FILE = "cluster.json"
WORKER_FILE = "worker.json"
DRIVER_FILE = "driver.json"
PLACES_FILE = "places.json"
_PROGRAM = "shardcompute"
_SAME_START_S = 2.0
_ATTEMPTS = 3
_LOOK_S = 0.05


class Running(msgspec.Struct, frozen=True):
    """A process and, of a cluster, where it can be reached."""

    pid: int
    create_time_s: float
    started_at_s: float
    name: str = ""
    api_url: str = ""
    cluster_port: int = 0
    join_port: int = 0
    api_certificate: str = ""
    """What its API shows where it speaks HTTPS (PEM): commands on this machine trust it and no other."""

    def find(self) -> Any | None:
        """The process as psutil knows it; None when it has ended, even if its id lives on in another."""
        try:
            process = psutil.Process(self.pid)
            is_same = abs(process.create_time() - self.create_time_s) < _SAME_START_S
            is_ours = any(_PROGRAM in part for part in process.cmdline())
            is_alive = process.status() != psutil.STATUS_ZOMBIE
        except psutil.Error:
            return None
        return process if is_same and is_ours and is_alive else None


@dataclass(slots=True)
class PidLock:
    """A folder that this process has for itself."""

    path: Path
    running: Running

    def update(self, **changes: Any) -> None:
        self.running = msgspec.structs.replace(self.running, **changes)
        replace_private(self.path, msgspec.json.encode(self.running))


@contextmanager
def claim(path: Path, name: str = "") -> Iterator[PidLock]:
    """Say in `path` that this process runs from its folder, until the block ends. UsageError if another does."""
    open_private_folder(path.parent)
    process = psutil.Process()
    held = PidLock(path, Running(process.pid, process.create_time(), time.time(), name))
    for _ in range(_ATTEMPTS):
        try:
            create_private(path, msgspec.json.encode(held.running))
            break
        except FileExistsError:
            other = read_running(path)
            if other is not None:
                raise _already_running(path, other) from None
            path.unlink(missing_ok=True)
    else:
        raise UsageError(f"another process is starting in {path.parent}", hint="try again in a few seconds")
    try:
        with heeding_requests(path.parent, process.pid):
            yield held
    finally:
        with contextlib.suppress(OSError):
            if _read(path) == held.running:
                path.unlink()


def check_free(path: Path) -> None:
    """UsageError if a process runs from the folder of `path`."""
    other = read_running(path)
    if other is not None:
        raise _already_running(path, other)


def read_running(path: Path) -> Running | None:
    """The process that `path` tells of, if it is still there."""
    running = _read(path)
    return running if running is not None and running.find() is not None else None


def stop_process(running: Running, folder: Path, grace_s: float) -> list[int]:
    """Ask the process that runs from `folder` to stop, wait, and end it and its children by force after `grace_s`; the
    ids forced."""
    process = running.find()
    if process is None:
        return []
    family = [process, *_children(process)]
    ask_to_stop(process, folder)
    alive = _wait_for([process], grace_s)
    # Children end by themselves once their parent has.
    alive = _wait_for(family, 0.0 if alive else grace_s)
    for each in alive:
        with contextlib.suppress(psutil.Error):
            each.kill()
    _wait_for(alive, grace_s)
    return [each.pid for each in alive]


def _wait_for(processes: list[Any], timeout_s: float) -> list[Any]:
    """Those that have not ended within `timeout_s`."""
    deadline_s = time.monotonic() + timeout_s
    while (alive := [each for each in processes if not _has_ended(each)]) and time.monotonic() < deadline_s:
        time.sleep(_LOOK_S)
    return alive


def _has_ended(process: Any) -> bool:
    """Zombies count: they only wait for a parent that takes no notice."""
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.Error:
        return True


def _children(process: Any) -> list[Any]:
    try:
        return list(process.children(recursive=True))
    except psutil.Error:
        return []


def _read(path: Path) -> Running | None:
    try:
        # Whoever could write it could send commands, and with them the local secret, elsewhere.
        return msgspec.json.decode(read_owned(path, is_secret=False), type=Running)
    except (FileNotFoundError, msgspec.DecodeError):
        return None


def _already_running(path: Path, other: Running) -> UsageError:
    where = f" at {other.api_url}" if other.api_url else ""
    what = "this process" if other.pid == os.getpid() else f"pid {other.pid}"
    return UsageError(
        f"already running from {path.parent}: {what}{where}",
        hint=f"stop it with: shardcompute down --data-dir {path.parent}; or choose another --data-dir",
    )
