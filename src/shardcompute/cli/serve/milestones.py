"""Changes of a cluster between two looks at it, in lines for people."""

from __future__ import annotations

from collections.abc import Iterator

from shardcompute.control.state import Chain, ClusterState, Loading, Node
from shardcompute.weights.sources.disk import format_bytes

_STEPS = 4
"""How often a load is told of on its way."""


def milestones(before: ClusterState, after: ClusterState) -> list[str]:
    """Who came and went, what they fetch and hold, and which chains serve; nothing when all is as it was."""
    if after is before:
        return []
    lines: list[str] = []
    for id in sorted(after.nodes, key=lambda id: after.nodes[id].name):
        node = after.nodes[id]
        tell = _node_lines if node.can_work else _driver_lines
        lines += tell(before.nodes.get(id), node)
    for id in sorted(after.chains):
        lines += _chain_lines(before.chains.get(id), after.chains[id], after)
    return lines


def activity(state: ClusterState) -> str:
    """What is going on now, in one line; "" when nothing is."""
    loads = [
        f"{node.name} {_layers(load.start, load.stop)}: {load.fraction:.0%}"
        for node in sorted(state.nodes.values(), key=lambda node: node.name)
        if node.is_live
        for load in node.loading
    ]
    return ", ".join(loads)


def _node_lines(old: Node | None, node: Node) -> Iterator[str]:
    was_live = old is not None and old.is_live
    if not node.is_live:
        if was_live:
            yield f"{node.name} {_parting(node)}"
        return
    if old is None or not was_live or old.incarnation != node.incarnation:
        verb = "joined" if old is None else "is back"
        threads = f"{node.threads} thread{'s' if node.threads > 1 else ''}"
        yield f"{node.name} {verb}: {threads}, {format_bytes(node.memory_bytes)} of memory"
    if node.is_draining and old is not None and not old.is_draining:
        yield f"{node.name} is being relieved of its work"
    for load in node.loading:
        yield from _load_lines(old, node, load)
    held = set() if old is None or not was_live else set(old.shards)
    for shard in node.shards:
        if shard not in held:
            yield f"{node.name} holds {_layers(shard.start, shard.stop)} of {shard.model}"
    known = set() if old is None else {refusal.reason for refusal in old.refusals}
    for refusal in node.refusals:
        if refusal.reason not in known:
            yield f"{node.name} could not load {refusal.model}: {refusal.reason}"


def _parting(node: Node) -> str:
    if node.status == "gone":
        return "left"
    return f"is {node.status}: {node.status_reason}" if node.status_reason else f"is {node.status}"


def _driver_lines(old: Node | None, node: Node) -> Iterator[str]:
    was_live = old is not None and old.is_live
    if not node.is_live:
        if was_live:
            yield f"the driver {node.name} {_parting(node)}"
    elif not was_live:
        where = f", at {node.api_url}" if node.api_url else ""
        yield f"{node.name} {'joined' if old is None else 'is back'} as a driver{where}"


def _load_lines(old: Node | None, node: Node, load: Loading) -> Iterator[str]:
    place = (load.chain, load.start, load.stop)
    fractions = [] if old is None else [each.fraction for each in old.loading if _place(each) == place]
    if not fractions:
        yield f"{node.name} fetches {_layers(load.start, load.stop)}"
    elif int(load.fraction * _STEPS) > int(fractions[0] * _STEPS):
        done = "fetched, loading" if load.fraction >= 1 else f"{load.fraction:.0%} fetched"
        yield f"{node.name} {_layers(load.start, load.stop)}: {done}"


def _place(load: Loading) -> tuple[str, int, int]:
    return load.chain, load.start, load.stop


def _chain_lines(old: Chain | None, chain: Chain, state: ClusterState) -> Iterator[str]:
    is_same = old is not None and (old.status, old.epoch) == (chain.status, chain.epoch)
    if is_same or chain.status in ("planned", "loading", "retired"):
        return
    if chain.status == "ready":
        stages = " → ".join(
            f"{state.nodes[stage.node].name} ({stage.start}–{stage.stop - 1})" for stage in chain.stages
        )
        yield f"{chain.model} is served by {stages}"
    elif chain.status == "recovering":
        yield f"{chain.model} is being repaired" + (f": {chain.reason}" if chain.reason else "")
    else:
        yield f"{chain.model} cannot be served: {chain.reason}"


def _layers(start: int, stop: int) -> str:
    return f"layers {start} to {stop - 1}" if stop - start > 1 else f"layer {start}"
