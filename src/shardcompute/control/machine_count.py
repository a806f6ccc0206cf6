"""Machine count: how few machines of one size can hold a model that is cut between layers. Pure.

A stage never takes less for holding more layers, so filling one machine after the other from the first layer on uses as
few as any cut does.
"""

from __future__ import annotations

from collections.abc import Sequence

from shardcompute.control.placement.parallelism import PIPELINE, Parallelism
from shardcompute.control.sizes import HeldSums, sizes_of, sums_of
from shardcompute.control.state import Model, RankPlace

Cuts = tuple[tuple[int, int], ...]
"""Layers `[start, stop)` of each machine, or of each group of ranks, in order."""


def fewest_machines(
    model: Model, holding: str, room_bytes: int, parallel: Parallelism = PIPELINE
) -> Cuts | None:
    """Where to cut for machines that have so many bytes for layers, or for groups of as many ranks as are asked for;
    None where one layer is too much for any. UnsupportedModelError where ranks cannot divide the model."""
    held = held_by_ranks(model, holding, parallel)
    layer_count = held[0].layer_count
    if model.is_whole:
        return ((0, layer_count),) if held[0].total_bytes <= room_bytes else None
    cuts: list[tuple[int, int]] = []
    start = 0
    while start < layer_count:
        stop = min(_farthest(each, start, room_bytes) for each in held)
        if stop == start:
            return None
        cuts.append((start, stop))
        start = stop
    return tuple(cuts)


def least_room_bytes(model: Model, holding: str, parallel: Parallelism = PIPELINE) -> int:
    """What a machine must have for layers to hold any one of them, or its share of it, ends included."""
    held = held_by_ranks(model, holding, parallel)
    if model.is_whole:
        return held[0].total_bytes
    return max(each.memory_bytes(layer, layer + 1) for each in held for layer in range(each.layer_count))


def held_by_ranks(model: Model, holding: str, parallel: Parallelism) -> Sequence[HeldSums]:
    """What stages take on each of so many equal ranks; on one machine, where it is to compute alone."""
    if parallel.tp < 2 or model.tensor is None:
        return [sizes_of(model).on(holding)]
    weights = (1,) * parallel.tp
    places = [RankPlace(rank, weights, parallel.exchange) for rank in range(parallel.tp)]
    return [sums_of(model, holding, place) for place in places]


def _farthest(held: HeldSums, start: int, room_bytes: int) -> int:
    stop = start
    while stop < held.layer_count and held.memory_bytes(start, stop + 1) <= room_bytes:
        stop += 1
    return stop
