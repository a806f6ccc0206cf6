"""The order of sums: one binary tree over the ranks, the same for every element, algorithm and size of array.

Neighbours are added first, (0+1), (2+3), …, then neighbours among these sums, and so on; one without a neighbour goes
up as it is. Five ranks: ((0+1)+(2+3))+4. For two and three ranks that is rank order.

Neither the algorithm nor the place of a number in its array may matter: both depend on how many rows are computed
together, and a row must have the same bits alone and in company. So no algorithm adds in an order of its own. Partial
sums travel only as nodes of this tree: doubling, trees and rows of a mesh whose length is a power of two make nothing
else; other rows send the few nodes that cover them (`nodes_of`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

import numpy as np

from shardcompute.collectives.elements import add
from shardcompute.collectives.group import Array

Node: TypeAlias = tuple[int, int]
"""A node of the tree by the ranks under it, `start` to `stop`."""


def nodes_of(start: int, stop: int, size: int) -> list[Node]:
    """The fewest nodes of the tree over `size` ranks that together hold the ranks from `start` to `stop`."""
    nodes: list[Node] = []
    while start < stop:
        width = 1
        while start % (2 * width) == 0 and min(start + 2 * width, size) <= stop and width < size:
            width *= 2
        nodes.append((start, min(start + width, size)))
        start += width
    return nodes


def sum_ranks(parts: Sequence[Array], out: Array, kept: int = -1) -> Array:
    """The sum of what neighbouring ranks gave, by rank; the first of them is where a node of the tree begins. All parts
    but the one at `kept` are used up. `out` may be one of them."""
    if len(parts) == 1:
        out[...] = parts[0]
        return out
    level = list(parts)
    while len(level) > 2:
        sums: list[Array] = []
        for index in range(0, len(level) - 1, 2):
            low, high = level[index], level[index + 1]
            sums.append(add(low, high, high if index == kept else low))
        if len(level) % 2:
            sums.append(level[-1])
        # A part without a neighbour is still the one that was given.
        kept = len(sums) - 1 if len(level) % 2 and kept == len(level) - 1 else -1
        level = sums
    return add(level[0], level[1], out)


def sum_nodes(nodes: Mapping[Node, Array], size: int) -> Array:
    """The sum over all ranks from nodes that cover the tree."""

    def at(start: int, width: int) -> Array:
        stop = min(start + width, size)
        found = nodes.get((start, stop))
        if found is not None:
            return found
        half = width // 2
        low = at(start, half)
        if start + half >= size:
            return low
        high = at(start + half, half)
        return add(low, high, np.empty_like(low))

    return at(0, 1 << (size - 1).bit_length())
