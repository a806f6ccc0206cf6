"""Greedy construction: a ring grown machine by machine, always by the one that is cheapest for the layers it takes."""

from __future__ import annotations

import numpy as np

from shardcompute.control.solver.space import CLOSED_S, Ints, OrderCosts


def grow_ring(
    costs: OrderCosts,
    limits: Ints,
    machine_s: float = 0.0,
    seed: int | None = None,
    least: int = 1,
    most: int | None = None,
) -> list[int] | None:
    """An order in which at least so many machines with these limits have all layers, if one is found.

    Each machine is put where its detour is shortest; a machine costs `machine_s` besides what it takes. `seed` is put
    first.
    """
    space = costs.space
    count, hops = space.count, costs.hops
    is_free = limits > 0
    most = min(most or space.layers, space.layers, int(is_free.sum()))
    fixed = np.where(is_free, space.overhead_s + machine_s * space.machines, np.inf)
    sizes = np.maximum(limits, 1).astype(np.float64)
    full, rates = fixed + costs.layer_s * sizes, 1 / sizes
    largest = int(sizes.max(initial=1.0))
    ring, left = [count, count], space.layers
    # Of each machine on each link, in no particular order.
    links, detours = [(count, count)], np.empty((most + 1, count))
    detours[0] = hops[count, :-1] + hops[:-1, count]
    for step in range(most):
        shortest = detours[: step + 1].min(axis=0)
        if left < largest:
            taken = np.clip(sizes, 1, max(1, left))
            full, rates = fixed + costs.layer_s * taken, 1 / taken
        prices = (shortest + full) * rates
        chosen = seed if seed is not None and step == 0 else int(prices.argmin())
        if not prices[chosen] < np.inf or shortest[chosen] >= CLOSED_S / 2:
            break
        at = int(detours[: step + 1, chosen].argmin())
        before, after = links[at]
        ring.insert(ring.index(before) + 1, chosen)
        links[at] = (before, chosen)
        links.append((chosen, after))
        # Hops are the same both ways, but for the driver's.
        near = hops[chosen, :-1]
        detours[at] = hops[before, :-1] + near - hops[before, chosen]
        detours[step + 1] = near + hops[:-1, after] - hops[chosen, after]
        fixed[chosen] = full[chosen] = np.inf
        left -= int(limits[chosen])
        if left <= 0 and step + 1 >= least:
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
    barred |= np.eye(len(order), dtype=np.bool_)
    if barred.all():
        return None
    losses = np.where(barred, np.iinfo(np.int64).max, losses)
    first, last = divmod(int(np.argmin(losses)), len(order))
    inner = [each for i, each in enumerate(order) if i not in (first, last)]
    ended = [order[first], *inner, order[last]]
    return ended if _suffices(costs, ended, limits) and costs.space.ring_s(ended) < np.inf else None


def _suffices(costs: OrderCosts, order: list[int], limits: Ints) -> bool:
    """Whether all layers have room, the ends of the model counted."""
    if len(order) == 1:
        return bool(costs.space.fits_whole[order[0]])
    rooms = limits[order].copy()
    rooms[0] = min(rooms[0], costs.first_room[order[0]])
    rooms[-1] = min(rooms[-1], costs.last_room[order[-1]])
    return bool(rooms.min() > 0 and rooms.sum() >= costs.space.layers)
