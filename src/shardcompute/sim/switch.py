"""`python -m shardcompute.sim.switch`: one process that carries the packets of all machines of an emulated network.

It is told on stdin, a JSON object in each line: first the devices and the conditions, then new conditions whenever
they change; it answers each line with one. When stdin ends, so does the network: processes that were started on its
machines are killed and the namespaces removed, also if whoever started it was killed itself.
"""

from __future__ import annotations

import contextlib
import os
import select
import sys
import time

import msgspec
import psutil
from msgspec import Struct

from shardcompute.sim.conditions import Conditions, from_json
from shardcompute.sim.forwarding import Forwarding
from shardcompute.sim.leftovers import remove_namespace
from shardcompute.sim.taps import open_tap, sharpen_timers

MAC_PREFIX = bytes((0x02, 0x5C, 0, 0, 0))
_MOST_BYTES = 65535
_BURST = 64
_PRIORITY = -10


class Setup(Struct, frozen=True):
    """The devices of the machines, in the order of the conditions."""

    namespaces: tuple[str, ...]
    device: str
    conditions: Conditions


class SwitchReply(Struct, frozen=True):
    is_ready: bool
    problem: str = ""


def mac_of(index: int) -> str:
    """The address of machine `index`: its last byte says who it is."""
    return ":".join(f"{byte:02x}" for byte in (*MAC_PREFIX, index + 1))


class Switch:
    def __init__(self, taps: list[int], conditions: Conditions, orders: int) -> None:
        self._taps = taps
        self._sources = {tap: index for index, tap in enumerate(taps)}
        self._forwarding = Forwarding(conditions)
        self._orders = orders
        self._unread = b""

    def run(self) -> None:
        """Until there are no more orders."""
        forwarding, taps = self._forwarding, self._taps
        watched = [*taps, self._orders]
        while True:
            next_s = forwarding.next_s()
            wait_s = None if next_s is None else max(0.0, next_s - time.monotonic())
            readable, _, _ = select.select(watched, [], [], wait_s)
            for descriptor in readable:
                if descriptor != self._orders:
                    self._read(descriptor)
                elif not self._obey():
                    return
            for target, packet in forwarding.release(time.monotonic()):
                with contextlib.suppress(OSError):
                    os.write(taps[target], packet)

    def _read(self, tap: int) -> None:
        source, take, count = self._sources[tap], self._forwarding.take, len(self._taps)
        for _ in range(_BURST):
            try:
                packet = os.read(tap, _MOST_BYTES)
            except BlockingIOError:
                return
            # Machines know each other's addresses; whatever else they try to reach is not there.
            if packet[:5] == MAC_PREFIX and 0 < packet[5] <= count:
                take(source, packet[5] - 1, packet, time.monotonic())

    def _obey(self) -> bool:
        """Carry out what came on stdin; False at its end."""
        read = os.read(self._orders, _MOST_BYTES)
        *lines, self._unread = (self._unread + read).split(b"\n")
        for line in lines:
            self._forwarding.reconfigure(from_json(line), time.monotonic())
            _reply(SwitchReply(is_ready=True))
        return bool(read)


def _reply(reply: SwitchReply) -> None:
    os.write(sys.stdout.fileno(), msgspec.json.encode(reply) + b"\n")


def _read_setup(orders: int) -> Setup:
    line = b""
    while not line.endswith(b"\n"):
        # Byte by byte: what follows is for the switch.
        byte = os.read(orders, 1)
        if not byte:
            raise SystemExit(2)
        line += byte
    return msgspec.json.decode(line, type=Setup)


def main() -> None:
    orders = sys.stdin.fileno()
    setup = _read_setup(orders)
    try:
        try:
            taps = [open_tap(namespace, setup.device) for namespace in setup.namespaces]
        except OSError as error:
            _reply(SwitchReply(is_ready=False, problem=f"{error.strerror or error}"))
            return
        with contextlib.suppress(psutil.Error):
            # A busy machine must not make the network look slower than it is.
            psutil.Process().nice(_PRIORITY)
        sharpen_timers()
        _reply(SwitchReply(is_ready=True))
        with contextlib.suppress(KeyboardInterrupt, BrokenPipeError):
            Switch(taps, setup.conditions, orders).run()
    finally:
        for namespace in setup.namespaces:
            remove_namespace(namespace)


if __name__ == "__main__":
    main()
