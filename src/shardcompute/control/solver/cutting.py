"""Cuts of the layers over machines in a given order, for many times of the slowest stage at once.

Where layers are alike the fastest machines are simply filled first. Where they differ, a dynamic programme over
machines and layers: the best start of a stage for each stop is a minimum over a window, looked up in tables of minima.
"""

from __future__ import annotations

from math import inf

import numpy as np

from shardcompute.control.solver.space import Floats, Ints, OrderCosts, SearchSpace

Edges = tuple[int, ...]
_SLACK = 1 + 1e-9
_STEPS = np.linspace(0.0, 1.0, 10)
_ROUNDS = 3


def cut_order(costs: OrderCosts, order: Ints, bounds_s: Floats) -> list[Edges | None]:
    """For each time, the edges with the smallest sum of stage times and no stage beyond it; None where none fit."""
    if costs.space.is_uniform or len(order) == 1:
        return _cut_alike(costs, order, bounds_s)
    return _cut_unlike(costs.space, order, bounds_s)


def best_edges(costs: OrderCosts, order: Ints) -> Edges | None:
    """The cut of most worth for machines in this order, among many times of the slowest stage; None where none fits."""
    space = costs.space
    shortest = cut_order(costs, order, np.array([1e15]))[0]
    if shortest is None:
        return None
    speeds = 1 / space.seconds_per_byte[order]
    work = float(space.work_before[-1]) + space.head_work
    low = (work + float((space.overhead_s[order] * speeds).sum())) / float(speeds.sum())
    high = float(space.stage_times(order, shortest).max())
    known: dict[Edges, float] = {shortest: _cost(space, order, shortest)}
    for _ in range(_ROUNDS):
        times = low * max(1.0, high / low) ** _STEPS
        found = cut_order(costs, order, times)
        costed = [inf if edges is None else _cost(space, order, edges) for edges in found]
        known.update((edges, cost) for edges, cost in zip(found, costed, strict=True) if edges is not None)
        best = int(np.argmin(costed))
        low, high = float(times[max(0, best - 1)]), float(times[min(len(times) - 1, best + 1)])
    return min(known, key=lambda edges: (known[edges], edges))


def _cost(space: SearchSpace, order: Ints, edges: Edges) -> float:
    latency_s, bottleneck_s = space.times(order, edges)
    return space.objective.cost(latency_s, bottleneck_s, float(space.machines[order].sum()))


def _cut_alike(costs: OrderCosts, order: Ints, bounds_s: Floats) -> list[Edges | None]:
    layers = costs.space.layers
    found: list[Edges | None] = []
    for limits in costs.limits(order, bounds_s * _SLACK).astype(np.int64):
        if limits.min() < 1 or limits.sum() < layers:
            found.append(None)
            continue
        fast = np.argsort(costs.layer_s[order], kind="stable")
        more = (limits - 1)[fast]
        taken = np.ones(len(order), np.int64)
        taken[fast] += np.clip(layers - len(order) - (np.cumsum(more) - more), 0, more)
        found.append((0, *(int(stop) for stop in np.cumsum(taken))))
    return found


def _cut_unlike(space: SearchSpace, order: Ints, bounds_s: Floats) -> list[Edges | None]:
    layers, work = space.layers, space.work_before
    rows = len(bounds_s)
    stops = np.arange(layers + 1)
    first = int(order[0])
    with np.errstate(over="ignore"):
        limits = (bounds_s[:, None] - space.overhead_s[order]) / space.seconds_per_byte[order] * _SLACK
    fits = (stops >= 1) & (stops <= space.first_reach[first]) & (work <= limits[:, :1])
    best = np.where(fits, space.overhead_s[first] + space.seconds_per_byte[first] * work, inf)
    windows: list[tuple[Floats, Ints]] = []
    for i, machine in enumerate(order[1:], 1):
        values = best - space.seconds_per_byte[machine] * work
        is_last = i == len(order) - 1
        limit = limits[:, i : i + 1] - (space.head_work if is_last else 0.0)
        by_time = np.searchsorted(work, (work[None, :] - limit).ravel(), "left").reshape(rows, -1)
        by_memory = np.searchsorted(space.reach[machine], stops, "left")
        if is_last:
            by_memory = np.full(layers + 1, space.last_from[machine])
        low = np.maximum(by_time, by_memory)
        least = window_minima(values, low)
        best = least + space.overhead_s[machine] + space.seconds_per_byte[machine] * work
        windows.append((values, low))
    return [_trace(windows, row, layers) if best[row, layers] < inf else None for row in range(rows)]


def window_minima(values: Floats, low: Ints) -> Floats:
    """By row and stop, the least of `values[low:stop]`."""
    rows, count = values.shape
    levels = [values]
    while 2 ** len(levels) <= count:
        before, half = levels[-1], 2 ** (len(levels) - 1)
        shifted = np.full_like(before, inf)
        shifted[:, :-half] = before[:, half:]
        levels.append(np.minimum(before, shifted))
    table = np.stack(levels)
    length = np.arange(count) - low
    level = np.log2(np.maximum(length, 1)).astype(np.int64)
    row = np.arange(rows)[:, None]
    start = np.clip(low, 0, count - 1)
    end = np.clip(np.arange(count) - 2**level, 0, count - 1)
    least = np.minimum(table[level, row, start], table[level, row, end])
    return np.where(length > 0, least, inf)


def _trace(windows: list[tuple[Floats, Ints]], row: int, layers: int) -> Edges:
    edges = [layers]
    for values, low in reversed(windows):
        stop = edges[-1]
        start = int(low[row, stop])
        edges.append(start + int(np.argmin(values[row, start:stop])))
    return (0, *reversed(edges))
