"""A new shape for a chain that lost machines, moving as few bytes as pays.

A standby that already holds the layers comes first, then neighbours that take over the gap or a spare machine
that fills it. Everything is re-split only where that is impossible or clearly worse. Shapes have a price: seconds
to move the missing weights, plus what they lose against the best one over the horizon of the policy.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf, isfinite

from msgspec import structs

from shardcompute.control.placement.capacities import NodeCapacity, Request
from shardcompute.control.placement.cost_model import score, stage_s
from shardcompute.control.placement.place import Placement, Unplaceable, place
from shardcompute.control.placement.rank_groups import offers_of
from shardcompute.control.sizes import Sizes, sums_of
from shardcompute.control.state import Assignment, Model, covers

_SHAPES_LIMIT = 64
"""Several gaps at once multiply; what is dropped here a re-split still finds."""


@dataclass(frozen=True, slots=True)
class Replacement:
    stages: tuple[Assignment, ...]
    moved_bytes: int
    move_s: float
    how: str
    """In words: "same machines", "standby promoted", "gap filled", "re-split"."""


def replace_stage(
    request: Request,
    stages: Sequence[Assignment],
    lost: Iterable[str],
    standbys: Iterable[Assignment] = (),
) -> Replacement | Unplaceable:
    """A shape without the `lost` nodes. Offers are the machines that may serve, less what others use of them.

    `standbys` are those that are loaded. Stages of nodes that are not offered count as lost.
    """
    offered = {offer.node for offer in request.offers}
    stages, asked = tuple(_without_ranks(stage, offered - set(lost)) for stage in stages), tuple(stages)
    gone = set(lost) | {stage.node for stage in stages if stage.node not in offered}
    kept = _promote(stages, gone, [each for each in standbys if each.node in offered - gone])
    if all(stage.node not in gone for stage in kept) and is_possible(request, kept):
        return _replacement(request, kept, "same machines" if kept == asked else "standby promoted")
    usable = tuple(offer for offer in request.offers if offer.node not in gone)
    request = replace(request, offers=usable)
    shapes = [(shape, "gap filled") for shape in _fillings(request, kept, gone)]
    shapes += [(shape, "gap filled") for shape in _relocations(request, kept, gone)]
    shapes += [(shape, "re-split") for shape in _resplits(request, kept, gone)]
    fresh = place(request)
    if isinstance(fresh, Placement):
        shapes.append((fresh.assignments, "re-split"))
    candidates = [_replacement(request, shape, how) for shape, how in shapes if is_possible(request, shape)]
    return fresh if isinstance(fresh, Unplaceable) and not candidates else _cheapest(request, candidates)


def hand_over(
    request: Request, stages: Sequence[Assignment], standbys: Iterable[Assignment] = ()
) -> Replacement | None:
    """The cheapest shape in which spare machines take over from those that are not offered and all others stay as
    they are; None where there is none."""
    offered = {offer.node for offer in request.offers}
    stages = tuple(_without_ranks(stage, offered) for stage in stages)
    gone = {stage.node for stage in stages if stage.node not in offered}
    kept = _promote(stages, gone, [each for each in standbys if each.node in offered])
    staying = {stage for stage in kept if stage.node not in gone}
    shapes = [shape for shape in _fillings(request, kept, gone) if staying <= set(shape)]
    found = [_replacement(request, shape, "gap filled") for shape in shapes if is_possible(request, shape)]
    return _cheapest(request, found) if found else None


def _without_ranks(stage: Assignment, offered: Container[str]) -> Assignment:
    """A stage of which a rank is missing has gone with it: the others may do something else."""
    missing = next((node for node in stage.members if node not in offered), None)
    return stage if missing is None else Assignment(missing, stage.start, stage.stop)


def move_seconds(request: Request, stages: Iterable[Assignment]) -> tuple[int, float]:
    """Bytes that must travel before these stages can serve, and the time it takes on a shared line."""
    offers = {offer.node: offer for offer in request.offers}
    moved = sum(
        request.sizes.bytes_to_move(stage.start, stage.stop, offers[node].held)
        for stage in stages
        for node in stage.members
    )
    return moved, moved / request.policy.source_bytes_per_s


def _promote(
    stages: Sequence[Assignment], gone: set[str], standbys: list[Assignment]
) -> tuple[Assignment, ...]:
    busy = {node for stage in stages for node in stage.members}
    kept = []
    for stage in stages:
        ready = [
            each
            for each in standbys
            if (each.start, each.stop) == (stage.start, stage.stop) and busy.isdisjoint(each.members)
        ]
        if stage.node in gone and ready:
            stage = min(ready, key=lambda each: each.node)
            busy.update(stage.members)
        kept.append(stage)
    return tuple(kept)


def is_possible(request: Request, stages: Sequence[Assignment]) -> bool:
    return (
        covers(tuple(stages), request.sizes.layer_count)
        and _fits(request, stages)
        and isfinite(score(request, stages).latency_s)
    )


def keep_layout(
    request: Request, found: tuple[Assignment, ...], former: Iterable[tuple[Assignment, ...]]
) -> tuple[Assignment, ...]:
    """The layout that was found for a new chain or, unless that is clearly better, a former one of the same model of
    which machines hold more: weights are not fetched for what noise promises (see `moves`)."""
    if not is_possible(request, found):
        return found
    wanted, moved = score(request, found).score, move_seconds(request, found)
    known = [
        each
        for each in former
        if is_possible(request, each)
        and (request.suits(each) or not request.suits(found))
        and move_seconds(request, each) < moved
        and wanted < score(request, each).score * (1 + request.policy.min_gain)
    ]

    def price(stages: tuple[Assignment, ...]) -> tuple[tuple[int, float], list[tuple[int, str]]]:
        return move_seconds(request, stages), [(stage.stop, stage.node) for stage in stages]

    return min(known, key=price, default=found)


def _replacement(request: Request, stages: Sequence[Assignment], how: str) -> Replacement:
    moved, seconds = move_seconds(request, stages)
    return Replacement(tuple(stages), moved, seconds, how)


def _cheapest(request: Request, candidates: list[Replacement]) -> Replacement:
    # What a person asked for, where that is to be had.
    candidates = [each for each in candidates if request.suits(each.stages)] or candidates
    best = max(score(request, each.stages).score for each in candidates)

    def price(each: Replacement) -> tuple[float, bool, tuple[str, ...]]:
        loss = best / score(request, each.stages).score - 1
        seconds = each.move_s + request.policy.horizon_s * loss
        names = tuple(node for stage in each.stages for node in stage.members)
        return float(f"{seconds:.9e}"), each.how == "re-split", names

    local = min((each for each in candidates if each.how == "gap filled"), key=price, default=None)
    if local is not None and best / score(request, local.stages).score - 1 < request.policy.min_gain:
        return local
    return min(candidates, key=price)


def _gaps(stages: Sequence[Assignment], gone: set[str]) -> list[tuple[int, int]]:
    """Layer ranges without a machine, neighbours merged."""
    gaps: list[tuple[int, int]] = []
    for stage in stages:
        if stage.node not in gone:
            continue
        if gaps and gaps[-1][1] == stage.start:
            gaps[-1] = (gaps[-1][0], stage.stop)
        else:
            gaps.append((stage.start, stage.stop))
    return gaps


def _fillings(
    request: Request, stages: Sequence[Assignment], gone: set[str]
) -> Iterator[tuple[Assignment, ...]]:
    """Shapes in which every gap is taken over by a spare machine, or divided between its neighbours."""
    left = [stage for stage in stages if stage.node not in gone]
    shapes: list[list[Assignment]] = [left]
    for start, stop in _gaps(stages, gone):
        shapes = [
            wider
            for shape in shapes
            for wider in _fill_gap(request, shape, start, stop)
            if _fits(request, wider)
        ][:_SHAPES_LIMIT]
    for shape in shapes:
        yield tuple(shape)


def _relocations(
    request: Request, stages: Sequence[Assignment], gone: set[str]
) -> Iterator[tuple[Assignment, ...]]:
    """Where no machine is spare: shapes in which one of them fills a gap and leaves its own layers to others."""
    survivors = {node for stage in stages for node in stage.members} - gone
    if any(offer.node not in survivors for offer in request.offers):
        return
    for node in sorted(survivors):
        yield from _fillings(request, stages, gone | {node})


def _fill_gap(request: Request, shape: list[Assignment], start: int, stop: int) -> Iterator[list[Assignment]]:
    before = [stage for stage in shape if stage.stop <= start]
    after = [stage for stage in shape if stage.start >= stop]
    for offer in request.offers:
        if all(offer.node not in stage.members for stage in shape):
            yield [*before, Assignment(offer.node, start, stop), *after]
    divided = [shape for shape in _divide_gap(before, after, start, stop) if _fits(request, shape)]
    if divided:
        yield from (divided[0], divided[-1])
        yield min(divided, key=lambda shape: _slowest_s(request, shape))


def _divide_gap(
    before: list[Assignment], after: list[Assignment], start: int, stop: int
) -> Iterator[list[Assignment]]:
    for cut in range(start if after else stop, (stop if before else start) + 1):
        head = [*before[:-1], structs.replace(before[-1], stop=cut)] if before else []
        tail = [structs.replace(after[0], start=cut), *after[1:]] if after else []
        yield [*head, *tail]


def _slowest_s(request: Request, shape: Iterable[Assignment]) -> float:
    offers = offers_of(request)
    return max(stage_s(request.sizes, offers[each], each.start, each.stop) for each in shape)


def _fits(request: Request, shape: Iterable[Assignment]) -> bool:
    offers = {offer.node: offer for offer in request.offers}
    return all(
        node in offers and _fits_on(request.model, offers[node], stage)
        for stage in shape
        for node in stage.members
    )


def _fits_on(model: Model, offer: NodeCapacity, stage: Assignment) -> bool:
    held = sums_of(model, offer.holding, stage.place_of(offer.node))
    return held.memory_bytes(stage.start, stage.stop) <= offer.memory_bytes


def _resplits(
    request: Request, stages: Sequence[Assignment], gone: set[str]
) -> Iterator[tuple[Assignment, ...]]:
    """New cuts for the survivors in their old order, alone and with spare machines where the gap was."""
    offers = offers_of(request)
    kept = [offers.find(stage) for stage in stages if stage.node not in gone]
    survivors = [offer for offer in kept if offer is not None]
    used = {node for offer in survivors for node in offer.members}
    spares = [offer for offer in request.offers if offer.node not in used]
    position = next((i for i, stage in enumerate(stages) if stage.node in gone), len(survivors))
    for extra in ([], *([spare] for spare in spares), spares):
        order = [*survivors[:position], *extra, *survivors[position:]]
        shape = cut_for_price(request, order) if order else None
        if shape is not None:
            yield shape


def cut_for_price(request: Request, order: Sequence[NodeCapacity]) -> tuple[Assignment, ...] | None:
    """The cheapest cut over machines in this order, each with any number of layers, also none.

    Cheapest in seconds to move, plus stage times over the horizon, measured against the quickest machine.
    """
    sizes, policy = request.sizes, request.policy
    layers = sizes.layer_count
    quickest_s = min(stage_s(sizes, offer, 0, layers) for offer in order)
    rate = policy.horizon_s / max(quickest_s, 1e-9)
    best = [0.0] + [inf] * layers
    origins = []
    for offer in order:
        moves, held = _moves(sizes, offer), sizes.on(offer.holding)
        following, origin = list(best), list(range(layers + 1))
        for start in range(layers):
            if best[start] == inf:
                continue
            for stop in range(start + 1, layers + 1):
                if held.memory_before[stop] - held.memory_before[start] > offer.memory_bytes:
                    break
                if held.memory_bytes(start, stop) > offer.memory_bytes:
                    continue
                moved = moves[stop] - moves[start] + _moved_ends(sizes, offer, start, stop)
                cost = moved / policy.source_bytes_per_s + rate * stage_s(sizes, offer, start, stop)
                if best[start] + cost < following[stop]:
                    following[stop], origin[stop] = best[start] + cost, start
        best = following
        origins.append(origin)
    if best[layers] == inf:
        return None
    shape, stop = [], layers
    for offer, origin in zip(reversed(order), reversed(origins), strict=True):
        if origin[stop] < stop:
            shape.append(offer.take(origin[stop], stop))
        stop = origin[stop]
    return tuple(reversed(shape))


def _moves(sizes: Sizes, offer: NodeCapacity) -> list[int]:
    """Sums over prefixes of the layers' bytes that this machine does not hold."""
    sums = [0]
    for layer in range(sizes.layer_count):
        is_held = any(first <= layer < last for first, last in offer.held)
        size = sizes.weights_before[layer + 1] - sizes.weights_before[layer]
        sums.append(sums[-1] + (0 if is_held else size))
    return sums


def _moved_ends(sizes: Sizes, offer: NodeCapacity, start: int, stop: int) -> int:
    return sizes.bytes_to_move(start, start, offer.held) * (start == 0) + (
        sizes.bytes_to_move(stop, stop, offer.held) * (stop == sizes.layer_count)
    )
