"""Scenario files: which machines and lines there are, who comes and goes, what is asked, and what is written down.

A scenario is TOML; `docs/scale.md` explains it and `bench/scenarios` has examples. Everything that varies is a
`Distribution`, and everything that is drawn comes from `seed`: the same file gives the same answer. A file with
`[[variants]]` is as many scenarios, each with some fields of its own.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from shardcompute.control.policy import HealthPolicy, PlacementPolicy
from shardcompute.core.errors import SourceError, UsageError
from shardcompute.simulator.distributions import Distribution, Drawn, draw_from

Seconds = Annotated[float, Meta(ge=0, le=1e8)]
Positive = Annotated[float, Meta(gt=0, le=1e9)]
Count = Annotated[int, Meta(ge=1, le=1_000_000)]
Share = Annotated[float, Meta(ge=0, le=1)]
FaultKind = Literal["kill", "silence", "leave", "slow"]
_HINT = "docs/scale.md lists the fields; bench/scenarios has examples"


class _ScenarioTable(Struct, frozen=True, forbid_unknown_fields=True):
    """A table of the file: a field that nobody knows is an error."""


class ModelTerms(_ScenarioTable, frozen=True, kw_only=True):
    """The model that is served, by its sizes."""

    name: str = "model"
    layers: Annotated[int, Meta(ge=1, le=1000)]
    layer_mb: Positive
    embedding_mb: Annotated[float, Meta(ge=0)] = 0.0
    head_mb: Annotated[float, Meta(ge=0)] = 0.0
    hidden: Count
    kv_bytes_per_token_and_layer: Annotated[int, Meta(ge=0)] = 0
    kv_tokens: Count = 32_768
    context_length: Count = 8192
    chains: Count = 1


class Day(_ScenarioTable, frozen=True, kw_only=True):
    """Owners use their machines at some hours, and let them work at the others."""

    length_s: Positive = 86_400.0
    rests_from: Share = 0.33
    rests_to: Share = 0.75
    """Parts of the day."""
    spread: Share = 0.05
    """By up to so much of a day owners differ."""
    grace_s: Seconds = 30.0
    """So long after it was asked to rest a machine works on, for others to take over."""


class MachineTerms(_ScenarioTable, frozen=True, kw_only=True):
    """Machines of one kind."""

    count: Count = 1
    memory_gb: Distribution
    read_gb_per_s: Distribution
    """Weights that it reads each second to compute one row: its speed."""
    overhead_ms: Distribution = 0.0
    row_factor: Distribution = 0.25
    """What each further row of a step costs beside the first."""
    prefill_factor: Distribution = 0.2
    """What a row of a prompt costs beside a single one."""
    region: str = ""
    access_ms: Distribution = 0.2
    """Half of its part of a round trip: to the line's other end and back."""
    uplink_mbit: Distribution = 1000.0
    downlink_mbit: Distribution = 1000.0
    joins_s: Distribution = 0.0
    is_standby: bool = False
    life_s: Distribution | None = None
    """How long it stays before it fails; nothing: for ever."""
    down_s: Distribution = 300.0
    silent_share: Share = 0.3
    """Of failures, those that nobody is told of: power and lines, not processes."""
    leaving_share: Share = 0.0
    """Of failures, those that are none: it says that it leaves, and is relieved."""
    day: Day | None = None


class NetworkTerms(_ScenarioTable, frozen=True, kw_only=True):
    regions: tuple[str, ...] = ()
    rtt_ms: tuple[tuple[float, ...], ...] = ()
    """Between regions; without regions the machines' own part is all."""
    coordinator_region: str = ""
    coordinator_access_ms: Seconds = 0.1
    coordinator_mbit: Positive = 1000.0
    noise: Share = 0.05
    """The spread of the logarithm of what is measured."""
    probed_peers: Annotated[int, Meta(ge=-1)] = -1
    """Whom a machine that joins measures its links to, besides the coordinator; -1: everybody, as workers do."""


class LoadTerms(_ScenarioTable, frozen=True, kw_only=True):
    """Who asks: `streams` clients, each with its next request as soon as it has its answer, or `per_s` requests."""

    streams: Annotated[int, Meta(ge=0, le=1_000_000)] = 0
    rounds: Annotated[int, Meta(ge=0)] = 0
    """So many requests of each client; 0: without end."""
    per_s: Annotated[float, Meta(ge=0)] = 0.0
    day_swing: Share = 0.0
    """By so much more, or less, is asked at the height and depth of a day."""
    begins_s: Seconds = 0.0
    think_s: Distribution = 0.0
    prompt_tokens: Distribution = 32
    answer_tokens: Distribution = 64
    patience_s: Positive = 600.0
    """So long a client waits for its next token."""


class DriverTerms(_ScenarioTable, frozen=True, kw_only=True):
    max_sessions: Count = 64
    chunk_rows: Count = 512
    shared_rows: Count = 64
    activation_bytes: Count = 4
    hop_ms: Seconds = 0.3
    """Of each hop besides the line: framing, copies, threads."""
    shared_cores: Annotated[int, Meta(ge=0, le=4096)] = 0
    """All machines, and who asks, are processes of one computer with so many cores, as in benchmarks of one; 0: each
    machine is one of its own."""
    token_ms: Seconds = 0.0
    """What a picked token takes in the driver and the API, one after the other."""
    answer_ms: Seconds = 0.0
    """From a client to the driver and back, once for each request."""


class ControlTerms(_ScenarioTable, frozen=True, kw_only=True):
    turn_s: Seconds = 0.0
    """How long one turn of the coordinator takes at least: what happens meanwhile waits."""
    tick_s: Positive = 0.1
    """So often it looks while a machine is in doubt."""
    calm_tick_s: Positive = 1.0
    """So often while none is, and nothing happens."""
    notice_ms: Seconds = 20.0
    """Until the end of a process is noticed by its links."""
    answer_timeout_s: Seconds = 5.0
    """How long a stage that says nothing is waited for while a chain is connected."""
    connect_ms: Seconds = 5.0
    """To tell the stages of a chain their places, besides the lines."""
    open_s: Seconds = 0.5
    """To open layers that are there."""
    origin_mbit: Positive = 1000.0
    """Of the source of all weights."""
    has_weights: bool = False
    """Every machine has all weights on its disk from the beginning, so that nothing needs to be fetched."""
    served_every_s: Positive = 60.0
    """So often machines tell what steps take."""
    search_steps: Annotated[int, Meta(ge=0)] = 200
    """How long a layout is searched for in the background; 0: not at all, and nothing is found."""
    health: HealthPolicy = HealthPolicy()
    placing: PlacementPolicy = PlacementPolicy()


class PlannedFault(_ScenarioTable, frozen=True, kw_only=True):
    """Something that happens at a stated time: to a machine by its number, or to a stage of the first chain. A machine
    that is killed, silent or has left comes back after `lasts_s`."""

    at_s: Seconds
    kind: FaultKind
    machine: int | None = None
    stage: int | None = None
    factor: Positive = 3.0
    """By how much a slow one is slower."""
    lasts_s: Positive = 1e8


class Comparison(_ScenarioTable, frozen=True, kw_only=True):
    """A figure of the outcome beside one that was measured."""

    figure: str
    file: str = ""
    """JSON, beside the scenario."""
    rows: str = "results"
    """The list in it."""
    where: dict[str, str | float | int | bool] = {}
    field: str = "value"
    measured: float | None = None
    """The figure itself, where it is in no file."""
    remark: str = ""


class Scenario(_ScenarioTable, frozen=True, kw_only=True):
    name: str
    description: str = ""
    seed: int = 1
    duration_s: Positive
    warm_up_s: Seconds = 0.0
    """What happens before counts for nothing but lost tokens."""
    scale: Annotated[int, Meta(ge=1, le=100_000)] = 1
    """So many times as many machines as the tables say."""
    stride: Annotated[int, Meta(ge=1, le=1024)] = 1
    """So many tokens of a stream are one event. More than 1 is quicker and coarser."""
    model: ModelTerms
    machines: Annotated[tuple[MachineTerms, ...], Meta(min_length=1)]
    network: NetworkTerms = NetworkTerms()
    load: tuple[LoadTerms, ...] = ()
    driver: DriverTerms = DriverTerms()
    control: ControlTerms = ControlTerms()
    faults: tuple[PlannedFault, ...] = ()
    compare: tuple[Comparison, ...] = ()

    @property
    def machine_count(self) -> int:
        return self.scale * sum(kind.count for kind in self.machines)


def load_scenarios(path: Path) -> list[Scenario]:
    """SourceError where the file cannot be read, UsageError where it is no scenario."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SourceError(f"cannot read {path}: {error}", hint="check the file's name") from error
    return parse_scenarios(path.name, text)


def parse_scenarios(name: str, text: str) -> list[Scenario]:
    """A scenario, or one for each `[[variants]]`, whose tables replace fields of the file's own. UsageError where the
    text is none, saying which field is wrong."""
    try:
        file = tomllib.loads(text)
        variants = file.pop("variants", [{}])
        if not isinstance(variants, list) or not all(isinstance(each, dict) for each in variants):
            raise UsageError(f"variants of the scenario {name!r} are no tables", hint="write [[variants]]")
        return [_checked(name, _merged(file, variant)) for variant in variants]
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"the scenario {name!r} is no TOML: {error}", hint=_HINT) from error


def _merged(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Tables are merged; lists and values are replaced."""
    both = {
        key: _merged(base[key], value)
        if isinstance(base.get(key), dict) and isinstance(value, dict)
        else value
        for key, value in changes.items()
    }
    return {**base, **both}


def _checked(name: str, file: dict[str, Any]) -> Scenario:
    try:
        scenario = msgspec.convert(file, Scenario, strict=True)
    except msgspec.ValidationError as error:
        raise UsageError(f"the scenario {name!r} cannot be read: {error}", hint=_HINT) from error
    for problem in (_region_problem(scenario), _fault_problem(scenario), _compare_problem(scenario)):
        if problem:
            raise UsageError(f"the scenario {name!r} is inconsistent: {problem}", hint=_HINT)
    _check_distributions(scenario)
    return scenario


def _region_problem(scenario: Scenario) -> str:
    network = scenario.network
    count = len(network.regions)
    if len(network.rtt_ms) != count or any(len(row) != count for row in network.rtt_ms):
        return f"network.rtt_ms must have {count} rows of {count} numbers, one for each region"
    for a in range(count):
        for b in range(count):
            if network.rtt_ms[a][b] != network.rtt_ms[b][a] or network.rtt_ms[a][b] < 0:
                return f"network.rtt_ms between {network.regions[a]} and {network.regions[b]} is not one time"
    named = {kind.region for kind in scenario.machines} | {network.coordinator_region}
    unknown = sorted(named - set(network.regions) - {""})
    if unknown:
        return f"no region is called {unknown[0]!r}"
    if count and "" in named:
        return "with regions every kind of machine, and the coordinator, must be in one"
    return ""


def _fault_problem(scenario: Scenario) -> str:
    for fault in scenario.faults:
        if (fault.machine is None) == (fault.stage is None):
            return "a fault needs either a machine or a stage"
        if fault.machine is not None and not 0 <= fault.machine < scenario.machine_count:
            return f"there is no machine {fault.machine}: they count from 0 to {scenario.machine_count - 1}"
    for load in scenario.load:
        if (load.streams > 0) == (load.per_s > 0):
            return "a load needs either streams or per_s"
    return ""


def _compare_problem(scenario: Scenario) -> str:
    for each in scenario.compare:
        if (each.measured is None) == (not each.file):
            return f"what {each.figure} is compared with needs either a file or `measured`"
    return ""


def _check_distributions(scenario: Scenario) -> None:
    """All of them are tried once, so that a run does not end at the first machine that is drawn late."""
    least = {"read_gb_per_s": 1e-6, "memory_gb": 1e-6, "uplink_mbit": 1e-6, "downlink_mbit": 1e-6}
    tables = [*((f"machines.{i}", kind) for i, kind in enumerate(scenario.machines))]
    for where, table in [*tables, *((f"load.{i}", load) for i, load in enumerate(scenario.load))]:
        for field in table.__struct_fields__:
            value = getattr(table, field)
            if isinstance(value, Drawn):
                draw_from(f"{where}.{field}", value, least.get(field, 0.0))
            elif field in least:
                draw_from(f"{where}.{field}", float(value), least[field])
