"""Machine count: how few machines of one size can hold a model that is cut between layers. Pure.

A stage never takes less for holding more layers, so filling one machine after the other from the first layer on uses as
few as any cut does.
"""

from __future__ import annotations

from shardcompute.control.sizes import HeldSums, sizes_of
from shardcompute.control.state import Model

Cuts = tuple[tuple[int, int], ...]
"""Layers `[start, stop)` of each machine, in order."""


def fewest_machines(model: Model, holding: str, room_bytes: int) -> Cuts | None:
    """Where to cut for machines that have so many bytes for layers; None where one layer is too much for any."""
    held = sizes_of(model).on(holding)
    if model.is_whole:
        return ((0, held.layer_count),) if held.total_bytes <= room_bytes else None
    cuts: list[tuple[int, int]] = []
    start = 0
    while start < held.layer_count:
        stop = _farthest(held, start, room_bytes)
        if stop == start:
            return None
        cuts.append((start, stop))
        start = stop
    return tuple(cuts)


def least_room_bytes(model: Model, holding: str) -> int:
    """What a machine must have for layers to hold any one of them, ends included."""
    held = sizes_of(model).on(holding)
    if model.is_whole:
        return held.total_bytes
    return max(held.memory_bytes(layer, layer + 1) for layer in range(held.layer_count))


def _farthest(held: HeldSums, start: int, room_bytes: int) -> int:
    stop = start
    while stop < held.layer_count and held.memory_bytes(start, stop + 1) <= room_bytes:
        stop += 1
    return stop
