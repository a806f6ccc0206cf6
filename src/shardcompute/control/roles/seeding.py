"""Seeding: a machine that no chain has a use for keeps weights on its disk, and others fetch them from there.

Such a machine may be far too slow or too small to compute. It takes the layers that the fewest machines hold, as many
as its disk has room for, once everything that is wanted serves, from whoever computes nothing, and no faster than a
quarter of its line: nobody in a ring notices. Whoever has to load layers asks it before those who serve.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate

from msgspec.structs import replace

from shardcompute.control.actions import SeedWeights, Source
from shardcompute.control.events import Event, SeedChosen
from shardcompute.control.placement.place import Placement
from shardcompute.control.state import ClusterState, Holding, Model, Node, RequestedModel
from shardcompute.core.units import format_bytes, name_layers

_LEAST_BYTES_PER_S = 250_000.0
"""A line that is thinner helps nobody."""
_SHARE_OF_LINE = 0.25


def which_seed_is_wanted(state: ClusterState, now_s: float) -> Event | None:
    """The next machine that is to begin seeding, or to end it."""
    able = [node for node in state.nodes.values() if node.seed_bytes or node.seed is not None]
    if not able:
        return None
    busy = computing_nodes(state, has_standbys=True)
    served = _served(state)
    for node in sorted(able, key=lambda each: each.id):
        if node.seed is not None:
            if node.id in busy or node.status != "ready" or node.seed.model not in served:
                return SeedChosen(node.id, node.incarnation, None)
        elif _is_calm(state) and node.id not in busy and now_s >= node.seed_after_s:
            seed = choose_seed(state, node, served)
            if seed is not None:
                return SeedChosen(node.id, node.incarnation, seed)
    return None


def computing_nodes(state: ClusterState, *, has_standbys: bool = False) -> set[str]:
    """Who has a part in a chain, now or once it has moved."""
    busy: set[str] = set()
    for chain in state.live_chains():
        coming = () if chain.target is None else chain.target.stages
        for stage in (*(chain.claims if has_standbys else chain.stages), *coming):
            busy.update(stage.members)
    return busy


def choose_seed(state: ClusterState, node: Node, served: Sequence[str] | None = None) -> Holding | None:
    """What a machine would seed if no chain used it; None where it cannot. Of several models, the rarest."""
    rate = line_of(state, node)
    if not node.can_work or node.status != "ready" or rate is None or rate < _LEAST_BYTES_PER_S:
        return None
    found = [
        (copies, name, Holding(name, start, stop))
        for name in (_served(state) if served is None else served)
        for copies, start, stop in _rarest(state, node, state.models[name].model)
    ]
    return min(found, key=lambda each: each[:2])[2] if found else None


def line_of(state: ClusterState, node: Node) -> float | None:
    """Bytes a second between it and the coordinator, as measured; None: nobody knows, or it is closed."""
    link = state.link(state.driver, node.id)
    return link.bytes_per_s if link is not None and link.is_open else None


def _served(state: ClusterState) -> list[str]:
    ready = {chain.model for chain in state.live_chains() if chain.status == "ready"}
    return sorted(name for name in ready if state.models[name].is_wanted)


def _is_calm(state: ClusterState) -> bool:
    """Nobody loads, moves or recovers: what is fetched now takes nothing from those who wait."""
    return all(chain.status == "ready" and chain.target is None for chain in state.live_chains())


def _rarest(state: ClusterState, node: Node, model: Model) -> Iterator[tuple[float, int, int]]:
    """Of all runs of layers that its disk has room for and of which no other is longer, the one that the fewest others
    hold: copies of a layer in the mean, first layer, layer behind the last."""
    sizes = list(model.layer_bytes)
    sizes[0] += model.embedding_bytes
    sizes[-1] += model.head_bytes
    before = [0, *accumulate(sizes)]
    copies = [0, *accumulate(_copies(state, node, model))]
    best: tuple[int, float, int, int] | None = None
    stop = 0
    for start in range(len(sizes)):
        stop = max(stop, start)
        while stop < len(sizes) and before[stop + 1] - before[start] <= node.seed_bytes:
            stop += 1
        if stop > start:
            mean = (copies[stop] - copies[start]) / (stop - start)
            rank = (start - stop, mean, start, stop)
            # A long run helps more than a rare layer: whoever comes asks for a stage, not for a layer.
            best = rank if best is None or rank < best else best
    if best is not None:
        yield best[1], best[2], best[3]


def _copies(state: ClusterState, node: Node, model: Model) -> list[int]:
    """How many others hold each layer on their disks."""
    counts = [0] * model.layer_count
    for other in state.nodes.values():
        if other.id == node.id or not other.is_answering:
            continue
        for held in other.cached:
            if held.model == model.name:
                for layer in range(held.start, min(held.stop, model.layer_count)):
                    counts[layer] += 1
    return counts


def seed_commands(state: ClusterState) -> Iterator[SeedWeights]:
    """What seeds have yet to fetch."""
    computing: set[str] | None = None
    for node in state.nodes.values():
        seed = node.seed
        if seed is None or not node.is_answering or is_seeded(node):
            continue
        computing = computing_nodes(state) if computing is None else computing
        rate = line_of(state, node) or _LEAST_BYTES_PER_S
        yield SeedWeights(
            node=node.id,
            incarnation=node.incarnation,
            model=seed.model,
            start=seed.start,
            stop=seed.stop,
            sources=tuple(
                Source(other.id, other.address, max(held.start, seed.start), min(held.stop, seed.stop))
                for other in sorted(state.nodes.values(), key=lambda each: each.id)
                if other.is_answering and other.id != node.id and other.id not in computing
                for held in other.cached
                if held.model == seed.model and held.start < seed.stop and seed.start < held.stop
            )[:8],
            bytes_per_s=max(1, int(_SHARE_OF_LINE * rate)),
        )


def is_seeded(node: Node) -> bool:
    """Whether all that it is to seed lies there."""
    seed = node.seed
    return seed is not None and any(
        held.model == seed.model and held.start <= seed.start and seed.stop <= held.stop
        for held in node.cached
    )


def told_role(state: ClusterState, node: Node) -> str:
    """What a machine does for the others besides computing for a ring, and why; "": nothing."""
    told = []
    seed = node.seed
    if seed is not None:
        what = f"{name_layers(seed.start, seed.stop)} of {seed.model}"
        rate = line_of(state, node)
        line = "" if rate is None else f" over a line of {format_bytes(rate)}/s"
        given = f", {format_bytes(node.seeded_bytes)} given so far" if node.seeded_bytes else ""
        told.append(
            f"seeds {what}{line}{given}: no ring needs it"
            if is_seeded(node)
            else f"fetches {what} to seed it"
        )
    elif node.seed_problem:
        told.append(f"seeds nothing: {node.seed_problem}")
    told += [
        f"verifies what others computed with {name_layers(held.start, held.stop)}"
        for held in state.audits.values()
        if held.node == node.id
    ]
    return "; ".join(told)


def duty_of(state: ClusterState, model: Model, plan: Placement, node: str) -> str:
    """What a machine that a plan leaves out would do instead; "": nothing, or something for another chain."""
    machine = state.nodes[node]
    others = {each.node for each in plan.standbys} | computing_nodes(state, has_standbys=True)
    if node in others or not machine.seed_bytes:
        return ""
    served = replace(state, models={**state.models, model.name: RequestedModel(model, 1)})
    seed = choose_seed(served, machine, [model.name])
    return "" if seed is None else f"would seed {name_layers(seed.start, seed.stop)} to machines that join"
