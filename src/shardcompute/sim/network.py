"""An emulated network: machines on which programs run, and conditions between them that can change at any time.

Two emulators share this face. `namespaces` gives each machine a network namespace: everything that crosses the
network is real TCP, with slow start, retransmission and congestion control; it needs root on Linux. `links` shapes
what our own processes send, inside their link layer: it runs everywhere, and shows delay, rate and blackouts but
nothing of TCP's own behaviour.
"""

from __future__ import annotations

import os
import shutil
import sys
import threading
from abc import abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from enum import StrEnum
from functools import reduce
from pathlib import Path

from shardcompute.core.closing import Closing
from shardcompute.core.errors import BackendError
from shardcompute.sim.conditions import Change, Conditions, apply_change, initial_conditions
from shardcompute.sim.topology import Topology


class Emulator(StrEnum):
    AUTO = "auto"
    NAMESPACES = "namespaces"
    LINKS = "links"


class EmulatedNetwork(Closing):
    """Leaving the block (or `close`) ends it. Start programs inside the block, and end them there."""

    emulator: Emulator

    def __init__(self, topology: Topology, machines: Sequence[str]) -> None:
        self._conditions = initial_conditions(topology, machines)
        self._lock = threading.Lock()

    @property
    def conditions(self) -> Conditions:
        return self._conditions

    @property
    def machines(self) -> tuple[str, ...]:
        return self._conditions.machines

    def change(self, *changes: Change) -> None:
        """Change the conditions, all at once. They are in force when this returns, or a moment later."""
        with self._lock:
            self._conditions = reduce(apply_change, changes, self._conditions)
            self._enforce()

    def impose(self, conditions: Conditions) -> None:
        """Other conditions for the same machines."""
        with self._lock:
            self._conditions = conditions
            self._enforce()

    @abstractmethod
    def host(self, machine: str) -> str:
        """The address at which the other machines reach this one."""

    @abstractmethod
    def new_port(self, machine: str) -> int:
        """A port of the machine for the links of one process; no other process gets it."""

    @abstractmethod
    def command(self, machine: str, command: Sequence[str]) -> list[str]:
        """The command line that runs `command` on a machine."""

    @abstractmethod
    def options(self, machine: str) -> list[str]:
        """What `shardcompute coordinator`, `worker` and `join` must be told on this machine."""

    @abstractmethod
    def inside(self, machine: str) -> AbstractContextManager[None]:
        """Sockets that this thread makes inside the block are on that machine."""

    @abstractmethod
    def _enforce(self) -> None:
        """Have the conditions take effect. Called with the lock held."""


def why_no_namespaces() -> str:
    """What keeps this system from emulating with namespaces; "" if nothing does."""
    if sys.platform == "linux":
        if os.geteuid() != 0:
            return "network namespaces need root"
        if shutil.which("ip") is None:
            return "the program `ip` (iproute2) is not installed"
        if not Path("/dev/net/tun").exists():
            return "there is no /dev/net/tun"
        from shardcompute.sim.namespaces import try_namespaces

        return try_namespaces()
    else:
        return "network namespaces need Linux"


def open_network(
    topology: Topology, machines: Sequence[str], emulator: Emulator = Emulator.AUTO
) -> EmulatedNetwork:
    """BackendError where namespaces are asked for and cannot be."""
    from shardcompute.sim.loopback import LoopbackNetwork
    from shardcompute.sim.namespaces import NamespaceNetwork

    if emulator is Emulator.LINKS:
        return LoopbackNetwork(topology, machines)
    problem = why_no_namespaces()
    if not problem:
        return NamespaceNetwork(topology, machines)
    if emulator is Emulator.AUTO:
        return LoopbackNetwork(topology, machines)
    raise BackendError(f"no emulation with namespaces here: {problem}", hint="choose the emulator `links`")
