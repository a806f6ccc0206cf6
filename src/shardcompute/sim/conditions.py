"""Network conditions at this moment: the line of each machine, and the way from each machine to each other one.

`Conditions` is a complete value that travels as JSON to whoever emulates the network; a `Change` turns one into
the next. Nothing here knows how the emulation is done.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
from msgspec import Struct

from shardcompute.core.errors import UsageError
from shardcompute.sim.topology import Topology

_MBIT_BYTES = 1e6 / 8


class Port(Struct, frozen=True):
    """A machine's line to everybody else."""

    uplink_bytes_per_s: float
    downlink_bytes_per_s: float
    queue_s: float


class Path(Struct, frozen=True):
    """The way from one machine to another, lines excepted. Nothing passes while it `is_cut`."""

    delay_s: float
    jitter_s: float = 0.0
    loss: float = 0.0
    is_cut: bool = False


class Conditions(Struct, frozen=True):
    machines: tuple[str, ...]
    ports: tuple[Port, ...]
    """One for each machine."""
    paths: tuple[tuple[Path, ...], ...]
    """`paths[a][b]` leads from machine a to machine b."""

    def index(self, machine: str) -> int:
        try:
            return self.machines.index(machine)
        except ValueError:
            raise UsageError(
                f"there is no machine {machine!r} in this network",
                hint=f"its machines are {', '.join(self.machines)}",
            ) from None

    def path(self, source: str, target: str) -> Path:
        return self.paths[self.index(source)][self.index(target)]

    def port(self, machine: str) -> Port:
        return self.ports[self.index(machine)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """What is different from now on; None leaves a value as it is.

    Lines change for the named `machines` (none named: for all), and so do the paths that begin or end at them. With
    `between` only the two paths between two machines change, and no lines.
    """

    machines: tuple[str, ...] = ()
    between: tuple[str, str] | None = None
    uplink_mbit: float | None = None
    downlink_mbit: float | None = None
    queue_ms: float | None = None
    delay_ms: float | None = None
    jitter_ms: float | None = None
    loss: float | None = None
    is_cut: bool | None = None


def initial_conditions(topology: Topology, machines: Sequence[str]) -> Conditions:
    """`machines` in the regions of a topology, in turn."""
    if len(set(machines)) < len(machines) or not machines:
        raise UsageError("a network needs machines with names of their own", hint="name each machine once")
    regions = [topology.region_of(index) for index in range(len(machines))]
    ports = []
    for each in regions:
        region = topology.regions[each]
        ports.append(
            Port(region.uplink_mbit * _MBIT_BYTES, region.downlink_mbit * _MBIT_BYTES, region.queue_ms / 1e3)
        )
    paths = tuple(
        tuple(
            Path(
                topology.rtt_ms[a][b] / 2e3,
                topology.regions[a].jitter_ms / 1e3,
                topology.regions[a].loss,
            )
            for b in regions
        )
        for a in regions
    )
    return Conditions(tuple(machines), tuple(ports), paths)


def apply_change(conditions: Conditions, change: Change) -> Conditions:
    """UsageError for machines that are not there and values that cannot be."""
    _check(change)
    chosen = {conditions.index(name) for name in change.machines or conditions.machines}
    pair = None if change.between is None else {conditions.index(name) for name in change.between}
    ports = tuple(
        _changed_port(port, change) if index in chosen and pair is None else port
        for index, port in enumerate(conditions.ports)
    )
    paths = tuple(
        tuple(
            _changed_path(path, change) if _concerns(a, b, chosen, pair) else path
            for b, path in enumerate(row)
        )
        for a, row in enumerate(conditions.paths)
    )
    return Conditions(conditions.machines, ports, paths)


def _concerns(a: int, b: int, chosen: set[int], pair: set[int] | None) -> bool:
    if pair is not None:
        return a != b and {a, b} == pair
    return a in chosen or b in chosen


def _changed_port(port: Port, change: Change) -> Port:
    return Port(
        port.uplink_bytes_per_s if change.uplink_mbit is None else change.uplink_mbit * _MBIT_BYTES,
        port.downlink_bytes_per_s if change.downlink_mbit is None else change.downlink_mbit * _MBIT_BYTES,
        port.queue_s if change.queue_ms is None else change.queue_ms / 1e3,
    )


def _changed_path(path: Path, change: Change) -> Path:
    return Path(
        path.delay_s if change.delay_ms is None else change.delay_ms / 1e3,
        path.jitter_s if change.jitter_ms is None else change.jitter_ms / 1e3,
        path.loss if change.loss is None else change.loss,
        path.is_cut if change.is_cut is None else change.is_cut,
    )


def _check(change: Change) -> None:
    rates = (change.uplink_mbit, change.downlink_mbit)
    times = (change.queue_ms, change.delay_ms, change.jitter_ms)
    if any(rate is not None and not 0 < rate <= 1e6 for rate in rates):
        raise UsageError("a line's rate must be above 0 Mbit/s", hint="cut the path to stop all traffic")
    if any(time is not None and not 0 <= time <= 60_000 for time in times):
        raise UsageError("queue, delay and jitter must be from 0 to 60,000 ms", hint="give milliseconds")
    if change.loss is not None and not 0 <= change.loss < 1:
        raise UsageError(
            f"a loss of {change.loss:g} is no fraction", hint="0.01 is one in a hundred; cut the path for all"
        )


def to_json(conditions: Conditions) -> bytes:
    return msgspec.json.encode(conditions)


def from_json(text: bytes | str) -> Conditions:
    return msgspec.json.decode(text, type=Conditions)
