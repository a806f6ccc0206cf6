"""Story of a worker, in lines for whoever started it: measured, in the cluster, fetching, at work; then quiet until
something happens. And of a cluster, as far as its history does not tell it: how far its machines are with fetching.

What is only of use to those who look for a fault is in the log.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardcompute.core.units import count_of, format_bytes, name_layers

if TYPE_CHECKING:
    from shardcompute.control.state import ClusterState, Node
    from shardcompute.node.worker.worker import WorkerShard, WorkerView

_STEPS = 4
"""How often a fetch is told of on its way."""


def opening(view: WorkerView) -> str:
    """What this machine offers."""
    speed = "" if view.seconds_per_byte <= 0 else f", {format_bytes(1 / view.seconds_per_byte)}/s of weights"
    power = view.device.label if view.device.is_gpu else count_of(view.threads, "thread")
    return f"measured: {power}, {format_bytes(view.memory_bytes)} of memory{speed}"


def next_lines(before: WorkerView, after: WorkerView) -> list[str]:
    """What happened between two looks at a worker; nothing when all is as it was."""
    return [
        *_link_lines(before, after),
        *_rest_lines(before, after),
        *_fetch_lines(before, after),
        *_shard_lines(before, after),
    ]


def activity_line(view: WorkerView) -> str:
    """What is going on now; "" when nothing is."""
    return ", ".join(f"fetching {_name(each)}: {each.fraction:.0%}" for each in view.loading)


def _link_lines(before: WorkerView, after: WorkerView) -> list[str]:
    if after.is_registered and not before.is_registered:
        waiting = "" if after.held or after.loading else "; waiting for work"
        return [f"{'back in' if before.was_registered else 'in'} the cluster{waiting}"]
    if before.is_registered and not after.is_registered:
        return ["the coordinator is out of reach; trying again"]
    return []


def _rest_lines(before: WorkerView, after: WorkerView) -> list[str]:
    if after.rest_reason == before.rest_reason:
        return []
    return [
        f"resting: {after.rest_reason}" if after.rest_reason else "working again, as the cluster needs it"
    ]


def _fetch_lines(before: WorkerView, after: WorkerView) -> list[str]:
    known = {each.place: each.fraction for each in before.loading}
    lines = []
    for each in after.loading:
        last = known.get(each.place)
        if last is None:
            lines.append(f"fetching {_name(each)}")
        elif int(each.fraction * _STEPS) > int(last * _STEPS) and each.fraction < 1:
            lines.append(f"fetching {_name(each)}: {each.fraction:.0%}")
    if after.problem and after.problem != before.problem:
        lines.append(after.problem)
    return lines


def _shard_lines(before: WorkerView, after: WorkerView) -> list[str]:
    known = {each.place: each.is_at_work for each in before.held}
    lines = []
    for each in after.held:
        was_at_work = known.pop(each.place, None)
        if each.is_at_work and not was_at_work:
            lines.append(f"{_name(each)}: at work")
        elif was_at_work is None:
            lines.append(f"{_name(each)}: loaded, standing by")
    gone = [each for each in before.held if each.place in known]
    return lines + [f"{_name(each)}: not needed here any more" for each in gone]


def _name(shard: WorkerShard) -> str:
    return f"{name_layers(shard.start, shard.stop)} of {shard.model}"


def progress_lines(before: ClusterState, after: ClusterState) -> list[str]:
    """Loads of a cluster's machines that have come another quarter further between two looks."""
    lines = []
    for node in _by_name(after):
        former = before.nodes.get(node.id)
        loads = () if former is None else former.loading
        known = {(load.chain, load.start, load.stop): load.fraction for load in loads}
        for load in node.loading:
            last = known.get((load.chain, load.start, load.stop))
            if last is not None and int(load.fraction * _STEPS) > int(last * _STEPS):
                done = "fetched, loading" if load.fraction >= 1 else f"{load.fraction:.0%} fetched"
                lines.append(f"{node.name} {name_layers(load.start, load.stop)}: {done}")
    return lines


def activity(state: ClusterState) -> str:
    """What a cluster's machines are fetching now, in one line; "" when they are not."""
    loads = [
        f"{node.name} {name_layers(load.start, load.stop)}: {load.fraction:.0%}"
        for node in _by_name(state)
        if node.is_live
        for load in node.loading
    ]
    return ", ".join(loads)


def _by_name(state: ClusterState) -> list[Node]:
    return sorted(state.nodes.values(), key=lambda node: (node.name, node.id))
