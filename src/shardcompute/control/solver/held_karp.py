"""Exact layouts of few machines: Held-Karp over sets of machines, extended by where the layers are cut.

For every set, last machine and number of layers that it has so far, the least time to get there. Memory, unlike layers,
closed links and a limit for the slowest stage are all honoured, so the result is the optimum and not an estimate.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import inf

import numpy as np

from shardcompute.control.solver.bounds import Floors
from shardcompute.control.solver.cutting import Edges, window_minima
from shardcompute.control.solver.space import Floats, Ints, SearchSpace

EXACT_LIMIT = 12
"""Machines. The table doubles with each."""
_SLACK = 1 + 1e-9
_PRECISION = 1e-6


@dataclass(frozen=True, slots=True)
class ExactLayout:
    order: tuple[int, ...]
    edges: Edges
    latency_s: float
    bottleneck_s: float


class LayoutTable:
    """Shortest layouts with no stage and no transfer beyond a time, by number of machines."""

    def __init__(self, space: SearchSpace, bound_s: float = inf) -> None:
        self._space = space
        self._bound_s = bound_s
        self._hops = np.where(space.transfers <= bound_s * _SLACK, space.hops, inf)
        self._hops[:-1, -1] = space.hops[:-1, -1]
        with np.errstate(over="ignore"):
            self._limits = (bound_s - space.overhead_s) / space.seconds_per_byte * _SLACK
        count = space.count
        self._masks = np.arange(1 << count)
        self._sizes = np.array([bin(mask).count("1") for mask in range(1 << count)])
        self._best = np.full((1 << count, count, space.layers + 1), inf)
        self._start()
        for size in range(1, min(count - 1, space.layers - 2) + 1):
            for machine in range(count):
                self._extend(size, machine)

    def _start(self) -> None:
        """First stages."""
        space, work = self._space, self._space.work_before
        stops = np.arange(space.layers + 1)
        for machine in range(space.count):
            fits = (stops >= 1) & (stops <= space.first_reach[machine]) & (work <= self._limits[machine])
            times = space.overhead_s[machine] + space.seconds_per_byte[machine] * work
            self._best[1 << machine, machine] = np.where(fits, times + self._hops[-1, machine], inf)

    def _extend(self, size: int, machine: int) -> None:
        """One more stage, which is not the last, after all sets of a size without this machine."""
        masks = self._masks[(self._sizes == size) & (self._masks >> machine & 1 == 0)]
        arrived = self._arrived(masks, machine)
        low = self._low(machine, np.arange(self._space.layers + 1))
        seconds = self._space.seconds_per_byte[machine] * self._space.work_before
        least = window_minima(arrived - seconds, np.broadcast_to(low, arrived.shape))
        self._best[masks | 1 << machine, machine] = least + self._space.overhead_s[machine] + seconds

    def _arrived(self, masks: Ints, machine: int) -> Floats:
        """By set and number of layers, the least time until a row is at this machine."""
        ways = self._best[masks] + self._hops[:-1, machine][None, :, None]
        return np.asarray(ways.min(axis=1), np.float64)

    def _low(self, machine: int, stops: Ints) -> Ints:
        """Where a stage begins at the earliest that ends at each stop."""
        work = self._space.work_before
        by_time = np.searchsorted(work, work[stops] - self._limits[machine], "left")
        by_memory = np.searchsorted(self._space.reach[machine], stops, "left")
        return np.asarray(np.maximum(by_time, by_memory), np.int64)

    def best(self, least: int = 1, most: int | None = None) -> list[ExactLayout]:
        """The shortest layout of every number of machines for which there is one."""
        found = []
        for size in range(least, min(most or self._space.count, self._space.count, self._space.layers) + 1):
            layout = self._alone() if size == 1 else self._of_size(size)
            if layout is not None:
                found.append(layout)
        return found

    def _alone(self) -> ExactLayout | None:
        space = self._space
        whole_s = space.overhead_s + space.seconds_per_byte * (space.work_before[-1] + space.head_work)
        is_able = space.fits_whole & (whole_s <= self._bound_s * _SLACK)
        times = np.where(is_able, whole_s + self._hops[-1, :-1] + space.hops[:-1, -1], inf)
        machine = int(np.argmin(times))
        return self._layout([machine], (0, space.layers)) if times[machine] < inf else None

    def _of_size(self, size: int) -> ExactLayout | None:
        space, layers = self._space, self._space.layers
        best, chosen = inf, (0, 0, 0)
        for machine in range(space.count):
            masks = self._masks[(self._sizes == size - 1) & (self._masks >> machine & 1 == 0)]
            starts = self._last_starts(machine)
            if not len(starts) or not len(masks):
                continue
            work = space.work_before[-1] - space.work_before[starts] + space.head_work
            own_s = space.overhead_s[machine] + space.seconds_per_byte[machine] * work
            times = self._arrived(masks, machine)[:, starts] + own_s + space.hops[machine, -1]
            at = int(np.argmin(times))
            if times.flat[at] < best:
                row, column = divmod(at, len(starts))
                best, chosen = float(times.flat[at]), (int(masks[row]), machine, int(starts[column]))
        if best == inf:
            return None
        mask, machine, start = chosen
        order, edges = self._walk(mask, machine, start)
        return self._layout(order, (*edges, layers))

    def _last_starts(self, machine: int) -> Ints:
        space = self._space
        starts = np.arange(int(space.last_from[machine]), space.layers)
        work = space.work_before[-1] - space.work_before[starts] + space.head_work
        return np.asarray(starts[work <= self._limits[machine]], np.int64)

    def _walk(self, mask: int, machine: int, stop: int) -> tuple[list[int], list[int]]:
        """Back from a stage that begins at `stop` to the first."""
        space, order, edges = self._space, [machine], [stop]
        while mask:
            ways = self._best[mask, :, stop] + self._hops[:-1, machine]
            machine = int(np.argmin(ways))
            mask &= ~(1 << machine)
            order.append(machine)
            if mask:
                low = int(self._low(machine, np.array([stop]))[0])
                arrived = self._arrived(np.array([mask]), machine)[0]
                left = arrived - space.seconds_per_byte[machine] * space.work_before
                stop = low + int(np.argmin(left[low:stop]))
            else:
                stop = 0
            edges.append(stop)
        return order[::-1], edges[::-1]

    def _layout(self, order: list[int], edges: Edges) -> ExactLayout:
        return ExactLayout(tuple(order), edges, *self._space.times(order, edges))


def exact_floors(
    space: SearchSpace, at_least_s: float, least: int = 1, most: int | None = None
) -> Floors | None:
    """What no layout of few machines is better than, exactly; None where there is none."""
    fastest = fastest_layout(space, at_least_s, least, most)
    if fastest is None:
        return None
    shortest = {len(each.order): each.latency_s for each in LayoutTable(space).best(least, most)}
    return Floors(shortest, fastest.bottleneck_s * (1 - 2 * _PRECISION))


def fastest_layout(
    space: SearchSpace,
    at_least_s: float,
    least: int = 1,
    most: int | None = None,
    should_stop: Callable[[], bool] = lambda: False,
) -> ExactLayout | None:
    """The layout whose slowest stage or link is fastest, by bisection from a lower bound of it."""
    low, best = at_least_s, _first(LayoutTable(space).best(least, most))
    if best is None:
        return None
    at_once = _first(LayoutTable(space, low * (1 + _PRECISION)).best(least, most))
    if at_once is not None:
        return at_once
    while best.bottleneck_s > low * (1 + _PRECISION) and not should_stop():
        middle = (low + best.bottleneck_s) / 2
        found = _first(LayoutTable(space, middle).best(least, most))
        if found is None:
            low = middle
        else:
            best = found
    return best


def _first(layouts: list[ExactLayout]) -> ExactLayout | None:
    return min(layouts, key=lambda each: (each.bottleneck_s, len(each.order), each.order), default=None)
