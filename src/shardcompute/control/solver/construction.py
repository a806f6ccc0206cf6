"""Greedy construction: a ring grown machine by machine, always by the one that is cheapest for the layers it takes."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from shardcompute.control.solver.space import Floats, Ints, OrderCosts


def grow_ring(
    costs: OrderCosts,
    limits: Ints,
    machine_s: float = 0.0,
    seed: int | None = None,
    allowed: npt.NDArray[np.bool_] | None = None,
    most: int | None = None,
) -> list[int] | None:
    """An order in which machines with these limits have all layers, if one is found.

    Each machine is put where its detour is shortest; a machine costs `machine_s` besides what it takes. `seed` is put
    first, only `allowed` ones are used.
    """
    space = costs.space
    count, hops = space.count, space.hops
    is_free = (limits > 0) if allowed is None else (limits > 0) & allowed
    fixed = space.overhead_s + machine_s * space.machines
    ring, left = [count, count], space.layers
    most = min(most or space.layers, space.layers, int(is_free.sum()))
    detours = np.empty((most + 1, count))
    """Of each machine on each link, in no particular order."""
    links = [(count, count)]
    detours[0] = _detours(hops, count, count, 0.0)
    for step in range(most):
        table = detours[: step + 1]
        shortest = table.min(axis=0)
        taken = np.clip(limits, 1, max(1, left))
        with np.errstate(divide="ignore", invalid="ignore"):
            prices = (shortest + fixed + costs.layer_s * taken) / taken
        prices = np.where(is_free, prices, np.inf)
        chosen = seed if seed is not None and step == 0 else int(np.argmin(prices))
        if not prices[chosen] < np.inf:
            break
        at = int(np.argmin(table[:, chosen]))
        before, after = links[at]
        ring.insert(ring.index(before) + 1, chosen)
        links[at] = (before, chosen)
        links.append((chosen, after))
        detours[at] = _detours(hops, before, chosen, float(hops[before, chosen]))
        detours[step + 1] = _detours(hops, chosen, after, float(hops[chosen, after]))
        is_free[chosen] = False
        left -= int(limits[chosen])
        if left <= 0:
            order = ring[1:-1]
            ended = order if _suffices(costs, order, limits) else _with_roomy_ends(costs, order, limits)
            if ended is not None:
                return ended
    return None


def _with_roomy_ends(costs: OrderCosts, order: list[int], limits: Ints) -> list[int] | None:
    """With those at the ends that lose fewest layers to the embedding and the head, if everything fits then."""
    if len(order) < 2:
        return None
    chosen = np.array(order)
    rooms = limits[chosen]
    losses = (rooms - np.minimum(rooms, costs.first_room[chosen]))[:, None] + (
        rooms - np.minimum(rooms, costs.last_room[chosen])
    )
    is_closed = np.isinf(costs.space.hops[-1, chosen])[:, None] | np.isinf(costs.space.hops[chosen, -1])
    barred = (costs.first_room[chosen] < 1)[:, None] | (costs.last_room[chosen] < 1) | is_closed
    losses = np.where(barred | np.eye(len(order), dtype=np.bool_), np.iinfo(np.int64).max, losses)
    first, last = divmod(int(np.argmin(losses)), len(order))
    inner = [each for i, each in enumerate(order) if i not in (first, last)]
    ended = [order[first], *inner, order[last]]
    return ended if _suffices(costs, ended, limits) and costs.space.ring_s(ended) < np.inf else None


def _detours(hops: Floats, before: int, after: int, direct_s: float) -> Floats:
    """What it costs to go through each machine between these two."""
    return np.asarray(hops[before, :-1] + hops[:-1, after] - direct_s, np.float64)


def _suffices(costs: OrderCosts, order: list[int], limits: Ints) -> bool:
    """Whether all layers have room, the ends of the model counted."""
    if len(order) == 1:
        return bool(costs.space.fits_whole[order[0]])
    rooms = limits[order].copy()
    rooms[0] = min(rooms[0], costs.first_room[order[0]])
    rooms[-1] = min(rooms[-1], costs.last_room[order[-1]])
    return bool(rooms.min() > 0 and rooms.sum() >= costs.space.layers)
