"""Topology of a network: regions, how far they are from each other, and the lines of the machines in them.

A topology is a small TOML file:

    description = "Four homes on two continents."
    regions = ["berlin", "paris", "boston", "denver"]
    rtt_ms = [[2, 18, 95, 125], [18, 2, 85, 115], [95, 85, 2, 45], [125, 115, 45, 2]]
    uplink_mbit = [40, 100, 100, 20]     # one number for all regions, or a list with one for each
    downlink_mbit = 200
    queue_ms = 100                       # a line's buffer: what waits longer is dropped
    jitter_ms = 2                        # up to so much is added to the delay of each packet
    loss = 0.001                         # the fraction of packets that vanish on their way out of a region

`rtt_ms` is symmetric; its diagonal is the round trip between two machines of one region. Jitter never changes
the order of packets between two machines.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from shardcompute.core.errors import SourceError, UsageError

_SUFFIX = ".toml"
_NEAR_MS = 1.0
Positive = Annotated[float, Meta(gt=0, le=1e6)]
Milliseconds = Annotated[float, Meta(ge=0, le=60_000)]
Fraction = Annotated[float, Meta(ge=0, lt=1)]


@dataclass(frozen=True, slots=True)
class Region:
    """Where machines are, and the line that each of them has there."""

    name: str
    uplink_mbit: float
    downlink_mbit: float
    queue_ms: float
    jitter_ms: float
    loss: float


@dataclass(frozen=True, slots=True)
class Topology:
    name: str
    description: str
    regions: tuple[Region, ...]
    rtt_ms: tuple[tuple[float, ...], ...]

    def region_of(self, index: int) -> int:
        """Machines are spread over the regions in turn: which region has machine `index`."""
        return index % len(self.regions)


class _File(Struct, forbid_unknown_fields=True):
    regions: Annotated[list[str], Meta(min_length=1, max_length=64)]
    rtt_ms: list[list[Milliseconds]]
    uplink_mbit: Positive | list[float]
    downlink_mbit: Positive | list[float]
    description: str = ""
    queue_ms: Milliseconds | list[float] = 100.0
    jitter_ms: Milliseconds | list[float] = 0.0
    loss: Fraction | list[float] = 0.0


def parse_topology(name: str, text: str) -> Topology:
    """UsageError where the text is no topology, saying which field is wrong."""
    hint = "see `shardcompute.sim.topology` for the fields and their units"
    try:
        file = msgspec.toml.decode(text, type=_File)
    except (msgspec.DecodeError, ValueError) as error:
        raise UsageError(f"the topology {name!r} cannot be read: {error}", hint=hint) from error
    problem = _check_shape(file)
    if problem:
        raise UsageError(f"the topology {name!r} is inconsistent: {problem}", hint=hint)
    count = len(file.regions)
    columns = {
        field: _spread(name, field, getattr(file, field), count, bound, hint)
        for field, bound in (
            ("uplink_mbit", Positive),
            ("downlink_mbit", Positive),
            ("queue_ms", Milliseconds),
            ("jitter_ms", Milliseconds),
            ("loss", Fraction),
        )
    }
    regions = tuple(
        Region(region, **{field: values[index] for field, values in columns.items()})
        for index, region in enumerate(file.regions)
    )
    return Topology(name, file.description, regions, tuple(tuple(row) for row in file.rtt_ms))


def topology_names() -> list[str]:
    """The topologies that come with this release."""
    return sorted(
        entry.name.removesuffix(_SUFFIX)
        for entry in resources.files("shardcompute.sim").joinpath("topologies").iterdir()
        if entry.name.endswith(_SUFFIX)
    )


def load_topology(reference: str) -> Topology:
    """A topology by the name of one that is shipped, or from a .toml file."""
    if reference in topology_names():
        shipped = resources.files("shardcompute.sim").joinpath("topologies", reference + _SUFFIX)
        return parse_topology(reference, shipped.read_text(encoding="utf-8"))
    path = Path(reference)
    if path.suffix != _SUFFIX:
        raise UsageError(
            f"no topology is called {reference!r}",
            hint=f"use one of {', '.join(topology_names())}, or a {_SUFFIX} file",
        )
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SourceError(f"cannot read {path}: {error}", hint="check the file's name") from error
    return parse_topology(path.stem, text)


def ring_topology(machines: int, ring_ms: float, mbit: float, *, queue_ms: float = 100.0) -> Topology:
    """Homes at equal distances: once round all of them, one way after the other, takes `ring_ms`."""
    if machines < 2 or ring_ms < 0 or mbit <= 0:
        raise UsageError(
            f"no ring has {machines} machines, {ring_ms:g} ms and {mbit:g} Mbit/s",
            hint="give at least two machines, a time of 0 or more and a rate above 0",
        )
    rtt = 2 * ring_ms / machines
    near = min(_NEAR_MS, rtt)
    return Topology(
        f"ring-{ring_ms:g}ms",
        f"{machines} homes with {mbit:g} Mbit/s; once round the ring takes {ring_ms:g} ms.",
        tuple(Region(f"home-{n + 1}", mbit, mbit, queue_ms, 0.0, 0.0) for n in range(machines)),
        tuple(tuple(near if a == b else rtt for b in range(machines)) for a in range(machines)),
    )


def _check_shape(file: _File) -> str:
    count = len(file.regions)
    if len(set(file.regions)) < count:
        return "two regions have the same name"
    if len(file.rtt_ms) != count or any(len(row) != count for row in file.rtt_ms):
        return f"rtt_ms must have {count} rows of {count} numbers, one for each region"
    for a in range(count):
        for b in range(a):
            if file.rtt_ms[a][b] != file.rtt_ms[b][a]:
                names = f"{file.regions[a]} and {file.regions[b]}"
                return f"the round trip between {names} is given as {file.rtt_ms[a][b]:g} and {file.rtt_ms[b][a]:g} ms"
    return ""


def _spread(
    name: str, field: str, value: float | list[float], count: int, bound: object, hint: str
) -> list[float]:
    """One number for each region."""
    values = value if isinstance(value, list) else [value] * count
    if len(values) != count:
        raise UsageError(
            f"the topology {name!r} is inconsistent: {field} has {len(values)} numbers for {count} regions",
            hint=hint,
        )
    try:
        return [msgspec.convert(each, type=bound) for each in values]
    except msgspec.ValidationError as error:
        raise UsageError(f"the topology {name!r} cannot be read: {error} - in {field}", hint=hint) from error
