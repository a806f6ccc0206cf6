"""Text views of a cluster, in words and rows of characters; from views alone, so that what is shown can be tested."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from shardcompute.cli.console import aligned, wrapped
from shardcompute.core.units import count_of, format_bytes, format_rate, format_seconds

if TYPE_CHECKING:
    from shardcompute.node.admin.views import (
        ChainView,
        ClusterView,
        CoordinatorView,
        DriverView,
        FetchView,
        LinkView,
        MemoryParts,
        ModelView,
        NodeView,
        PlannedStage,
        PlanView,
        SpeedView,
        StageView,
    )
    from shardcompute.node.telemetry.history_store import EventView

_ID_SHOWN = 12
_NODE_HEADINGS = ("NAME", "ID", "STATUS", "DEVICE", "MEMORY", "LAYERS")
_MEMORY_HEADINGS = (
    "MACHINE",
    "LAYERS",
    "HELD WEIGHTS",
    "SCRATCH",
    "KV RESERVED",
    "PROCESS",
    "OTHER MODELS",
    "TOTAL",
    "OF",
)
_DEVICE = 3
_NARROWER: Sequence[tuple[Sequence[int], bool]] = (
    ((0, 1, 2, _DEVICE, 4, 5), False),
    ((0, 2, _DEVICE, 4, 5), False),
    ((0, 2, _DEVICE, 4, 5), True),
    ((0, 2, 4, 5), False),
    ((0, 2, 4, 5), True),
)
"""Columns of the table of nodes for windows that get narrower, and whether memory is told in brief."""
_LEAST_TAIL = 8
_PLAIN_TAIL = 5
_WHOLE, _BRIEF, _CHAINS, _MODELS = 3, 2, 1, 0
"""How much is told of each model."""
_DOES = {"leads": "leads", "waits": "waits", "away": "is away"}


def describe_cluster(view: ClusterView, width: int = 100, height: int | None = None) -> list[str]:
    """One screen: who is there, what is served by whom, how busy it is.

    Of as many lines as it takes or, where that is more than `height`, with less and less of what matters least.
    """
    for detail in (_WHOLE, _BRIEF, _CHAINS, _MODELS):
        lines = _describe(view, width, detail)
        if height is None or len(lines) <= height:
            return lines
    return fit(lines, height)


def describe_watched(view: ClusterView, width: int = 100, height: int | None = None) -> list[str]:
    """`describe_cluster`, and below it what happened last: as much as there is room for, and a few lines in any case
    where the window has that many."""
    kept = 0 if height is None else min(_LEAST_TAIL, height // 3)
    lines = describe_cluster(view, width, None if height is None else height - kept)
    room = _PLAIN_TAIL if height is None else height - len(lines) - 2
    last = view.events[-room:] if room > 0 else ()
    return [*lines, "", "lately:", *map(describe_event, last)] if last else lines


def describe_event(event: EventView) -> str:
    return f"{_clock(event.at_s)}  {event.text}"


def _clock(at_s: float) -> str:
    """The time of this machine; the day too where it is not today."""
    at = time.localtime(at_s)
    is_today = at[:3] == time.localtime()[:3]
    return time.strftime("%H:%M:%S" if is_today else "%Y-%m-%d %H:%M:%S", at)


def _describe(view: ClusterView, width: int, detail: int) -> list[str]:
    lines = [_headline(view), _load_line(view), *(f"warning: {each}" for each in view.warnings)]
    lines += _coordinator_lines(view, is_brief=detail < _BRIEF)
    gap = [""] if detail > _CHAINS else []
    for model in view.models:
        lines += [*gap, *_describe_model(view, model, width, detail)]
    for fetch in view.fetches:
        lines += [*gap, describe_fetch(fetch)]
    if detail == _WHOLE:
        lines += _device_lines(view, width)
    if not view.models and not view.fetches:
        lines += ["", "no model is served; shardcompute load MODEL adds one"]
    return lines


def fit(lines: list[str], height: int | None) -> list[str]:
    """The first lines, and how many more there would have been."""
    if height is None or len(lines) <= height:
        return lines
    kept = max(height - 1, 1)
    return [
        *lines[:kept],
        f"… {count_of(len(lines) - kept, 'more line')}; a higher window or a pipe shows all",
    ]


def _headline(view: ClusterView) -> str:
    counts = Counter(node.status for node in view.nodes if node.status != "gone")
    nodes = ", ".join(f"{count} {status}" for status, count in counts.most_common()) or "none yet"
    return f"cluster {view.name} ({view.version}), nodes: {nodes}"


def _coordinator_lines(view: ClusterView, *, is_brief: bool) -> list[str]:
    """Who leads and who would; nothing where there is no other."""
    if not view.coordinators:
        return []
    if is_brief:
        counts = Counter(each.status for each in view.coordinators)
        told = (f"{count} {_DOES[status]}" for status, count in counts.items())
        return [f"coordinators: {', '.join(told)}"]
    return ["coordinators:", *(f"  {_describe_coordinator(each)}" for each in view.coordinators)]


def _describe_coordinator(coordinator: CoordinatorView) -> str:
    since = f" since {_clock(coordinator.since_s)}" if coordinator.since_s else ""
    where = f" at {coordinator.api_url}" if coordinator.api_url else ""
    return f"{coordinator.node[:_ID_SHOWN]}{where} {_DOES[coordinator.status]}{since}"


def _device_lines(view: ClusterView, width: int) -> list[str]:
    """GPUs that compute, and those that could."""
    live = [node for node in view.nodes if node.status not in ("gone", "lost") and node.role == "worker"]
    lines = [f"{node.name}: {describe_device(node)}" for node in live if node.device != "cpu"]
    trouble = [text for node in live for line in describe_trouble(node) for text in wrapped(line, width)]
    return ["", "devices:", *(f"  {line}" for line in lines), *trouble] if lines or trouble else []


def _load_line(view: ClusterView) -> str:
    load = view.load
    return (
        f"load: {load.running} running, {load.waiting} waiting, {format_rate(load.tokens_per_s)}, "
        f"KV used: {load.kv_used_fraction:.0%} of KV reserved"
    )


def _describe_model(view: ClusterView, model: ModelView, width: int, detail: int) -> Iterator[str]:
    chains = f"{model.ready_chains} of {count_of(model.wanted_chains, 'chain')}"
    yield (
        f"{model.name}: {model.status}, {chains} "
        f"({model.weight_form}, {count_of(model.layer_count, 'layer')}, "
        f"file {format_bytes(model.file_bytes)}; in memory {describe_parts(model.parts)})"
    )
    if model.is_kept:
        yield from wrapped("its layout is kept: only machines that fail, or are drained, are replaced", width)
    for reason in model.reasons:
        yield from wrapped(reason, width)
    if detail == _MODELS:
        return
    names = names_of(view)
    for chain in view.chains:
        if chain.model == model.name:
            yield from _describe_chain(chain, model.layer_count, names, width, detail)


def _describe_chain(
    chain: ChainView, layer_count: int, names: Mapping[str, str], width: int, detail: int
) -> Iterator[str]:
    one, many = chain.predicted_tokens_per_s_one_stream, chain.predicted_tokens_per_s_many
    expected = (
        "" if one is None or many is None else f", expect {format_rate(one)}, {format_rate(many)} for many"
    )
    reason = f" ({chain.reason})" if chain.status not in ("ready", "planned") and chain.reason else ""
    yield f"  {chain.id}: {chain.status}, epoch {chain.epoch}{expected}{reason}"
    if detail == _CHAINS:
        return
    yield f"  {draw_stages(chain.stages, layer_count, names, width - 2)}"
    if detail == _BRIEF:
        return
    for stage in chain.stages:
        yield from describe_ranks(stage, names)
    for standby in chain.standbys:
        yield f"  {standby.named(names)} stands by for layers {standby.start} to {standby.stop - 1}{_percent(standby)}"
    yield from wrapped(chain.bottleneck, width)
    yield from wrapped(chain.driver_host_reason, width)
    if chain.drafters:
        yield from wrapped(f"drafts: {'; '.join(each.text for each in chain.drafters)}", width)
    if chain.last_move:
        yield from wrapped(f"{'moving' if chain.is_moving else 'last move'}: {chain.last_move}", width)
    if chain.moves and chain.moves[0].outcome and chain.moves[0].outcome != chain.last_move:
        yield from wrapped(f"what came of it: {chain.moves[0].outcome}", width)
    if any(driver.node in names and driver.node != chain.driver_host for driver in chain.drivers):
        yield f"  drivers: {', '.join(_describe_driver(driver, names) for driver in chain.drivers)}"


def describe_ranks(stage: StageView, names: Mapping[str, str]) -> Iterator[str]:
    """Where a stage is computed by several: by which shares, and how long they wait for each other."""
    if not stage.ranks:
        return
    shares = ", ".join(f"{names.get(rank.node, rank.node)} {rank.weight}" for rank in stage.ranks)
    timing, told = stage.timing, ""
    if timing is not None and timing.exchange_s:
        told = (
            f"; {format_seconds(timing.exchange_s)} of {format_seconds(timing.compute_s)} a step exchanging"
        )
        told += f", mostly for {names.get(timing.slowest, timing.slowest)}" if timing.slowest else ""
    yield f"  layers {stage.start}-{stage.stop - 1} are computed together ({stage.exchange}): {shares}{told}"


def _describe_driver(driver: DriverView, names: Mapping[str, str]) -> str:
    far = (
        "not measured"
        if driver.round_trip_s is None
        else f"{1000 * driver.round_trip_s:.1f} ms round the chain"
    )
    return f"{names.get(driver.node, 'the coordinator')} ({far})"


def draw_stages(stages: Sequence[StageView], layer_count: int, names: Mapping[str, str], width: int) -> str:
    """A row that is cut where the layers are: `|--- laptop 0-13 ---|- desktop 14-29 -|`."""
    room = max(width - len(stages) - 1, 0)
    cells = []
    for stage in stages:
        size = room * stage.stop // layer_count - room * stage.start // layer_count
        label = f" {stage.named(names)} {stage.start}-{stage.stop - 1}{_percent(stage)} "
        cells.append(
            label[:size].center(size, "-") if len(label) <= size else label.strip()[:size].ljust(size)
        )
    return f"|{'|'.join(cells)}|"


def _percent(stage: StageView) -> str:
    # Rounded down: what is not ready must not look complete.
    return "" if stage.is_loaded else f" {int(100 * stage.fraction)}%"


def describe_fetch(fetch: FetchView) -> str:
    if fetch.status == "failed":
        return f"{fetch.model} could not be loaded: {fetch.error}"
    done = format_bytes(fetch.done_bytes)
    amount = f", {done} of {format_bytes(fetch.total_bytes)}" if fetch.total_bytes else ""
    return f"{fetch.model} is on its way: {fetch.doing}{amount}"


def describe_layers(node: NodeView) -> str:
    """What a node holds and what is coming; of a driver, where it is to be found."""
    if node.role == "driver":
        return f"driver at {node.api_url}" if node.api_url else "driver"
    parts = [f"{held.model} {held.start}-{held.stop - 1}" for held in node.layers]
    parts += [f"{each.start}-{each.stop - 1} loading {each.fraction:.0%}" for each in node.loading]
    # In a word; what exactly, and why, is said below the table.
    return ", ".join([*parts, *node.duty.split()[:1]]) or "-"


def names_of(view: ClusterView) -> dict[str, str]:
    return {node.id: node.name for node in view.nodes}


def describe_nodes(nodes: Sequence[NodeView], width: int) -> list[str]:
    """A table with a line per node; in a narrow window, of fewer columns, with GPUs below."""
    for columns, is_brief in _NARROWER:
        rows = [_node_row(node, is_brief=is_brief) for node in nodes]
        table = [[row[column] for column in columns] for row in (_NODE_HEADINGS, *rows)]
        lines = aligned(table).splitlines()
        if max(map(len, lines)) <= width:
            break
    if _DEVICE not in columns:
        gpus = [node for node in nodes if node.role == "worker" and node.device != "cpu"]
        lines += [f"{node.name}: {describe_device(node)}" for node in gpus]
    return lines


def mixed_chains(view: ClusterView) -> list[str]:
    """A line for each chain whose stages are of several exactness classes."""
    return [f"chain {chain.id} of {chain.model} {chain.exactness}" for chain in view.chains if chain.is_mixed]


def chosen_backends(view: ClusterView) -> list[str]:
    """A line for each model for which it was decided what computes it on CPUs."""
    return [
        f"{model.name} is computed by {model.backend} on CPUs: {model.backend_reason}"
        for model in view.models
        if model.backend_reason
    ]


def _memory_of(node: NodeView, *, is_brief: bool) -> str:
    """What is set aside (process, held weights, scratch, KV reserved), of what it offers, and what is resident now."""
    if is_brief:
        return f"{format_bytes(node.used_bytes)} of {format_bytes(node.memory_bytes)}"
    taken = f", resident {format_bytes(node.resident_bytes)}" if node.resident_bytes else ""
    return f"{format_bytes(node.used_bytes)} set aside of {format_bytes(node.memory_bytes)}{taken}"


def describe_device(node: NodeView) -> str:
    """On what it computes: `cuda:0 NVIDIA H200, 139.8 GiB`; on a CPU, with how many threads."""
    if node.device == "cpu":
        return f"cpu, {count_of(node.threads, 'thread')}"
    label = f" {node.device_label}" if node.device_label else ""
    memory = f", {format_bytes(node.device_bytes)}" if node.device_bytes else ""
    return f"{node.device}{label}{memory}"


def describe_fit(plan: PlanView) -> str:
    """In one line whether the model fits now, what is missing, how fast it would be."""
    chain = plan.chains[0]
    if chain.is_possible:
        machines = count_of(len({stage.node for stage in chain.stages}), "machine")
        return f"fits now on {machines}; expect {format_rate(chain.predicted_tokens_per_s_one_stream or 0.0)}"
    if plan.replaces:
        return f"fits if {', '.join(plan.replaces)} gives way"
    if chain.missing_bytes:
        return f"needs {format_bytes(chain.missing_bytes)} more memory than these machines have free"
    return f"does not fit: {'; '.join(chain.reasons)}"


def describe_memory(plan: PlanView) -> list[str]:
    """What a plan takes of each machine's memory, in columns that add up."""
    rows = [_memory_row(stage) for chain in plan.chains for stage in chain.stages]
    told = f"file: {format_bytes(plan.file_bytes)} of weights on disk and on the wire; in memory:"
    return [told, *aligned([_MEMORY_HEADINGS, *rows]).splitlines()] if rows else []


def _memory_row(stage: PlannedStage) -> tuple[str, ...]:
    parts = stage.parts
    counts = (
        parts.held_weights_bytes,
        parts.scratch_bytes,
        parts.kv_reserved_bytes,
        stage.process_bytes,
        stage.used_bytes,
        parts.total_bytes + stage.process_bytes + stage.used_bytes,
        stage.offered_bytes,
    )
    return (stage.name, f"{stage.start}-{stage.stop - 1}", *map(format_bytes, counts))


def describe_parts(parts: MemoryParts) -> str:
    """What memory is for, in the words of docs/memory.md."""
    return (
        f"{format_bytes(parts.held_weights_bytes)} held weights, {format_bytes(parts.scratch_bytes)} scratch, "
        f"{format_bytes(parts.kv_reserved_bytes)} KV reserved"
    )


def describe_speeds(nodes: Sequence[NodeView]) -> list[str]:
    """A line for each worker that is there: what was measured on it."""
    workers = [node for node in nodes if node.role == "worker" and node.status not in ("gone", "lost")]
    return [f"{node.name}: {describe_speed(node)}" for node in workers]


def describe_speed(node: NodeView) -> str:
    """With each model that is served, else without any, and when; or that it is guessed."""
    served = [speed for speed in node.speeds if speed.layer_count]
    if served:
        return "; ".join(_describe_served(speed) for speed in served)
    weights = (
        f"{format_bytes(node.weights_bytes_per_s)}/s of weights, {format_seconds(node.overhead_s)} a frame"
    )
    return (
        f"{weights}, probed{_when(node.probed_at_s)}" if node.probed_at_s else "speed not measured, guessed"
    )


def _describe_served(speed: SpeedView) -> str:
    prompts = speed.prefill_tokens_per_s
    prefill = (
        "" if prompts is None else f", prompts at {format_rate(prompts)} through all {speed.layer_count}"
    )
    how = "in service" if speed.source == "service" else "when loaded"
    return (
        f"{format_seconds(speed.layer_s)} a layer of {speed.model}{prefill}, "
        f"measured {how}{_when(speed.measured_at_s)}"
    )


def _when(at_s: float) -> str:
    """By this machine's clock; the day where that is not today."""
    if not at_s:
        return ""
    at = time.localtime(at_s)
    return f" {time.strftime('%H:%M' if at[:3] == time.localtime()[:3] else '%Y-%m-%d', at)}"


def describe_trouble(node: NodeView) -> list[str]:
    """What its machine could compute on and does not, each with the line that changes that; how it stands where it came
    without a token; and what a device says of its memory that cannot be."""
    lines = [
        f"{node.name}: {each.label} cannot be used, {each.problem}; {each.fix}"
        for each in node.unused_devices
    ]
    if node.standing:
        lines.append(f"{node.name}, which came without a token, is {node.standing}")
    return [*lines, *([f"{node.name}: {node.device_remark}"] if node.device_remark else [])]


def describe_detours(view: ClusterView) -> list[str]:
    """Links that go another way than to a node's address, and why."""
    detours = (link for link in view.links if link.is_open and link.rung not in ("direct", "local"))
    return [f"{_between(view, link)}: {_way(link)}" for link in detours]


def describe_links(view: ClusterView, width: int = 100) -> list[str]:
    """Every link: its way, round trip and speed, and why a better way failed."""
    rows = [
        (
            _between(view, link),
            link.rung if link.is_open else "closed",
            format_seconds(link.rtt_s) if link.is_open else "-",
            f"{format_bytes(int(link.bytes_per_s))}/s" if link.is_open else "-",
        )
        for link in view.links
    ]
    if not rows:
        return ["no link has been measured yet"]
    lines = aligned([("LINK", "WAY", "ROUND TRIP", "RATE"), *rows]).splitlines()
    return [*lines, *(part for line in describe_detours(view) for part in wrapped(line, width))]


def _between(view: ClusterView, link: LinkView) -> str:
    names = {node.id: node.name for node in view.nodes}
    return " and ".join(names.get(id, "the coordinator") for id in (link.a, link.b))


def _way(link: LinkView) -> str:
    return f"{link.rung}, {format_seconds(link.rtt_s)}" + (f" ({link.remark})" if link.remark else "")


def _node_row(node: NodeView, *, is_brief: bool = False) -> tuple[str, ...]:
    reason = f" ({node.status_reason})" if node.status_reason else ""
    standby = " standby" if node.is_standby else ""
    standing = f" {node.standing.partition(':')[0]}" if node.standing else ""
    return (
        node.name,
        node.id[:_ID_SHOWN],
        f"{node.status}{standby}{standing}{reason}",
        "-" if node.role == "driver" else describe_device(node),
        "-" if node.role == "driver" else _memory_of(node, is_brief=is_brief),
        describe_layers(node),
    )
