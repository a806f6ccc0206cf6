"""Cleanup of what an emulated network has made: namespaces, the devices in them, the processes on its machines.

Names say whose they are: `scnet-PID-NUMBER-MACHINE`. A network that comes later removes those of processes that
live no more.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import time

import psutil

from shardcompute.sim.taps import NAMESPACES

_NAME = re.compile(r"scnet-(\d+)-\d+-.+")
_SECONDS = 20.0
_GONE_S = 5.0


def namespace_name(number: int, machine: str) -> str:
    """For network `number` of this process."""
    return f"scnet-{os.getpid()}-{number}-{machine}"


def remove_leftovers() -> list[str]:
    """Remove namespaces whose makers are dead; their names."""
    try:
        names = sorted(os.listdir(NAMESPACES))
    except OSError:
        return []
    removed = []
    for name in names:
        owner = _NAME.fullmatch(name)
        if owner is not None and not _is_alive(int(owner[1])):
            remove_namespace(name)
            removed.append(name)
    return removed


def remove_namespace(name: str) -> None:
    """Kill what runs in a namespace that is ours by its name, then remove it with its devices."""
    if _NAME.fullmatch(name) is None or not (NAMESPACES / name).exists():
        return
    deadline = time.monotonic() + _GONE_S
    while (pids := _pids_in(name)) and time.monotonic() < deadline:
        for pid in pids:
            with contextlib.suppress(psutil.Error):
                psutil.Process(pid).kill()
        time.sleep(0.02)
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False, timeout=_SECONDS)


def _pids_in(name: str) -> list[int]:
    """Processes whose main thread is in the namespace, this one excepted."""
    try:
        wanted = os.stat(NAMESPACES / name).st_ino
        entries = [int(entry) for entry in os.listdir("/proc") if entry.isdigit()]
    except OSError:
        return []
    found = []
    for pid in entries:
        with contextlib.suppress(OSError):
            is_there = os.stat(f"/proc/{pid}/ns/net").st_ino == wanted
            if is_there and pid != os.getpid() and not _is_zombie(pid):
                found.append(pid)
    return found


def _is_zombie(pid: int) -> bool:
    with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
        return file.read().rpartition(")")[2].split()[0] == "Z"


def _is_alive(pid: int) -> bool:
    return bool(psutil.pid_exists(pid))
