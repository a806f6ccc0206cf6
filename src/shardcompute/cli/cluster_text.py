"""A cluster in words and rows of characters; from views alone, so that what is shown can be tested."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from shardcompute.control.words import count_of, format_bytes, format_rate

if TYPE_CHECKING:
    from shardcompute.node.views import (
        ChainView,
        ClusterView,
        DriverView,
        FetchView,
        ModelView,
        NodeView,
        StageView,
    )

_MAP_WIDTH = 64
_LEGEND = "# serves, + loads, o stands by, - on its disk, . nothing"


def describe_cluster(view: ClusterView, width: int = 100) -> list[str]:
    """One screen: who is there, what is served by whom, how busy it is."""
    lines = [_headline(view), _load_line(view)]
    for model in view.models:
        lines += ["", *_describe_model(view, model, width)]
    for fetch in view.fetches:
        lines += ["", describe_fetch(fetch)]
    if not view.models and not view.fetches:
        lines += ["", "no model is served; shardcompute load MODEL adds one"]
    return lines


def _headline(view: ClusterView) -> str:
    counts = Counter(node.status for node in view.nodes if node.status != "gone")
    nodes = ", ".join(f"{count} {status}" for status, count in counts.most_common()) or "none yet"
    return f"cluster {view.name} ({view.version}), nodes: {nodes}"


def _load_line(view: ClusterView) -> str:
    load = view.load
    return (
        f"load: {load.running} running, {load.waiting} waiting, {format_rate(load.tokens_per_s)}, "
        f"KV memory {load.kv_used_fraction:.0%} used"
    )


def _describe_model(view: ClusterView, model: ModelView, width: int) -> Iterator[str]:
    chains = f"{model.ready_chains} of {count_of(model.wanted_chains, 'chain')}"
    yield (
        f"{model.name}: {model.status}, {chains} "
        f"({model.weight_form}, {count_of(model.layer_count, 'layer')}, {format_bytes(model.memory_bytes)})"
    )
    for reason in model.reasons:
        yield f"  {reason}"
    names = names_of(view)
    for chain in view.chains:
        if chain.model == model.name:
            yield from _describe_chain(chain, model.layer_count, names, width)


def _describe_chain(
    chain: ChainView, layer_count: int, names: Mapping[str, str], width: int
) -> Iterator[str]:
    one, many = chain.predicted_tokens_per_s_one_stream, chain.predicted_tokens_per_s_many
    expected = (
        "" if one is None or many is None else f", expect {format_rate(one)}, {format_rate(many)} for many"
    )
    reason = f" ({chain.reason})" if chain.status not in ("ready", "planned") and chain.reason else ""
    yield f"  {chain.id}: {chain.status}, epoch {chain.epoch}{expected}{reason}"
    yield f"  {draw_stages(chain.stages, layer_count, names, width - 2)}"
    for standby in chain.standbys:
        name = names.get(standby.node, standby.node)
        yield f"  {name} stands by for layers {standby.start} to {standby.stop - 1}{_percent(standby)}"
    if chain.bottleneck:
        yield f"  {chain.bottleneck}"
    if len(chain.drivers) > 1:
        yield f"  drivers: {', '.join(_describe_driver(driver, names) for driver in chain.drivers)}"


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
        label = f" {names.get(stage.node, stage.node)} {stage.start}-{stage.stop - 1}{_percent(stage)} "
        cells.append(
            label[:size].center(size, "-") if len(label) <= size else label.strip()[:size].ljust(size)
        )
    return f"|{'|'.join(cells)}|"


def _percent(stage: StageView) -> str:
    # Rounded down: what is not ready must not look complete.
    return "" if stage.is_loaded else f" {int(100 * stage.fraction)}%"


def draw_map(view: ClusterView) -> list[str]:
    """For every model a row per node, a character per layer (or for several, where there are many)."""
    lines: list[str] = []
    for model in view.models:
        chains = [chain for chain in view.chains if chain.model == model.name]
        cell = -(-model.layer_count // _MAP_WIDTH)
        scale = "" if cell == 1 else f", {cell} to a character"
        lines += [f"{model.name}, {count_of(model.layer_count, 'layer')}{scale}: {_LEGEND}"]
        nodes = [node for node in view.nodes if node.role != "driver" and node.status not in ("lost", "gone")]
        width = max((len(node.name) for node in nodes), default=0)
        for node in nodes:
            layers = "".join(_mark(node, model, chains, layer) for layer in range(model.layer_count))
            row = "".join(_strongest(layers[at : at + cell]) for at in range(0, len(layers), cell))
            lines.append(f"{node.name.ljust(width)}  {row}")
        lines.append("")
    return lines[:-1]


def _mark(node: NodeView, model: ModelView, chains: Sequence[ChainView], layer: int) -> str:
    for chain in chains:
        for stage in chain.stages:
            if stage.node == node.id and stage.start <= layer < stage.stop:
                return "#" if stage.is_loaded else "+"
    for chain in chains:
        for standby in chain.standbys:
            if standby.node == node.id and standby.start <= layer < standby.stop:
                return "o" if standby.is_loaded else "+"
    is_cached = any(held.model == model.name and held.start <= layer < held.stop for held in node.cached)
    return "-" if is_cached else "."


def _strongest(marks: str) -> str:
    return next(mark for mark in "#+o-." if mark in marks)


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
    return ", ".join(parts) or "-"


def names_of(view: ClusterView) -> dict[str, str]:
    return {node.id: node.name for node in view.nodes}
