"""Emulation with network namespaces: one for each machine, joined by a switch process (see `sim.switch`).

Machines have the addresses 10.213.0.1, .2, … on a device that leads to the switch. They know each other's hardware
addresses from the start, so that no measurement waits for ARP.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import selectors
import subprocess
import sys
import time
from collections.abc import Sequence

import msgspec

from shardcompute.core.errors import BackendError
from shardcompute.sim.conditions import to_json
from shardcompute.sim.leftovers import namespace_name, remove_leftovers, remove_namespace
from shardcompute.sim.network import EmulatedNetwork, Emulator
from shardcompute.sim.switch import Setup, SwitchReply, mac_of
from shardcompute.sim.taps import inside_namespace
from shardcompute.sim.topology import Topology

DEVICE = "wan0"
_NETWORK = "10.213.0"
_FIRST_PORT = 7420
_PATIENCE_S = 20.0
_numbers = itertools.count()


class NamespaceNetwork(EmulatedNetwork):
    emulator = Emulator.NAMESPACES

    def __init__(self, topology: Topology, machines: Sequence[str]) -> None:
        remove_leftovers()
        super().__init__(topology, machines)
        number = next(_numbers)
        self._names = {machine: namespace_name(number, machine) for machine in machines}
        self._ports = {machine: itertools.count(_FIRST_PORT) for machine in machines}
        self._switch: subprocess.Popen[bytes] | None = None
        with contextlib.ExitStack() as undo:
            undo.callback(self.close)
            for name in self._names.values():
                run_ip("netns", "add", name)
            self._switch = self._start_switch()
            for index, machine in enumerate(machines):
                self._configure(index, machine)
            undo.pop_all()

    def host(self, machine: str) -> str:
        return f"{_NETWORK}.{self._conditions.index(machine) + 1}"

    def new_port(self, machine: str) -> int:
        return next(self._ports[machine])

    def command(self, machine: str, command: Sequence[str]) -> list[str]:
        return ["ip", "netns", "exec", self._names[machine], *command]

    def options(self, machine: str) -> list[str]:
        return []

    def inside(self, machine: str) -> contextlib.AbstractContextManager[None]:
        return inside_namespace(self._names[machine])

    def _enforce(self) -> None:
        self._order(to_json(self._conditions))

    def close(self) -> None:
        """Processes on the machines that still run are killed."""
        switch, self._switch = self._switch, None
        if switch is not None:
            assert switch.stdin is not None
            assert switch.stdout is not None
            with contextlib.suppress(OSError):
                switch.stdin.close()
            try:
                switch.wait(_PATIENCE_S)
            except subprocess.TimeoutExpired:
                switch.kill()
                switch.wait()
            switch.stdout.close()
        for name in self._names.values():
            remove_namespace(name)

    def _start_switch(self) -> subprocess.Popen[bytes]:
        # A session of its own: Ctrl-C reaches whoever measures first, and the network ends last.
        switch = subprocess.Popen(
            [sys.executable, "-m", "shardcompute.sim.switch"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        self._switch = switch
        self._order(msgspec.json.encode(Setup(tuple(self._names.values()), DEVICE, self._conditions)))
        return switch

    def _order(self, line: bytes) -> None:
        """Tell the switch and wait until it has heard."""
        switch = self._switch
        if switch is None:
            raise BackendError("this emulated network is closed", hint="open another one")
        assert switch.stdin is not None
        assert switch.stdout is not None
        try:
            switch.stdin.write(line + b"\n")
            switch.stdin.flush()
            answer = _read_line(switch.stdout.fileno())
            reply = msgspec.json.decode(answer, type=SwitchReply)
        except (OSError, msgspec.DecodeError) as error:
            raise BackendError(
                f"the switch of the emulated network does not answer: {error}",
                hint="see what it wrote on stderr",
            ) from error
        if not reply.is_ready:
            raise BackendError(
                f"the emulated network cannot be built: {reply.problem}", hint="use the emulator `links`"
            )

    def _configure(self, index: int, machine: str) -> None:
        lines = [
            f"link set {DEVICE} address {mac_of(index)}",
            f"address add {_NETWORK}.{index + 1}/24 dev {DEVICE}",
            f"link set {DEVICE} up",
            "link set lo up",
        ]
        lines += [
            f"neighbour replace {_NETWORK}.{other + 1} lladdr {mac_of(other)} dev {DEVICE} nud permanent"
            for other in range(len(self.machines))
            if other != index
        ]
        run_ip("-n", self._names[machine], "-batch", "-", text="\n".join(lines) + "\n")


def try_namespaces() -> str:
    """Make one and remove it; why that is impossible, or ""."""
    name = namespace_name(next(_numbers), "trial")
    try:
        run_ip("netns", "add", name)
    except BackendError as error:
        return error.message
    finally:
        remove_namespace(name)
    return ""


def run_ip(*arguments: str, text: str | None = None) -> None:
    done = subprocess.run(
        ["ip", *arguments], input=text, capture_output=True, text=True, check=False, timeout=_PATIENCE_S
    )
    if done.returncode:
        raise BackendError(
            f"`ip {' '.join(arguments)}` failed: {done.stderr.strip()}", hint="use the emulator `links`"
        )


def _read_line(descriptor: int) -> bytes:
    """The next line of a pipe; TimeoutError if none comes."""
    line, deadline = b"", time.monotonic() + _PATIENCE_S
    with selectors.DefaultSelector() as selector:
        selector.register(descriptor, selectors.EVENT_READ)
        while not line.endswith(b"\n"):
            if not selector.select(deadline - time.monotonic()):
                raise TimeoutError("no answer in time")
            read = os.read(descriptor, 65536)
            if not read:
                raise BrokenPipeError("it has ended")
            line += read
    return line
