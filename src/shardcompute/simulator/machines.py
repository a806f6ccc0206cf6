"""Machines and lines of a simulation, as they truly are: what the coordinator believes of them it has to measure.

A machine's part of a round trip is its own (`access_s`), what lies between two regions comes on top. Times of steps
follow the terms that placement plans by (`cost_model`), and add what it leaves out: rows beyond the first, prompts, and
machines that become slower.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from shardcompute.control.sizes import Sizes
from shardcompute.control.state import Holding, Shard
from shardcompute.simulator.distributions import Distribution, Draw, draw_from
from shardcompute.simulator.scenario import Day, MachineTerms, NetworkTerms, Scenario

_MBIT = 125_000.0
HOME = "driver"
"""Where the coordinator and its driver are."""


@dataclass(frozen=True, slots=True)
class MachineLine:
    """What connects a machine with all others."""

    region: int
    access_s: float
    up_bytes_per_s: float
    down_bytes_per_s: float


@dataclass(frozen=True, slots=True)
class Rows:
    """What a step computes: one row each of sessions that answer, and rows of prompts."""

    answering: int
    prompt: int
    picked: int
    """Rows after which a token is picked."""

    @property
    def total(self) -> int:
        return self.answering + self.prompt


@dataclass(slots=True)
class SimulatedMachine:
    """One machine: what it is, and what became of it."""

    id: str
    kind: MachineTerms
    line: MachineLine
    memory_bytes: int
    seconds_per_byte: float
    overhead_s: float
    row_factor: float
    prefill_factor: float
    joins_s: float
    beat_phase_s: float
    day: Day | None
    day_shift_s: float
    draw_life: Draw | None
    draw_down: Draw
    rng: random.Random
    is_up: bool = False
    """Its process runs."""
    is_silent: bool = False
    """Nothing of it gets through, whether it runs or not."""
    is_resting: bool = False
    slowdown: float = 1.0
    incarnation: int = 0
    up_since_s: float = 0.0
    up_s: float = 0.0
    cached: tuple[Holding, ...] = ()
    """What is on its disk; it outlives its process."""
    shards: list[Shard] = field(default_factory=list)

    @property
    def answers(self) -> bool:
        return self.is_up and not self.is_silent

    def last_beat_s(self, now_s: float, interval_s: float) -> float:
        """When it sent its newest heartbeat."""
        return now_s - math.fmod(now_s - self.beat_phase_s + interval_s, interval_s)

    def step_s(self, sizes: Sizes, start: int, stop: int, rows: Rows) -> float:
        """How long it computes these layers for such a step."""
        layers_bytes = sizes.work_before[stop] - sizes.work_before[start]
        head_bytes = sizes.work_bytes(start, stop) - layers_bytes
        if rows.answering:
            passes = 1 + self.row_factor * (rows.answering - 1) + self.prefill_factor * rows.prompt
        else:
            passes = max(1.0, self.prefill_factor * rows.prompt)
        picks = 1 + self.row_factor * (rows.picked - 1) if rows.picked else 0.0
        read_bytes = layers_bytes * passes + head_bytes * picks
        return self.slowdown * (self.overhead_s + self.seconds_per_byte * read_bytes)


class Lines:
    """How far machines are from each other, and what their lines carry."""

    def __init__(self, network: NetworkTerms, machines: Sequence[SimulatedMachine]) -> None:
        self._between_s = [[rtt / 1000 for rtt in row] for row in network.rtt_ms] or [[0.0]]
        rate = network.coordinator_mbit * _MBIT
        home = MachineLine(
            _region(network, network.coordinator_region), network.coordinator_access_ms / 1000, rate, rate
        )
        self._lines = {HOME: home, **{machine.id: machine.line for machine in machines}}

    def rtt_s(self, a: str, b: str) -> float:
        if a == b:
            return 0.0
        one, other = self._lines[a], self._lines[b]
        return 2 * (one.access_s + other.access_s) + self._between_s[one.region][other.region]

    def bytes_per_s(self, a: str, b: str) -> float:
        return min(self._lines[a].up_bytes_per_s, self._lines[b].down_bytes_per_s)

    def hop_s(self, a: str, b: str, size_bytes: float) -> float:
        """One way, for so many bytes."""
        return 0.0 if a == b else self.rtt_s(a, b) / 2 + size_bytes / self.bytes_per_s(a, b)


def draw_machines(scenario: Scenario, rng: random.Random) -> list[SimulatedMachine]:
    """All machines of a scenario, each with a generator of its own: what befalls one does not change the others."""
    machines: list[SimulatedMachine] = []
    for number, kind in enumerate(scenario.machines):
        drawers = {
            name: _drawer(number, kind, name)
            for name in (
                "memory_gb",
                "read_gb_per_s",
                "overhead_ms",
                "row_factor",
                "prefill_factor",
                "access_ms",
                "uplink_mbit",
                "downlink_mbit",
                "joins_s",
                "down_s",
            )
        }
        life = None if kind.life_s is None else draw_from(f"machines.{number}.life_s", kind.life_s)
        for _ in range(scenario.scale * kind.count):
            own = random.Random(rng.getrandbits(64))
            values = {name: draw(own) for name, draw in drawers.items() if name != "down_s"}
            id = f"m{len(machines):05d}"
            machines.append(_machine(scenario, id, kind, values, life, drawers["down_s"], own))
    return machines


def _drawer(number: int, kind: MachineTerms, name: str) -> Draw:
    given: Distribution = getattr(kind, name)
    return draw_from(f"machines.{number}.{name}", given)


def _machine(
    scenario: Scenario,
    id: str,
    kind: MachineTerms,
    values: dict[str, float],
    life: Draw | None,
    down: Draw,
    rng: random.Random,
) -> SimulatedMachine:
    return SimulatedMachine(
        id=id,
        kind=kind,
        line=MachineLine(
            _region(scenario.network, kind.region),
            values["access_ms"] / 1000,
            values["uplink_mbit"] * _MBIT,
            values["downlink_mbit"] * _MBIT,
        ),
        memory_bytes=int(values["memory_gb"] * 1e9),
        seconds_per_byte=1 / (values["read_gb_per_s"] * 1e9),
        overhead_s=values["overhead_ms"] / 1000,
        row_factor=values["row_factor"],
        prefill_factor=values["prefill_factor"],
        joins_s=values["joins_s"],
        beat_phase_s=rng.uniform(0, scenario.control.health.heartbeat_interval_s),
        day=kind.day,
        day_shift_s=0.0 if kind.day is None else rng.uniform(-1, 1) * kind.day.spread * kind.day.length_s,
        draw_life=life,
        draw_down=down,
        rng=rng,
    )


def _region(network: NetworkTerms, name: str) -> int:
    return network.regions.index(name) if name else 0
