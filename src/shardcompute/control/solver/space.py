"""The search space of a placement: machines, links and layers as arrays, and what an order of machines costs.

Machines are indices from 0; one more index, the last of `hops`, is the driver, from which a ring starts and where it
ends. A layout is an order of machines with edges: machine `order[i]` has layers `[edges[i], edges[i + 1])`.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf, log

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
_ROUNDING = 1e-9
CLOSED_S = 1e6


@dataclass(frozen=True, slots=True)
class Objective:
    """What is worth most: `one^weight · many^(1 - weight) · keep^(machines - 1)`, as a cost whose least is sought."""

    latency_weight: float
    machine_price: float

    @property
    def machine_cost(self) -> float:
        return -log(max(1e-12, 1 - self.machine_price))

    def cost(self, latency_s: float, bottleneck_s: float, machines: float) -> float:
        """The negative logarithm of the worth."""
        if latency_s == inf or bottleneck_s == inf:
            return inf
        weight = self.latency_weight
        slow = weight * log(max(latency_s, 1e-9)) + (1 - weight) * log(max(bottleneck_s, 1e-9))
        return slow + (machines - 1) * self.machine_cost


@dataclass(frozen=True, slots=True, eq=False)
class SearchSpace:
    """All that an order of machines is judged by."""

    seconds_per_byte: Floats
    overhead_s: Floats
    machines: Ints
    """How many each counts for: a group of ranks is several."""
    work_before: Floats
    """Bytes read for one row by layers `[0, i)`."""
    head_work: float
    """What the last stage reads besides."""
    is_uniform: bool
    """All layers are alike, and so what a machine can hold does not depend on which they are."""
    reach: Ints
    """By machine and first layer, where a stage has to end that is neither the first nor the last, by memory."""
    first_reach: Ints
    """By machine, where a first stage has to end."""
    last_from: Ints
    """By machine, where a last stage has to begin."""
    fits_whole: npt.NDArray[np.bool_]
    hops: Floats
    """Seconds of one row from index to index, with the driver's: infinite where a link is closed."""
    transfers: Floats
    """For how long a row keeps each link busy."""
    objective: Objective

    @property
    def count(self) -> int:
        return len(self.seconds_per_byte)

    @property
    def layers(self) -> int:
        return len(self.work_before) - 1

    @property
    def layer_work(self) -> float:
        """Of one layer; the mean, where they differ."""
        return float(self.work_before[-1]) / self.layers

    @property
    def room(self) -> Ints:
        """The most layers that each machine holds anywhere."""
        return np.asarray((self.reach - np.arange(self.layers + 1)).max(axis=1), np.int64)

    @property
    def most_work(self) -> Floats:
        """The most bytes that any layers read which each machine can hold."""
        return np.asarray((self.work_before[self.reach] - self.work_before).max(axis=1), np.float64)

    def ring_s(self, order: npt.ArrayLike) -> float:
        ring = self._ring(order)
        return float(self.hops[ring[:-1], ring[1:]].sum())

    def busiest_s(self, order: npt.ArrayLike) -> float:
        """Of the links that rows travel; the way back has only tokens."""
        ring = self._ring(order)
        return float(self.transfers[ring[:-2], ring[1:-1]].max())

    def times(self, order: npt.ArrayLike, edges: npt.ArrayLike) -> tuple[float, float]:
        """Latency and slowest stage or link of a layout."""
        stages_s = self.stage_times(order, edges)
        return float(stages_s.sum()) + self.ring_s(order), max(float(stages_s.max()), self.busiest_s(order))

    def stage_times(self, order: npt.ArrayLike, edges: npt.ArrayLike) -> Floats:
        chosen, ends = np.asarray(order, np.int64), np.asarray(edges, np.int64)
        work = self.work_before[ends[1:]] - self.work_before[ends[:-1]]
        work[-1] += self.head_work
        return np.asarray(self.overhead_s[chosen] + self.seconds_per_byte[chosen] * work, np.float64)

    def _ring(self, order: npt.ArrayLike) -> Ints:
        return np.concatenate(([self.count], np.asarray(order, np.int64), [self.count]))


@dataclass(frozen=True, slots=True)
class CountedOrder:
    """An order of machines with how many layers each has, or, where layers differ, about how many."""

    order: tuple[int, ...]
    cost: float
    latency_s: float
    bottleneck_s: float


def layer_limits(space: SearchSpace, bound_s: Floats | float) -> Ints:
    """How many layers of the mean size each machine takes within memory and these times: shape of the times, then
    machines."""
    times = np.asarray(bound_s, np.float64)[..., None]
    with np.errstate(over="ignore"):
        by_time = (times - space.overhead_s) / (space.seconds_per_byte * space.layer_work)
    return np.clip(np.floor(by_time + _ROUNDING), 0, _mean_room(space)).astype(np.int64)


def _mean_room(space: SearchSpace) -> Ints:
    """Layers that each holds; where layers differ, as many as it holds on average and not more."""
    if space.is_uniform:
        return space.room
    spans = space.reach - np.arange(space.layers + 1)
    inside = np.arange(space.layers + 1) < space.layers - space.room[:, None]
    means = (spans * inside).sum(axis=1) / np.maximum(1, inside.sum(axis=1))
    return np.where(inside.any(axis=1), np.floor(means), space.room).astype(np.int64)


class OrderCosts:
    """Costs of orders by closed form: the fastest machines are filled first, within a time for the slowest stage.

    Exact for layers that are alike; for others an estimate that a cut has to confirm.
    """

    def __init__(self, space: SearchSpace) -> None:
        self.space = space
        self.hops = np.minimum(space.hops, CLOSED_S)
        """With a very long time for closed links, so that differences can be taken; no order with one is possible."""
        self.room = _mean_room(space)
        self.layer_s = space.seconds_per_byte * space.layer_work
        self.head_s = space.seconds_per_byte * space.head_work
        self.first_room = np.minimum(space.first_reach, self.room)
        self.last_room = np.minimum(space.layers - space.last_from, self.room)
        self._flat_hops, self._flat_transfers = space.hops.ravel(), space.transfers.ravel()

    def limits(self, order: Ints, bounds_s: Floats) -> Floats:
        """Layers that each may have, whole numbers and less than 1 where it cannot have any: by time, machine."""
        space = self.space
        base_s = space.overhead_s[order]
        base_s[-1] += self.head_s[order[-1]]
        rooms = self.room[order]
        if len(order) == 1:
            rooms[0] = space.layers if space.fits_whole[order[0]] else 0
        else:
            rooms[0], rooms[-1] = self.first_room[order[0]], self.last_room[order[-1]]
        by_time = np.floor((bounds_s[:, None] - base_s) / self.layer_s[order] + _ROUNDING)
        return np.asarray(np.minimum(by_time, rooms), np.float64)

    def stages(self, order: Ints, bounds_s: Floats) -> tuple[Floats, Floats, npt.NDArray[np.bool_]]:
        """Latency of all stages, and the slowest, for each time; and whether no layer is left over."""
        space, count = self.space, len(order)
        limits = self.limits(order, bounds_s)
        layer_s = self.layer_s[order]
        fast = layer_s.argsort(kind="stable")
        more = limits[:, fast] - 1
        sums = more.cumsum(axis=1)
        left = space.layers - count
        taken = np.minimum(np.maximum(left + more - sums, 0), more)
        base_s = space.overhead_s[order]
        base_s[-1] += self.head_s[order[-1]]
        stage_s = (base_s + layer_s)[fast] + layer_s[fast] * taken
        is_possible = (more.min(axis=1) >= 0) & (sums[:, -1] >= left)
        return stage_s.sum(axis=1), stage_s.max(axis=1), is_possible

    def judge(self, order: npt.ArrayLike, bounds_s: Floats) -> CountedOrder:
        """With the best of these times for the slowest stage."""
        chosen = np.asarray(order, np.int64)
        driver = self.space.count
        ring = np.empty(len(chosen) + 2, np.int64)
        ring[0] = ring[-1] = driver
        ring[1:-1] = chosen
        ways = ring[:-1] * (driver + 1) + ring[1:]
        ring_s = float(self._flat_hops[ways].sum())
        if ring_s == inf:
            return CountedOrder(tuple(chosen.tolist()), inf, inf, inf)
        stages_s, slowest_s, is_possible = self.stages(chosen, bounds_s)
        latency_s = stages_s + ring_s
        bottleneck_s = np.maximum(slowest_s, float(self._flat_transfers[ways[:-1]].max()))
        objective = self.space.objective
        weight = objective.latency_weight
        costs = weight * np.log(np.maximum(latency_s, _ROUNDING))
        costs += (1 - weight) * np.log(np.maximum(bottleneck_s, _ROUNDING))
        costs[~is_possible] = inf
        best = int(costs.argmin())
        if costs[best] == inf:
            return CountedOrder(tuple(chosen.tolist()), inf, inf, inf)
        price = (float(self.space.machines[chosen].sum()) - 1) * objective.machine_cost
        return CountedOrder(
            tuple(chosen.tolist()),
            float(costs[best]) + price,
            float(latency_s[best]),
            float(bottleneck_s[best]),
        )
