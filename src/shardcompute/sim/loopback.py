"""Emulation inside the link layer: programs run on this machine's loopback, told how to shape what they send.

The conditions are in a file that all of them read (`sim.shape_file`). Downlinks and full queues are not emulated, nor
is anything but links: joining and the HTTP API are as fast as loopback is.
"""

from __future__ import annotations

import contextlib
import shutil
import socket
import tempfile
from collections.abc import Sequence
from pathlib import Path

from shardcompute.sim.network import EmulatedNetwork, Emulator
from shardcompute.sim.shape_file import NetworkShape, write_shape
from shardcompute.sim.topology import Topology

_HOST = "127.0.0.1"


class LoopbackNetwork(EmulatedNetwork):
    emulator = Emulator.LINKS

    def __init__(self, topology: Topology, machines: Sequence[str]) -> None:
        super().__init__(topology, machines)
        self._addresses: dict[str, str] = {}
        self._folder = Path(tempfile.mkdtemp(prefix="shardcompute-net-"))
        self._file = self._folder / "shape.json"
        self._enforce()

    def host(self, machine: str) -> str:
        return _HOST

    def new_port(self, machine: str) -> int:
        self._conditions.index(machine)
        with self._lock:
            with socket.create_server((_HOST, 0)) as probe:
                port: int = probe.getsockname()[1]
            self._addresses[f"{_HOST}:{port}"] = machine
            self._enforce()
        return port

    def command(self, machine: str, command: Sequence[str]) -> list[str]:
        return list(command)

    def options(self, machine: str) -> list[str]:
        self._conditions.index(machine)
        return ["--shape", f"{machine}@{self._file}"]

    def inside(self, machine: str) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def close(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)

    def _enforce(self) -> None:
        write_shape(self._file, NetworkShape(self._conditions, dict(self._addresses)))
