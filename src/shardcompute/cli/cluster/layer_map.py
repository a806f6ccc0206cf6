"""Where layers are, drawn with characters alone: chains as rows of blocks, and what every node holds.

Nothing here needs colour, and every line fits the width that is given.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from shardcompute.cli.console import aligned, cut, wrapped
from shardcompute.core.units import count_of, format_bytes, format_rate, format_seconds

if TYPE_CHECKING:
    from shardcompute.node.admin.views import ChainView, ClusterView, ModelView, NodeView, StageView

_LEGEND = "# serves, + loads, o stands by, - on its disk, . nothing"
_LEAST_BLOCK = 3


def draw_map(view: ClusterView, width: int = 80) -> list[str]:
    """For every model its chains, then a row per node."""
    lines: list[str] = []
    names = {node.id: node.name for node in view.nodes}
    for model in view.models:
        lines.append(f"{model.name}: {model.status}, {count_of(model.layer_count, 'layer')}")
        chains = [chain for chain in view.chains if chain.model == model.name]
        for chain in chains:
            lines += ["", *draw_chain(chain, names, width)]
        lines += ["", *_draw_nodes(view.nodes, model, chains, width), ""]
    return [cut(line, width) for line in lines[:-1]] or [
        "no model is served; shardcompute load MODEL adds one"
    ]


def draw_chain(chain: ChainView, names: Mapping[str, str], width: int) -> Iterator[str]:
    """A headline, the row of blocks with its bottleneck marked below, and a line for each block."""
    one = chain.predicted_tokens_per_s_one_stream
    yield f"{chain.id}: {chain.status}{'' if one is None else f', expect {format_rate(one)}'}"
    slowest = bottleneck_of(chain, names)
    numbered = list(enumerate(chain.stages, 1))
    most = max(1, (width - 3) // (_LEAST_BLOCK + 1))
    for at in range(0, len(numbered), most):
        labels = [f"{number} {stage.named(names)}" for number, stage in numbered[at : at + most]]
        yield from draw_blocks(chain.stages[at : at + most], labels, width - 2, slowest)
    rows = [row for number, stage in numbered for row in _block_rows(number, stage, names, stage is slowest)]
    if rows:
        yield from (f"  {line}" for line in aligned(rows).splitlines())
    yield from wrapped(chain.bottleneck, width)


def bottleneck_of(chain: ChainView, names: Mapping[str, str]) -> StageView | None:
    """The stage to make faster first; None where that is the network, or nothing is known."""
    known = [stage for stage in chain.stages if stage.predicted_s is not None]
    slowest = max(known, key=lambda stage: stage.predicted_s or 0.0, default=None)
    if slowest is None or len(chain.stages) < 2:
        return None
    # The chain's own words know of the network, too, which stages do not.
    is_machine = chain.bottleneck.startswith(f"bottleneck: {names.get(slowest.node, slowest.node)},")
    return slowest if is_machine else None


def draw_blocks(
    stages: Sequence[StageView], labels: Sequence[str], width: int, marked: StageView | None
) -> Iterator[str]:
    """`[== 1 laptop ==|= 2 box =]`, as wide as the layers are many, and marks below one of the blocks."""
    sizes = block_sizes([stage.stop - stage.start for stage in stages], width - len(stages) - 1)
    cells, below, at = [], "", 1
    for stage, label, size in zip(stages, labels, sizes, strict=True):
        fill = "=" if stage.is_loaded else "+"
        shown = next((text for text in (f" {label} ", label, label.split()[0]) if len(text) <= size), "")
        cells.append(shown.center(size, fill))
        if stage is marked:
            below = _mark_below(at, size, width)
        at += size + 1
    yield f"  [{'|'.join(cells)}]"
    if below:
        yield f"  {below}"


def _mark_below(at: int, size: int, width: int) -> str:
    """Arrows at `at`, with the word on whichever side has room for it."""
    arrows, word = "^" * size, "bottleneck"
    if at + size + 1 + len(word) <= width:
        return f"{' ' * at}{arrows} {word}"
    return f"{word} {arrows}".rjust(at + size)


def block_sizes(layers: Sequence[int], room: int) -> list[int]:
    """How wide each block is: in proportion, but wide enough to be seen, and together as wide as there is room."""
    least = max(1, min(_LEAST_BLOCK, room // len(layers)))
    spare = max(0, room - least * len(layers))
    shares = [spare * count / sum(layers) for count in layers]
    sizes = [least + int(share) for share in shares]
    # What rounding left over goes to those that lost most by it.
    left = min(len(layers), int(sum(shares) + 1e-6) - sum(map(int, shares)))
    for index in sorted(range(len(layers)), key=lambda index: int(shares[index]) - shares[index])[:left]:
        sizes[index] += 1
    return sizes


def _block_rows(
    number: int, stage: StageView, names: Mapping[str, str], is_slowest: bool
) -> Iterator[tuple[str, ...]]:
    """A row for the stage, and one below it for each rank beside the first."""
    yield _block_row(number, stage, names, is_slowest)
    for rank in stage.ranks[1:]:
        share = f"rank {stage.ranks.index(rank)}, weight {rank.weight}"
        name, size = names.get(rank.node, rank.node), format_bytes(rank.memory_bytes)
        yield ("", name, f"{stage.start}-{stage.stop - 1}", share, size, "", "", "")


def _block_row(number: int, stage: StageView, names: Mapping[str, str], is_slowest: bool) -> tuple[str, ...]:
    layers = count_of(stage.stop - stage.start, "layer")
    return (
        str(number),
        names.get(stage.node, stage.node),
        f"{stage.start}-{stage.stop - 1}",
        f"rank 0, weight {stage.ranks[0].weight}" if stage.ranks else layers,
        format_bytes(stage.memory_bytes),
        "" if stage.predicted_s is None else f"{format_seconds(stage.predicted_s)} a token",
        # Rounded down: what is not ready must not look complete.
        "" if stage.is_loaded else f"{int(100 * stage.fraction)}% loaded",
        "<- bottleneck" if is_slowest else "",
    )


def _draw_nodes(
    nodes: Sequence[NodeView], model: ModelView, chains: Sequence[ChainView], width: int
) -> Iterator[str]:
    """A row per node, a character per layer (or for several, where there are many)."""
    there = [node for node in nodes if node.role != "driver" and node.status not in ("lost", "gone")]
    widest = min(max((len(node.name) for node in there), default=0), width // 3)
    cell = -(-model.layer_count // max(1, width - widest - 2))
    yield _LEGEND + ("" if cell == 1 else f"; {cell} layers to a character")
    for node in there:
        layers = "".join(_mark(node, model, chains, layer) for layer in range(model.layer_count))
        row = "".join(_strongest(layers[at : at + cell]) for at in range(0, len(layers), cell))
        yield f"{cut(node.name, widest).ljust(widest)}  {row}"


def _mark(node: NodeView, model: ModelView, chains: Sequence[ChainView], layer: int) -> str:
    for chain in chains:
        for stage in chain.stages:
            if node.id in stage.members and stage.start <= layer < stage.stop:
                return "#" if stage.is_loaded else "+"
    for chain in chains:
        for standby in chain.standbys:
            if standby.node == node.id and standby.start <= layer < standby.stop:
                return "o" if standby.is_loaded else "+"
    is_cached = any(held.model == model.name and held.start <= layer < held.stop for held in node.cached)
    return "-" if is_cached else "."


def _strongest(marks: str) -> str:
    return next(mark for mark in "#+o-." if mark in marks)
